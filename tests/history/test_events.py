"""Events: whole or not at all, never lost, never in the way."""

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from made_nights import night

from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history.events import (
    REACH_NS,
    JournalEntry,
    Removal,
    add,
    append_journal,
    epoch_start,
    events,
    journal_entry_of,
    journal_files,
    known_events,
    maintenance_of,
    new_event,
    planned,
    record_planned,
    remove,
    software_changes,
)


def event(text="driver 570 to 580", at_ns=5, partition=""):
    return new_event("cirrus", partition, text, at_ns=at_ns, by="me", now_ns=7)


def test_events_are_reported_oldest_first_without_those_that_were_removed(state_dir):
    late, early, wrong = event("late", 9), event("early", 1), event("wrong", 3)
    for one in (late, early, wrong):
        add(state_dir, one)
    remove(state_dir, Removal(wrong.id, "me", 8))
    remove(state_dir, Removal(wrong.id, "somebody else", 9))
    assert events(state_dir) == (early, late)
    assert (state_dir / "events" / f"{wrong.id}.json").exists()


class Elsewhere:
    """A source that holds events of other machines."""

    def __init__(self, *held):
        self.events = lambda: held


def test_events_of_the_source_are_known_too_and_what_the_state_directory_says_of_them_holds(state_dir):
    far, moved, mistake = (event(f"{name} far", at_ns) for name, at_ns in (("a", 30), ("b", 20), ("c", 10)))
    here = dataclasses.replace(moved, text="b here")
    for one in (here, mistake):
        add(state_dir, one)
    remove(state_dir, Removal(mistake.id, "me", 1))
    assert known_events(state_dir, Elsewhere(far, moved, mistake)) == (here, far)
    assert known_events(state_dir, None) == known_events(state_dir, object()) == (here,)


def test_a_pipe_among_events_is_reported_and_not_waited_for(state_dir):
    add(state_dir, one := event())
    path = state_dir / "events" / "0123abcd.json"
    os.mkfifo(path)
    problems = []
    assert events(state_dir, problems.append) == (one,)
    assert problems == [f"{path}: it is no regular file (left out, left as it is)"]


@pytest.mark.parametrize(
    ("of", "system", "partition", "concerns"),
    [
        ("", "cirrus", "standard", True),
        ("gpu", "cirrus", "gpu", True),
        ("gpu", "cirrus", "standard", False),
        ("", "archer2", "standard", False),
    ],
)
def test_an_event_concerns_its_partition_or_all_of_the_system(of, system, partition, concerns):
    assert event(partition=of).concerns(system, partition) is concerns


@pytest.mark.parametrize(("system", "text"), [("", "x"), ("cirrus", " \n "), ("cirrus", "x" * 501)])
def test_an_event_is_one_line_about_a_system(system, text):
    with pytest.raises(UsageError, match="an event"):
        new_event(system, "", text, at_ns=0, by="", now_ns=0)


def test_text_of_any_kind_comes_back_on_one_line(state_dir):
    one = event("  </script> ü\n'\"\t\x1b[31m")
    add(state_dir, one)
    assert events(state_dir) == (one,)
    assert one.text == "</script> ü '\" \x1b[31m"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"id": "0123', "Unterminated"),
        (b'{"id": "\xff"}', "utf-8"),
        (b"[]", "expected an object"),
        (b"x" * (17 << 10), "longer than"),
        (b"[" * 9000, "nested too deeply"),
    ],
)
def test_a_damaged_file_is_reported_and_left_out(state_dir, content, said):
    good = event()
    add(state_dir, good)
    (state_dir / "events" / "01234567.json").write_bytes(content)
    problems = []
    assert events(state_dir, problems.append) == (good,)
    assert [("01234567.json" in problem, said in problem) for problem in problems] == [(True, True)]


