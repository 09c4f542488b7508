"""What must hold of change points for any figures."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.judge.changes import Attempts, find, lasting_drop
from pytest_mlhpc.judge.fence import Detector

ANY = st.floats()
#: Levels of at least a few points each, so that there is something to find.
LEVELS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 30)), max_size=5).map(
    lambda levels: [value for value, count in levels for _ in range(count)]
)
SETTINGS = st.sampled_from([Detector(), Detector(magnitude=0.0, floor=0.0, share=0.1), Detector(shortest=1)])


@given(values=st.one_of(st.lists(ANY, max_size=60), LEVELS), detector=SETTINGS)
def test_changes_are_in_order_and_lie_in_their_ranges(values, detector):
    changes = find(values, detector)
    indices = [change.index for change in changes]
    assert indices == sorted(set(indices))
    for change in changes:
        assert 0 < change.first <= change.index <= change.last < len(values)
        assert math.isfinite(values[change.index])
        assert 0 <= change.confidence < 1


@given(values=LEVELS, gap=st.integers(0, 100))
def test_nights_without_a_figure_move_no_change(values, gap):
    at = gap % (len(values) + 1)
    holed = [*values[:at], math.nan, *values[at:]]
    moved = [change.index - (change.index > at) for change in find(holed)]
    assert moved == [change.index for change in find(values)]


@given(
    nights=st.lists(st.tuples(ANY, st.lists(ANY, max_size=4).map(tuple), st.booleans()), max_size=90),
    better=st.sampled_from(["higher", "lower", "none"]),
)
def test_a_drop_is_always_one_to_the_worse(nights, better):
    drop = lasting_drop([Attempts(*night) for night in nights], better)
    assert drop is None or (drop.score > 0 and drop.nights >= 1 and better != "none")
