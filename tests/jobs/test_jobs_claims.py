"""Claiming what sessions left: by whom, in which state, and what becomes of it when a session dies meanwhile."""

import itertools
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from ledgers import claim, entry, file_of, grow_old, ids, later, left_behind, states
from processes import DIED, deaths, die_at_change, run, run_at_once
from running_suites import wait_for

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs import ledger_files
from pytest_mlhpc.jobs.ledger import Ledger, adopt
from pytest_mlhpc.jobs.ledger_files import DEAD_S, open_entries, sessions_in_ledgers


def anything(_entry):
    return True


def nothing(_entry):
    return False


def a_or_b(one):
    return one.id in {"a", "b"}


def assert_four_are_open(state):
    found = Counter(one.submitted.id for one in open_entries(state).entries)
    assert found == Counter(["a", "b", "c", "kept"]), state


def files(state):
    """Return the names of the ledger's files, without those by which sessions ask the file server's clock."""
    return sorted(path.name for path in (state / "ledger").iterdir() if not path.name.startswith(".clock-"))


def outcome(result):
    """Return the ids that a claim adopted, found expired, and left."""
    return ids(result.adopted), ids(result.expired), ids(result.left)


def claims_and_ends(state, name, die_at=None):
    """Claim all, note what came in a file, and end it; or die before a change of the disk."""
    if die_at is not None:
        die_at_change(die_at)
    ledger = Ledger(state, name)
    result = adopt(ledger, anything)
    found = ids(result.adopted + result.expired)
    (state / f"got-{name}.new").write_text(json.dumps(found))
    (state / f"got-{name}.new").rename(state / f"got-{name}")
    for one in found:
        ledger.ended(one)
    ledger.close()


def got(state):
    """Return what each claimer has noted."""
    return [json.loads(path.read_text()) for path in sorted(state.glob("got-*")) if not path.suffix]


def leave_four(state):
    """Leave the jobs a, b and kept of a detached session, and c of a dead one."""
    left_behind(state, "detached", *map(entry, ["a", "b", "kept"]), until_ns=later())
    left_behind(state, "dead", entry("c"))


def test_jobs_belong_to_living_sessions_can_be_adopted_from_detached_ones_and_expire_with_dead_ones(tmp_path):
    mine = Ledger(tmp_path, "living")
    mine.submitted(entry("held"))
    left_behind(tmp_path, "detached", entry("good"), until_ns=later())
    left_behind(tmp_path, "late", entry("over"), until_ns=later(-1))
    left_behind(tmp_path, "dead", entry("lost"))
    assert states(tmp_path) == {"held": "held", "good": "detached", "over": "expired", "lost": "expired"}


@pytest.mark.parametrize(
    ("owner", "expired"),
    [
        pytest.param({"pid": os.getpid()}, False, id="alive"),
        pytest.param({"boot": "another boot"}, True, id="before a reboot"),
        pytest.param({"start": 1}, True, id="its process id is another's now"),
        pytest.param({"uid": os.getuid() + 1, "start": 1}, False, id="of another user"),
        pytest.param({"host": "elsewhere"}, False, id="of another host"),
    ],
)
def test_only_sessions_of_this_user_whose_owner_is_dead_have_expired(tmp_path, owner, expired):
    left_behind(tmp_path, "theirs", entry("job"), **owner)
    assert ids(claim(tmp_path, "me", nothing).expired) == ["job"] * expired
    assert claim(tmp_path, "me2", nothing).expired == []


def test_the_file_of_a_dead_session_with_nothing_open_is_removed(tmp_path):
    left_behind(tmp_path, "dead")
    left_behind(tmp_path, "alive", pid=os.getpid())
    left_behind(tmp_path, "elsewhere", host="login2")
    assert outcome(claim(tmp_path)) == ([], [], [])
    assert files(tmp_path) == ["alive.jsonl", "elsewhere.jsonl"]


