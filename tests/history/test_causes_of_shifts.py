"""What else changed: only what was one thing before and another after."""

from dataclasses import replace

import pytest
from worlds import record

from pytest_mlhpc.history.events import Event, epoch_start, events_near
from pytest_mlhpc.history.level_changes import Cause, causes
from pytest_mlhpc.history.series import Point, night_of


def points(environments, commits="", nodes=()):
    found = []
    for number, environment in enumerate(environments):
        night = night_of(record(number, created_ns=number * 100))
        where = {"commit": commits[number : number + 1], "nodes": tuple(nodes[number : number + 1])}
        found.append(Point(replace(night, changes=environment, **where), 1.0))
    return found


OLD, NEW = {"driver": "570", "torch": "2.4"}, {"driver": "580", "torch": "2.4"}


DRIVER = Cause("driver", "570", "580")


@pytest.mark.parametrize(
    ("nights", "first", "last", "found"),
    [
        (points([OLD] * 4 + [NEW] * 3), 4, 4, (DRIVER,)),
        (points([OLD, NEW, OLD, OLD, NEW, NEW]), 4, 4, ()),
        (points([OLD, OLD, NEW, OLD, NEW, NEW]), 2, 4, (DRIVER,)),
        (points([OLD] * 3 + [NEW] * 3, "aabccd"), 3, 3, (Cause("commit", "b", "c"), DRIVER)),
        (points([{}] * 6, nodes=["a", "b", "c", "n7", "n7", "n7"]), 3, 3, (Cause("nodes", "a+b+c", "n7"),)),
        (points([{}] * 6, nodes=["a", "b", "c", "d", "e", "f"]), 3, 3, ()),
        (points([OLD, NEW]), 0, 0, ()),
    ],
    ids=[
        "it differs on all nights",
        "it went back and forth",
        "nights on which it may have changed already are not asked",
        "commits come first",
        "the new nodes are always the same",
        "other nodes each night",
        "nothing was before it",
    ],
)
def test_what_was_one_thing_before_and_another_after_is_a_candidate(nights, first, last, found):
    assert causes(nights, first, last) == found


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        ({}, {"env_OMP_PLACES": "cores"}, "env_OMP_PLACES (absent) -> cores"),
        ({"image": "a"}, {}, "image a -> (absent)"),
    ],
)
def test_what_appeared_or_went_is_a_candidate(before, after, reported):
    assert [str(cause) for cause in causes(points([before] * 3 + [after] * 3), 3, 3)] == [reported]


def at(moment, system="cirrus", partition=""):
    return Event(str(moment), system, "x", moment, partition)


def test_events_near_a_change_are_named_nearest_first():
    some = [at(moment) for moment in (0, 250, 390, 480, 620)]
    found = events_near([*some, at(400, "other"), at(400, partition="other")], points([{}] * 8), 4, 4)
    assert [event.at_ns for event in found] == [390, 480, 250]


@pytest.mark.parametrize(
    ("system", "baseline", "begun"), [("cirrus", 50, 200), ("cirrus", 250, 250), ("other", 0, 0)]
)
def test_an_epoch_begins_with_the_baseline_or_with_the_newest_event(system, baseline, begun):
    some = [at(100), at(300, partition="gpu"), at(200, partition="standard"), at(900)]
    assert epoch_start(some, system, "standard", baseline, 500) == begun
