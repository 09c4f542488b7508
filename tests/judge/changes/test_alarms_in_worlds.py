"""What quorum and nights together tell of made-up nights; `python -m benchmarks history` does it with many more."""

import pytest

from benchmarks.history_alarms import LATE, false_alarms, found, together
from benchmarks.history_worlds import WORLDS, nights


@pytest.mark.parametrize("world", WORLDS)
def test_alarms_are_rarely_false(world):
    assert false_alarms(together(nights(world, 20, 0.0, seed=5))) <= 0.8


@pytest.mark.parametrize("world", WORLDS)
def test_a_drop_of_five_percent_is_found_by_the_second_night_or_what_its_world_allows(world):
    dropped = nights(world, 10, 0.05, seed=5)
    told = found(together(dropped), dropped.drops)
    assert told.share == 1.0
    assert told.delay <= LATE.get(world, 1)