def test_a_claimer_gets_what_it_wants_and_what_has_expired_and_leaves_the_rest(tmp_path):
    left_behind(tmp_path, "detached", entry("wanted"), entry("not"), until_ns=later())
    left_behind(tmp_path, "dead", entry("lost"), entry("wanted-too"))
    result = claim(tmp_path, "me", lambda one: one.id.startswith("wanted"))
    assert outcome(result) == (["wanted", "wanted-too"], ["lost"], ["not"])
    assert states(tmp_path) == {"wanted": "held", "wanted-too": "held", "lost": "held", "not": "detached"}
    assert result.notes == result.left_alone == []
    assert files(tmp_path) == [
        *("detached.jsonl", "lost@me.jsonl", "me.jsonl", "not@detached.jsonl"),
        *("wanted-too@me.jsonl", "wanted@me.jsonl"),
    ]


def test_files_of_which_nothing_is_wanted_are_not_touched(tmp_path):
    path = left_behind(tmp_path, "detached", entry("not"), until_ns=later())
    before = [(one.stat().st_ino, one.stat().st_mtime_ns) for one in (path, file_of(tmp_path, "not"))]
    assert ids(claim(tmp_path, "me", nothing).left) == ["not"]
    assert [(one.stat().st_ino, one.stat().st_mtime_ns) for one in (path, file_of(tmp_path, "not"))] == before
    assert not (tmp_path / "ledger" / "me.jsonl").exists()


def test_what_was_adopted_keeps_all_that_is_known_of_it(tmp_path):
    job = entry("job", directory="/shared/x", time_limit_s=60.0, nodes=2, cluster="c")
    first, second = Ledger(tmp_path, "first"), Ledger(tmp_path, "second")
    first.submitted(job)
    first.accepted("job", "4711")
    first.detach(later())
    adopt(second, anything)
    second.detach(later())
    assert claim(tmp_path, "third").adopted == [replace(job, native_id="4711", session="first")]


@pytest.mark.parametrize("torn", [False, True])
def test_a_claimer_may_die_before_and_within_every_single_change_of_the_disk(tmp_path, torn):
    turns = list(deaths(tmp_path, leave_four, lambda state: claim(state, "claimer", a_or_b), torn=torn))
    for state in turns:
        assert_four_are_open(state)
        assert states(state) == {"a": "detached", "b": "detached", "c": "expired", "kept": "detached"}
        assert outcome(claim(state, "last", a_or_b)) == (["a", "b"], ["c"], ["kept"]), state
        grow_old(state)  # the file of a session that died before it had written its owner
        assert ids(claim(state, "nobody").adopted) == ["kept"]
        assert files(state) == [
            *(
                "a@last.jsonl",
                "b@last.jsonl",
                "c@last.jsonl",
                "kept@nobody.jsonl",
                "last.jsonl",
                "nobody.jsonl",
            )
        ]
    assert len(turns) > 15  # as many changes does a claim make at least


def test_a_second_claimer_may_die_at_any_change_after_a_first_that_died_at_any(tmp_path):
    for first in deaths(tmp_path, leave_four, lambda state: claim(state, "first", a_or_b)):
        for state in deaths(
            tmp_path / "second" / first.name,
            partial(shutil.copytree, first),
            lambda state: claim(state, "second", a_or_b),
            numbers=range(int(first.name) % 6, 200, 6),
        ):
            assert states(state) == {"a": "detached", "b": "detached", "c": "expired", "kept": "detached"}
            assert outcome(claim(state, "last", a_or_b)) == (["a", "b"], ["c"], ["kept"]), state
            grow_old(state)  # the files of sessions that died before they had written their owner
            claim(state, "nobody")
            assert len(files(state)) == 6


@pytest.mark.servers
@pytest.mark.parametrize("deadly", [True, False], ids=["die at random", "live"])
def test_of_claimers_at_once_that_none_loses_a_job_or_gets_one_twice(tmp_path, deadly):
    chance = random.Random(20261121)  # noqa: S311 - to repeat it
    for turn in range(24):
        state = tmp_path / "turns" / str(turn)
        leave_four(state)
        ends = [chance.choice([*range(25), None]) if deadly else None for _ in range(4)]
        codes = run_at_once([partial(claims_and_ends, state, f"c{n}", at) for n, at in enumerate(ends)])
        assert set(codes) <= ({0, DIED} if deadly else {0})
        noted = [*itertools.chain(*got(state))]
        last = claim(state, "last")
        left = ids(last.adopted + last.expired)
        # A claimer that died after its note had perhaps not ended what it got: it comes once more.
        assert set(noted) | set(left) == {"a", "b", "c", "kept"}, (turn, ends)
        assert len(noted) == len(set(noted)), (turn, ends)
        assert deadly or not [*left, *files(state)]


