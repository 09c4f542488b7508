"""The measures of labelled series are those of the data set's own benchmark."""

import pytest

from benchmarks.history_tcpd import Labelled, cover, f1

VALUES = [0.0] * 45


@pytest.mark.parametrize(
    ("annotations", "found", "score"),
    [
        pytest.param([set(), {10}, {40}], [], 0.8, id="the first point counts as a change on both sides"),
        pytest.param(
            [set(), {10}, {40}], [10], 0.909, id="precision is of all annotators, recall is their mean"
        ),
        pytest.param([{20}], [17, 23], 0.8, id="a change within the margin counts once"),
    ],
)
def test_a_score_holds_what_was_found_against_the_annotations(annotations, found, score):
    assert f1(Labelled(VALUES, annotations), found) == pytest.approx(score, abs=0.001)


def test_cover_is_the_jaccard_index_of_levels_weighted_by_their_length():
    assert cover(Labelled(VALUES, [{10, 20}, {10}, {0, 5}]), [10, 20]) == pytest.approx(0.796, abs=0.001)