def test_an_event_of_a_newer_version_is_named_and_one_under_another_name_left_out(state_dir):
    path = add(state_dir, event())
    data = json.loads(path.read_text())
    path.with_name("aaaaaaaa.json").write_text(json.dumps(data))
    path.write_text(json.dumps({**data, "schema": 99}))
    problems = []
    assert events(state_dir, problems.append) == ()
    assert len(problems) == 2
    assert any("schema 99 is newer" in problem for problem in problems)


def test_what_a_dead_writer_left_is_no_event(state_dir):
    path = add(state_dir, event())
    path.with_name(".89abcdef.json.0000").write_text('{"id": "89ab')
    assert len(events(state_dir)) == 1


def test_nothing_is_left_behind_where_an_event_cannot_be_stored(state_dir):
    state_dir.mkdir()
    (state_dir / "events").write_text("in the way")
    with pytest.raises(StoreError, match="events"):
        add(state_dir, event())
    with pytest.raises(StoreError, match="cannot be listed"):
        events(state_dir)


def test_an_id_that_is_taken_is_not_written_over(state_dir):
    one = event()
    add(state_dir, one)
    with pytest.raises(StoreError, match="it is there already"):
        add(state_dir, one)
    assert [path.name for path in (state_dir / "events").iterdir()] == [f"{one.id}.json"]


def test_many_writers_at_once_lose_nothing(state_dir):
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(lambda number: add(state_dir, event(str(number))), range(16)))
    assert {one.text for one in events(state_dir)} == {str(number) for number in range(16)}


def pumps(until_ns=2 * REACH_NS, partition="gpu"):
    return planned("cirrus", partition, "new pumps", REACH_NS, until_ns, by="systems.yaml")


def test_a_maintenance_that_ends_before_it_begins_is_refused():
    with pytest.raises(UsageError, match="--until is not after --on"):
        new_event("cirrus", "", "pumps", at_ns=5, by="me", now_ns=7, until_ns=5)


def test_no_epoch_begins_with_a_maintenance():
    assert epoch_start([event(), pumps()], "cirrus", "gpu", 1, 9 * REACH_NS) == 5


@pytest.mark.parametrize(
    ("partition", "at_ns", "explained"),
    [
        ("gpu", REACH_NS, True),
        ("gpu", 0, True),
        ("gpu", -1, False),
        ("gpu", 3 * REACH_NS - 1, True),
        ("gpu", 3 * REACH_NS, False),
        ("cpu", REACH_NS, False),
    ],
)
def test_a_maintenance_explains_what_was_due_in_it_and_six_hours_around(partition, at_ns, explained):
    assert (maintenance_of([event(), pumps()], "cirrus", partition, at_ns) is not None) is explained


def test_an_announced_maintenance_is_stored_once_with_its_newest_end(state_dir):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: record_planned(state_dir, [pumps()], 0), range(8)))
    assert events(state_dir) == (pumps(),)
    for until_ns in (3 * REACH_NS, 2 * REACH_NS):  # longer, then as it was
        record_planned(state_dir, [pumps(until_ns), pumps(partition="cpu")], 0)
        assert set(events(state_dir)) == {pumps(until_ns), pumps(partition="cpu")}


@pytest.mark.parametrize(
    ("now_ns", "left"), [(0, 1), (REACH_NS, 2)], ids=["moved", "another one of that name"]
)
def test_a_maintenance_that_is_moved_before_it_begins_replaces_the_earlier_one(state_dir, now_ns, left):
    record_planned(state_dir, [pumps()], 0)
    later = planned("cirrus", "gpu", "new pumps", 9 * REACH_NS, 10 * REACH_NS, by="Slurm")
    record_planned(state_dir, [later], now_ns)
    assert len(events(state_dir)) == left
    assert later in events(state_dir)


def test_a_maintenance_that_a_user_removed_is_not_stored_again(state_dir):
    record_planned(state_dir, [pumps()], 0)
    remove(state_dir, Removal(pumps().id, "me", 8))
    record_planned(state_dir, [pumps(3 * REACH_NS)], 0)
    assert events(state_dir) == ()


# --- the journal