@pytest.mark.servers
def test_of_sessions_at_once_that_want_different_jobs_of_one_file_each_gets_its_own(tmp_path):
    for turn in range(5):
        state = tmp_path / "turns" / str(turn)
        left_behind(state, "detached", *(entry(f"job{n}") for n in range(3)), until_ns=later())

        def race(number, state=state):
            result = claim(state, f"c{number}", lambda one: one.id == f"job{number}")
            (state / f"got-{number}").write_text(json.dumps(ids(result.adopted)))
            # The dead have no jobs: all live until the last is through.
            wait_for(lambda: len(list(state.glob("got-*"))) == 3)

        assert run_at_once([partial(race, number) for number in range(3)]) == [0, 0, 0]
        assert got(state) == [["job0"], ["job1"], ["job2"]], turn


def test_a_file_that_is_renamed_while_the_folder_is_listed_is_found(tmp_path, monkeypatch):
    left_behind(tmp_path, "detached", entry("a"), until_ns=later())
    here, there = file_of(tmp_path, "a"), tmp_path / "ledger" / "a@other.jsonl"
    listed = ledger_files._list_folder

    def listing(folder):
        found = listed(folder)
        if here.exists():
            here.rename(there)
            return [path for path in found if path != here]
        return found

    monkeypatch.setattr(ledger_files, "_list_folder", listing)
    files = ledger_files.LedgerSnapshot(tmp_path)
    assert (files.allocations, files.moved) == ([there], False)


def test_a_folder_that_never_stands_still_ends_no_session(tmp_path, monkeypatch):
    left_behind(tmp_path, "dead")
    count, listed = itertools.count(), ledger_files._list_folder
    monkeypatch.setattr(
        ledger_files, "_list_folder", lambda folder: [*listed(folder), folder / f"{next(count)}@x.jsonl"]
    )
    assert claim(tmp_path).notes == []
    assert (tmp_path / "ledger" / "dead.jsonl").exists()


def test_a_file_that_is_claimed_between_listing_and_claim_is_the_faster_ones(tmp_path):
    left_behind(tmp_path, "detached", entry("a"), entry("b"), until_ns=later())

    def wanted(_entry):
        for path in (tmp_path / "ledger").glob("a@detached.jsonl"):
            path.rename(tmp_path / "ledger" / "a@faster.jsonl")
        return True

    assert outcome(claim(tmp_path, "me", wanted)) == (["b"], [], [])


def test_a_claim_whose_answer_was_lost_is_a_claim(tmp_path, monkeypatch):
    left_behind(tmp_path, "detached", entry("a"), until_ns=later())
    rename = os.rename

    def renamed_already(old, new):
        rename(old, new)
        rename(old, new)

    monkeypatch.setattr(os, "rename", renamed_already)
    assert ids(claim(tmp_path).adopted) == ["a"]


def test_what_a_dead_claimer_had_ended_is_not_given_again(tmp_path):
    left_behind(tmp_path, "detached", entry("a"), entry("b"), until_ns=later())

    def claims_ends_one_and_dies():
        ledger = Ledger(tmp_path, "first")
        adopt(ledger, anything)
        ledger.ended("a")
        os._exit(DIED)

    assert run(claims_ends_one_and_dies) == DIED
    assert ids(claim(tmp_path, "second").adopted) == ["b"]


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param({"host": "login2"}, id="on another host"),
        pytest.param({"pid_space": "pid:[1]"}, id="in another container of the same host name"),
    ],
)
def test_an_owner_elsewhere_lives_while_its_file_is_touched(tmp_path, elsewhere):
    path = left_behind(tmp_path, "theirs", entry("job"), pid=1, start=1, **elsewhere)
    assert states(tmp_path) == {"job": "held"}
    os.utime(path, (time.time() - DEAD_S - 5,) * 2)
    assert states(tmp_path) == {"job": "expired"}
    assert ids(claim(tmp_path, "me", nothing).expired) == ["job"]


