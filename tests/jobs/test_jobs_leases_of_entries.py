"""Leases of single allocations: they outlive whoever took them over, are given back, and count only when nobody watches."""

import json
import os
import time
from unittest.mock import Mock

import pytest
from ledgers import claim, entry, file_of, grow_old, ids, later, left_behind, rewrite_owner, states
from processes import deaths, killed_after

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs import ledger
from pytest_mlhpc.jobs.ledger import Ledger, adopt
from pytest_mlhpc.jobs.ledger_entry import LedgerRun
from pytest_mlhpc.jobs.ledger_files import open_entries, read_session


@pytest.fixture
def mine(tmp_path):
    """Return this session's ledger, in which one job stands."""
    made = Ledger(tmp_path, "s1")
    made.submitted(entry("job"))
    return made


@pytest.mark.parametrize("torn", [False, True])
def test_a_session_that_dies_at_any_change_of_its_close_loses_no_lease_and_no_job(tmp_path, torn):
    """It adopted four, ended one, gives one back, is not sure of one, and leaves one as it came."""

    def leave(state):
        left_behind(state, "first", *map(entry, ["done", "kept", "back", "bad"]), until_ns=later())

    def adopts_and_closes(state):
        second = Ledger(state, "second")
        adopt(second, lambda one: True)
        second.ended("done")
        second.release(["back"], later(48))
        second.release(["bad"], 0)
        second.close()

    turns = list(deaths(tmp_path, leave, adopts_and_closes, torn=torn))
    for state in turns:
        found = states(state)
        assert found.pop("done", "detached") == "detached"
        assert found.pop("bad") in {"detached", "expired"}
        assert found == {"kept": "detached", "back": "detached"}, state
        third = Ledger(state, "third")
        for one in adopt(third, lambda one: True).adopted:
            third.ended(one.id)
        third.close()
        grow_old(state)  # the file of a session that died before it had written its owner
        claim(state, "fourth")
        assert list((state / "ledger").glob("*.jsonl")) == [], state
    assert states(turns[-1]) == {}
    assert len(turns) > 20


@pytest.mark.parametrize("torn", [False, True])
def test_a_session_that_dies_at_any_change_while_it_submits_and_detaches_leaves_what_it_submitted(
    tmp_path, torn
):
    def submits_and_detaches(state):
        mine = Ledger(state, "mine")
        for name in ("a", "b"):
            mine.submitted(entry(name))
            (state / f"submitted-{name}").touch()
        mine.ended("a")
        mine.detach(later())

    seen = []
    for state in deaths(tmp_path, lambda state: None, submits_and_detaches, torn=torn):
        found = states(state)
        submitted = {path.name[-1] for path in state.glob("submitted-*")}
        assert submitted - {"a"} <= set(found) <= {"a", "b"}, state
        seen.append(found)
        last = Ledger(state, "last")
        result = adopt(last, lambda one: True)
        assert ids(result.adopted) == sorted(found)
        for one in found:
            last.ended(one)
        last.close()
        grow_old(state)
        claim(state, "fourth")
        assert list(state.glob("ledger/*.jsonl")) == [], state
    assert seen[-1] == {"b": "detached"}
    assert {"a": "expired", "b": "expired"} in seen


def test_a_lease_is_handed_on_through_adopters_that_die_and_ends_at_its_time(tmp_path, monkeypatch):
    until_ns = later()
    left_behind(tmp_path, "first", entry("job"), until_ns=until_ns)
    for name in ("second", "third"):
        killed_after(lambda name=name: claim(tmp_path, name))
    (found,) = open_entries(tmp_path).entries
    assert (found.state, found.lease.until_ns) == ("detached", until_ns)
    monkeypatch.setattr("pytest_mlhpc.jobs.ledger_files.shared_now_ns", lambda folder: until_ns + 1)
    (found,) = open_entries(tmp_path).entries
    assert found.state == "expired"
    assert found.why.startswith("its lease ended 20")


def test_an_adopter_that_is_killed_hands_on_no_lease_that_was_never_given(tmp_path):
    left_behind(tmp_path, "dead", entry("job"))
    killed_after(lambda: claim(tmp_path, "second"))
    assert states(tmp_path) == {"job": "expired"}


def test_a_lease_counts_when_its_session_is_killed_and_not_before_and_never_for_processes_of_this_machine(
    tmp_path,
):
    def leases_and_looks():
        mine = Ledger(tmp_path, "s1")
        mine.submitted(entry("early"))
        mine.submitted(entry("here", scheduler="local"))
        mine.lease(later(1))
        mine.lease(later(2))
        mine.submitted(entry("late"))
        assert states(tmp_path) == dict.fromkeys(["early", "here", "late"], "held")
        assert claim(tmp_path, "s2").adopted == []

    killed_after(leases_and_looks)
    assert states(tmp_path) == {"early": "detached", "here": "expired", "late": "detached"}
    assert read_session(tmp_path / "ledger" / "s1.jsonl").until_ns > later(1.5)