def texts(nights, since_ns=0):
    return [
        (one.kind, one.system, one.partition, one.text, one.at_ns)
        for one in software_changes(nights, since_ns)
    ]


def test_a_driver_and_a_commit_are_named_on_the_night_that_began_to_run_with_them():
    before, after = night(0, commit="a" * 40), night(1, commit="b" * 40, changes={"driver": "580"})
    other = night(2, commit="b" * 40, changes={"driver": "580"})
    place = "cirrus", "standard"
    assert texts([before, after, other]) == [
        ("commit", *place, f"commit {'a' * 12} -> {'b' * 12}", after.created_ns),
        ("environment", *place, "driver 570 -> 580", after.created_ns),
    ]


def test_many_tests_of_one_night_are_one_entry_that_names_them():
    names = [f"suites/test_{letter}.py::test_{letter}" for letter in "cab"]
    nights = [
        night(number, id=f"{name}{number}", benchmark=name, changes={"driver": driver})
        for number, driver in enumerate(("570", "580"))
        for name in names
    ]
    (entry,) = software_changes(nights, 0)
    assert (entry.text, entry.benchmarks) == ("driver 570 -> 580", tuple(sorted(names)))


@pytest.mark.parametrize(
    "nights",
    [
        [night(0), night(1, changes={"driver": "570", "kernel": "6.1"})],
        [night(0), night(1, changes={}), night(2)],
        [night(0), night(1, changes={"driver": "580"}, purpose="manual")],
        [night(0), night(1, changes={"driver": "580"}, attempt=1)],
        [night(0), night(1, changes={"driver": "580"}, branch="mine")],
        [night(0), night(1, benchmark="other", changes={"driver": "580"})],
        [night(0, changes={"host": "n1", "driver": "570"}), night(1, changes={"host": "n2", "driver": "570"})],
    ],
    ids=["a part more", "nothing known", "by hand", "a re-run", "another branch", "another test", "another node"],
)  # fmt: skip
def test_no_change_of_software_is_detected_in(nights):
    assert texts(nights) == []


def test_a_day_has_the_same_entries_whenever_of_that_day_they_are_asked_for():
    nights = [night(number, changes={"driver": str(number)}) for number in range(4)]
    every = software_changes(nights, 0)
    assert len(every) == 3
    for hours in (-2, 0, 2):
        assert software_changes(nights, nights[2].created_ns + hours * 3600 * 10**9) == every[1:]


def test_a_very_long_environment_is_one_short_line():
    earlier = {f"package{number:03d}": "1" for number in range(300)}
    later = dict.fromkeys(earlier, "2" * 5000)
    (entry,) = software_changes([night(0, changes=earlier), night(1, changes=later)], 0)
    assert len(entry.text) <= 500
    assert "\n" not in entry.text


def test_the_journal_has_each_entry_once_in_the_file_of_its_month(state_dir):
    entries = [
        JournalEntry(name, "commit", "cirrus", name, at_ns * 10**9)
        for name, at_ns in (("a", 1), ("b", 3_000_000))
    ]
    append_journal(state_dir, entries)
    append_journal(state_dir, [entries[0], JournalEntry("c", "commit", "cirrus", "c", 2 * 10**9), entries[1]])
    assert [path.name for path in journal_files(state_dir)] == ["1970-01.jsonl", "1970-02.jsonl"]
    found = [
        journal_entry_of(line).id
        for path in journal_files(state_dir)
        for line in path.read_bytes().splitlines()
    ]
    assert found == ["a", "c", "b"]
    assert events(state_dir, pytest.fail) == ()


def test_an_entry_behind_a_torn_line_is_whole(state_dir):
    entries = [JournalEntry(name, "commit", "cirrus", name, 1) for name in "ab"]
    append_journal(state_dir, entries[:1])
    (path,) = journal_files(state_dir)
    path.write_bytes(path.read_bytes()[:-9])
    append_journal(state_dir, entries)
    whole = path.read_bytes().splitlines()[1:]
    assert [journal_entry_of(line).id for line in whole] == ["a", "b"]