@pytest.mark.parametrize("jump_s", [-86400 * 400, 86400 * 400])
def test_a_clock_of_this_host_that_jumps_ends_no_lease_and_prolongs_none(tmp_path, monkeypatch, jump_s):
    left_behind(tmp_path, "elsewhere", entry("watched"), host="login2")
    left_behind(tmp_path, "detached", entry("good"), until_ns=later())
    left_behind(tmp_path, "late", entry("over"), until_ns=later(-1))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + jump_s * 10**9)
    monkeypatch.setattr(time, "time", lambda: real() / 1e9 + jump_s)
    assert states(tmp_path) == {"watched": "held", "good": "detached", "over": "expired"}


def test_a_session_whose_jobs_were_taken_over_notices_and_submits_no_more(tmp_path):
    owner = Ledger(tmp_path, "suspended")
    owner.submitted(entry("job"))
    owner.submitted(entry("other"))
    assert owner.beat()
    taken = file_of(tmp_path, "job").rename(tmp_path / "ledger" / "job@faster.jsonl")
    before = taken.read_bytes()
    owner._beaten = 0.0
    assert not owner.beat()
    with pytest.raises(StoreError, match="taken over by another session"):
        owner.submitted(entry("more"))
    owner.close()
    assert taken.read_bytes() == before
    assert states(tmp_path)["other"] == "expired"  # it left what was still its own


def test_a_line_for_an_allocation_that_was_taken_over_is_an_error_and_not_written(tmp_path):
    owner = Ledger(tmp_path, "suspended")
    owner.submitted(entry("job"))
    file_of(tmp_path, "job").rename(tmp_path / "ledger" / "job@faster.jsonl")
    with pytest.raises(StoreError, match=r"job@suspended\.jsonl: another session has taken it over"):
        owner.accepted("job", "4711")
    assert not owner.beat()
    assert files(tmp_path) == ["job@faster.jsonl", "suspended.jsonl"]


def test_local_processes_of_another_host_are_nobody_elses(tmp_path):
    jobs = entry("job"), entry("processes", scheduler="local")
    path = left_behind(tmp_path, "x", *jobs, host="login2", start=1)
    os.utime(path, (1, 1))
    assert outcome(claim(tmp_path)) == (["job"], [], ["processes"])
    assert ids(claim(tmp_path, "me2").left) == ["processes"]


def write(content):
    return lambda path: path.write_bytes(content)


OLDER, NEWER = b'{"schema": 3, "event": "opened"}\n', b'{"schema": 5, "event": "opened"}\n'