def test_a_session_that_detaches_leaves_its_jobs_though_its_process_lives_on(tmp_path, mine):
    mine.lease(later())
    mine.detach(later(2))
    assert states(tmp_path) == {"job": "detached"}


def test_what_was_taken_over_and_given_back_stands_when_the_session_ends(tmp_path):
    left_behind(tmp_path, "first", *map(entry, ["done", "kept", "back", "bad"]), until_ns=later())
    second = Ledger(tmp_path, "second")
    assert ids(adopt(second, lambda one: True).adopted) == ["back", "bad", "done", "kept"]
    second.submitted(entry("own"))
    second.ended("done")
    second.release(["back", "unknown"], later(48))
    second.release(["bad"], 0)
    assert set(states(tmp_path).values()) == {"held"}
    second.close()
    assert states(tmp_path) == {"kept": "detached", "back": "detached", "bad": "expired", "own": "expired"}
    found = {one.submitted.id: one for one in open_entries(tmp_path).entries}
    assert found["back"].lease.until_ns > later(47)
    assert found["kept"].lease.until_ns < later(2)
    assert found["bad"].why.endswith("was done with it, and not sure that it is gone")
    assert ids(claim(tmp_path, "third").adopted) == ["back", "bad", "kept", "own"]


def test_detaching_renews_the_leases_of_what_was_taken_over(tmp_path):
    left_behind(tmp_path, "first", entry("job"), until_ns=later())
    second = Ledger(tmp_path, "second")
    adopt(second, lambda one: True)
    second.detach(later(48))
    (found,) = open_entries(tmp_path).entries
    assert found.lease.until_ns > later(47)


def test_runs_whose_records_are_stored_stay_known_to_whoever_takes_over_and_gives_back(tmp_path):
    runs = tuple(LedgerRun(f"r{n}", f"t::{n}", "b", 0, "d") for n in range(4))
    first = Ledger(tmp_path, "first")
    first.submitted(entry("job", runs=runs))
    first.concluded(["r1", "of nobody"])
    first.concluded([])
    first.detach(later())
    second = Ledger(tmp_path, "second")
    (found,) = adopt(second, lambda one: True).adopted
    assert found.concluded == ("r1",)
    second.concluded(["r3", "r1"])
    second.release(["job"], later())
    second.close()
    (found,) = claim(tmp_path, "third").adopted
    assert (found.concluded, found.runs) == (("r1", "r3"), runs)


def test_a_session_that_submitted_nothing_concludes_nothing(tmp_path):
    mine = Ledger(tmp_path / "state", "s1")
    mine.concluded(["r1"])
    mine.lease(later())
    mine.release(["r1"], later())
    mine.close()
    assert not (tmp_path / "state").exists()


def test_a_lease_ends_by_the_clock_of_the_file_server(tmp_path, monkeypatch):
    mine = Ledger(tmp_path, "s1")
    assert abs(mine.until(60) - time.time_ns()) < 600 * 10**9  # no folder yet
    mine.submitted(entry("job"))
    ahead = later(24 * 365)
    monkeypatch.setattr(ledger, "shared_now_ns", lambda folder: ahead)
    assert mine.until(1.5) == ahead + 1_500_000_000


def test_a_lease_that_cannot_be_written_is_reported_and_the_file_is_closed(tmp_path, monkeypatch, mine):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(StoreError, match=r"s1\.jsonl: No space left on device"):
            mine.detach(later())
    rewrite_owner(mine.path, start=1)
    assert states(tmp_path) == {"job": "expired"}


@pytest.mark.parametrize(
    ("of_session", "line"), [(True, {"event": "lease", "until_ns": "soon"}), (True, {"event": "lease"}), (False, {"event": "lease"}),
     (False, {"event": "adopted", "by": "x"}), (False, {"event": "concluded", "runs": 3}), (False, {"event": "submitted"})],
)  # fmt: skip
def test_a_line_that_makes_no_sense_is_skipped(tmp_path, of_session, line):
    path = left_behind(tmp_path, "first", entry("job"), until_ns=later())
    with (path if of_session else file_of(tmp_path, "job")).open("a") as file:
        file.write(f"{json.dumps({'schema': 4, **line})}\n")
    survey = open_entries(tmp_path)
    assert [one.state for one in survey.entries] == ["detached"]
    assert "damaged line skipped" in survey.left_alone[0]
