"""What else changed: only what was one thing before and another after."""

from dataclasses import replace

from worlds import record

from pytest_mlhpc.history.causes import Cause, causes
from pytest_mlhpc.history.epochs import epoch_start, near
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.nights import night_of
from pytest_mlhpc.history.series import Point


def points(environments, commits="", nodes=()):
    found = []
    for number, environment in enumerate(environments):
        night = night_of(record(number, created_ns=number * 100))
        where = {"commit": commits[number : number + 1], "nodes": tuple(nodes[number : number + 1])}
        found.append(Point(replace(night, changes=environment, **where), 1.0))
    return found


OLD, NEW = {"driver": "570", "torch": "2.4"}, {"driver": "580", "torch": "2.4"}


def test_what_differs_on_all_nights_is_a_candidate():
    assert causes(points([OLD] * 4 + [NEW] * 3), 4, 4) == (Cause("driver", "570", "580"),)


def test_what_went_back_and_forth_is_none():
    assert causes(points([OLD, NEW, OLD, OLD, NEW, NEW]), 4, 4) == ()


def test_nights_on_which_it_may_have_changed_already_are_not_asked():
    assert causes(points([OLD, OLD, NEW, OLD, NEW, NEW]), 2, 4) == (Cause("driver", "570", "580"),)


def test_what_appeared_or_went_is_a_candidate():
    (appeared,) = causes(points([{}] * 3 + [{"env_OMP_PLACES": "cores"}] * 3), 3, 3)
    assert str(appeared) == "env_OMP_PLACES (absent) -> cores"
    (gone,) = causes(points([{"image": "a"}] * 3 + [{}] * 3), 3, 3)
    assert str(gone) == "image a -> (absent)"


def test_the_commits_around_the_change_come_first():
    found = causes(points([OLD] * 3 + [NEW] * 3, "aabccd"), 3, 3)
    assert found == (Cause("commit", "b", "c"), Cause("driver", "570", "580"))


def test_other_nodes_count_only_if_the_new_ones_are_always_the_same():
    found = causes(points([{}] * 6, nodes=["a", "b", "c", "n7", "n7", "n7"]), 3, 3)
    assert found == (Cause("nodes", "a+b+c", "n7"),)
    assert causes(points([{}] * 6, nodes=["a", "b", "c", "d", "e", "f"]), 3, 3) == ()


def test_a_change_at_the_first_night_has_nothing_to_compare_with():
    assert causes(points([OLD, NEW]), 0, 0) == ()


def at(moment, system="cirrus", partition=""):
    return Event(str(moment), system, "x", moment, partition)


def test_events_near_a_change_are_named_nearest_first():
    some = [at(moment) for moment in (0, 250, 390, 480, 620)]
    found = near([*some, at(400, "other"), at(400, partition="other")], points([{}] * 8), 4, 4)
    assert [event.at_ns for event in found] == [390, 480, 250]


def test_an_epoch_begins_with_the_baseline_or_with_the_newest_event():
    some = [at(100), at(300, partition="gpu"), at(200, partition="standard"), at(900)]
    assert epoch_start(some, "cirrus", "standard", 50, 500) == 200
    assert epoch_start(some, "cirrus", "standard", 250, 500) == 250
    assert epoch_start(some, "other", "standard", 0, 500) == 0
