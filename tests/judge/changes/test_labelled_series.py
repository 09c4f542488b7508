"""The measures of labelled series are those of the data set's own benchmark."""

from __future__ import annotations

import pytest

from benchmarks.history_tcpd import Labelled, cover, f1

VALUES = [0.0] * 45


def test_the_first_point_counts_as_a_change_on_both_sides():
    assert f1(Labelled(VALUES, [set(), {10}, {40}]), []) == pytest.approx(0.8)


def test_precision_is_held_against_all_annotators_and_recall_is_their_mean():
    assert f1(Labelled(VALUES, [set(), {10}, {40}]), [10]) == pytest.approx(0.909, abs=0.001)


def test_a_change_within_the_margin_counts_once():
    assert f1(Labelled(VALUES, [{20}]), [17, 23]) == pytest.approx(0.8)


def test_cover_is_the_jaccard_index_of_levels_weighted_by_their_length():
    assert cover(Labelled(VALUES, [{10, 20}, {10}, {0, 5}]), [10, 20]) == pytest.approx(0.796, abs=0.001)