@pytest.mark.parametrize("allocation", [False, True], ids=["session", "allocation"])
@pytest.mark.parametrize(
    ("make", "note"),
    [
        pytest.param(write(OLDER), ":1: written by an older version (schema 3; this version reads 4 alone)", id="of an older version"),
        pytest.param(write(NEWER), ":1: written by a newer version (schema 5; this version reads 4 alone)", id="of a newer version"),
        pytest.param(write(b"[]\n"), ": its first line is missing", id="nobody's"),
        pytest.param(write(b""), "", id="empty"),
        pytest.param(write(b"\xff\xfe"), "", id="no text"),
        pytest.param(write(b'{"sch'), "", id="cut short"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), ": cannot be read: Too many levels of symbolic links", id="a link"),
        pytest.param(lambda path: path.mkdir(), ": no ledger", id="a folder"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_to_be_claimed_is_named_and_left(tmp_path, make, note, allocation):
    path = tmp_path / "ledger" / ("job@odd.jsonl" if allocation else "odd.jsonl")
    path.parent.mkdir()
    make(path)
    if allocation:
        left_behind(tmp_path, "odd", pid=os.getpid(), start=1)
    result = claim(tmp_path)
    assert (outcome(result), result.notes) == (([], [], []), [])
    if note:
        assert f"{path}{note}" in "\n".join(result.left_alone).replace(
            " a ledger without owner:", ""
        ).replace(" no allocation:", "")
        assert os.path.lexists(path)


def test_a_session_of_another_user_is_left_alone(tmp_path):
    path = left_behind(tmp_path, "theirs", entry("job"), uid=os.getuid() + 1, start=1)
    result = claim(tmp_path)
    assert outcome(result) == ([], [], [])
    assert result.left_alone == [f"{path}: written by user {os.getuid() + 1}, left alone"]
    assert files(tmp_path) == ["job@theirs.jsonl", "theirs.jsonl"]


def as_user(uid, work):
    """Do *work* as another user of group 4711."""

    def become_and_work():
        os.setgroups([])
        os.setgid(4711)
        os.setuid(uid)
        work()

    assert run(become_and_work) == 0


@pytest.fixture
def shared():
    """Return a state directory of user 65001 that the group 4711 shares."""
    folder = Path(tempfile.mkdtemp(prefix="mlhpc-test-", dir="/tmp"))
    os.chown(folder, 65001, 4711)
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes two other users, which only root may")
def test_two_users_of_a_group_share_a_folder_and_each_claims_and_ends_what_is_its_own(shared):

    def leave(name):
        left_behind(shared, name, entry(f"{name}-job", uid=os.getuid()), until_ns=later())

    def claim_all(name, mine, other):
        ledger = Ledger(shared, name)
        result = adopt(ledger, anything)
        assert ids(result.adopted) == [f"{mine}-job"]
        assert result.left_alone == [f"{shared}/ledger/{other}.jsonl: another user's, left alone"]
        assert sessions_in_ledgers(shared) == {name, mine, other}
        ledger.ended(f"{mine}-job")
        ledger.close()

    as_user(65001, lambda: leave("a"))
    as_user(65002, lambda: leave("b"))
    as_user(65002, lambda: claim_all("second", "b", "a"))
    assert files(shared) == ["a-job@a.jsonl", "a.jsonl"]
    as_user(65002, lambda: leave("c"))
    as_user(65001, lambda: claim_all("first", "a", "c"))
    assert files(shared) == ["c-job@c.jsonl", "c.jsonl"]


def test_what_an_older_version_left_is_named_and_left(tmp_path):
    folder = tmp_path / "ledger"
    lines = b'{"schema": 3, "event": "opened", "session": "old", "owner": {"pid": 1, "start": 1}}\n'
    for name in ("old.jsonl", "claimed/a@old.jsonl", "closed/b.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(lines)
    notes = claim(tmp_path).left_alone
    assert [note.partition(":1: written by an older version")[0] for note in notes] == [
        *(str(folder / "claimed/a@old.jsonl"), str(folder / "old.jsonl"))
    ]
    assert files(tmp_path) == ["claimed", "closed", "old.jsonl"]
    assert all(path.read_bytes() == lines for path in folder.rglob("*.jsonl"))
    with pytest.raises(StoreError, match="written by an older version"):
        sessions_in_ledgers(tmp_path)


@pytest.mark.parametrize("torn", [b'{"schema": 4, "event": "accepted", "native', b"\0" * 100])
def test_a_torn_last_line_is_skipped_and_what_comes_after_it_counts(tmp_path, torn):
    left_behind(tmp_path, "detached", entry("job"), until_ns=later())
    with file_of(tmp_path, "job").open("ab") as file:
        file.write(torn)
    second = Ledger(tmp_path, "second")
    assert ids(adopt(second, anything).adopted) == ["job"]
    second.accepted("job", "4711")
    (found,) = open_entries(tmp_path).entries
    assert found.submitted.native_id == "4711"


@pytest.mark.parametrize("content", [b"", b'{"schema": 4, "ev', b"\0" * 100])
def test_an_allocation_whose_first_line_was_never_finished_was_not_submitted_and_is_removed(
    tmp_path, content
):
    left_behind(tmp_path, "dead")
    (tmp_path / "ledger" / "job@dead.jsonl").write_bytes(content)
    assert states(tmp_path) == {}
    assert outcome(claim(tmp_path)) == ([], [], [])
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b"\0" * 100], ids=["removed", "empty", "lost in a power cut"])
def test_allocations_of_a_session_whose_file_is_lost_expire_once_they_are_silent(tmp_path, content):
    path = left_behind(tmp_path, "lost", entry("job"), entry("here", scheduler="local"), until_ns=later())
    path.unlink() if content is None else path.write_bytes(content)
    assert states(tmp_path) == {"job": "held", "here": "held"}
    grow_old(tmp_path)
    (found, _) = open_entries(tmp_path).entries
    assert found.why == "the file of its session is lost"
    assert ids(claim(tmp_path, "me", nothing).expired) == ["here", "job"]
    assert not path.exists()


def test_an_allocations_file_that_names_another_is_no_allocation(tmp_path):
    left_behind(tmp_path, "dead", entry("a"))
    file_of(tmp_path, "a").rename(tmp_path / "ledger" / "b@dead.jsonl")
    result = claim(tmp_path)
    assert outcome(result) == ([], [], [])
    assert "it is of the allocation a" not in result.notes
    assert "b@dead.jsonl: no allocation: its first line is missing" in result.left_alone[-1]


def test_a_claimer_whose_disk_is_full_gives_the_jobs_to_the_next(tmp_path, monkeypatch):
    left_behind(tmp_path, "detached", entry("job"), until_ns=later())
    first, write = Ledger(tmp_path, "first"), os.write
    first.start()

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"ledger/job@first\.jsonl: No space left on device"):
            adopt(first, anything)
    assert write is os.write
    assert states(tmp_path) == {"job": "held"}  # this process has claimed it and lives
    first.close()
    assert states(tmp_path) == {"job": "detached"}
    assert ids(claim(tmp_path, "second").adopted) == ["job"]
    assert files(tmp_path) == ["job@second.jsonl", "second.jsonl"]


def test_a_read_only_folder_can_be_looked_at_and_says_why_nothing_is_claimed(tmp_path, monkeypatch):
    left_behind(tmp_path, "dead", entry("job"))
    left_behind(tmp_path, "elsewhere", entry("watched"), host="login2")
    monkeypatch.setattr(ledger_files, "shared_now_ns", Mock(side_effect=OSError(30, "Read-only file system")))
    survey = open_entries(tmp_path)
    assert {one.submitted.id: one.state for one in survey.entries} == {"job": "expired", "watched": "held"}
    why = "Read-only file system: sessions of other hosts count as alive"
    assert survey.left_alone == (f"{tmp_path / 'ledger'}: {why}",)


def test_a_file_that_cannot_be_claimed_is_named_and_met_again(tmp_path, monkeypatch):
    left_behind(tmp_path, "dead", entry("job"))
    path = file_of(tmp_path, "job")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
        result = claim(tmp_path)
    assert (result.adopted, result.left_alone) == ([], [])
    assert result.notes == [f"{path}: cannot be claimed: Permission denied (left as it is)"]
    assert ids(claim(tmp_path, "me2").adopted) == ["job"]


def test_a_file_where_ledgers_should_be_is_named(tmp_path):
    (tmp_path / "ledger").write_text("a file where a folder is needed")
    with pytest.raises(
        StoreError, match=f"ledgers in {tmp_path / 'ledger'} cannot be listed: Not a directory"
    ):
        claim(tmp_path)


def test_the_file_of_a_dead_session_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    path = left_behind(tmp_path, "dead")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert claim(tmp_path).notes == [f"cannot remove the ledger {path}: Permission denied"]
    assert claim(tmp_path).notes == []
    assert files(tmp_path) == []


def test_sessions_in_ledgers_are_those_that_are_open_and_those_whose_folders_are_in_use(tmp_path):
    assert sessions_in_ledgers(tmp_path) == frozenset()
    left_behind(tmp_path, "first", entry("a", directory="/state/runs/origin/a"), until_ns=later())
    left_behind(tmp_path, "second", entry("b", session="earlier"), until_ns=later())
    assert sessions_in_ledgers(tmp_path) == {"first", "origin", "second", "earlier"}
    claim(tmp_path, "claimer", lambda one: one.id == "a")
    claim(tmp_path, "other", lambda one: one.id == "b")
    assert sessions_in_ledgers(tmp_path) == {"first", "origin", "claimer", "earlier", "other"}


@pytest.mark.parametrize("name", ["first", "a@first"])
def test_sessions_are_not_known_where_a_ledger_of_ours_is_damaged(tmp_path, name):
    left_behind(tmp_path, "first", entry("a"))
    (tmp_path / "ledger" / f"{name}.jsonl").write_text("{\n")
    with pytest.raises(StoreError, match="its first line is missing"):
        sessions_in_ledgers(tmp_path)
