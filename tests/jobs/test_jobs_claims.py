"""Claiming what sessions left: by whom, in which state, and what becomes of it when a claimer dies."""

import itertools
import json
import os
import random
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ledgers import claim, entry, ids, later, left_behind, rewrite_owner, states
from processes import DIED, codes_of, run, run_at_once, start
from running_suites import wait_for

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs import ledger_files, resume
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry
from pytest_mlhpc.jobs.ledger_files import DEAD_S, Owner, sessions_in_ledgers
from pytest_mlhpc.jobs.resume import adopt, open_entries

STEPS = ("made", "claimed", "adopted", "moved", "returned", "closed")


def anything(_entry):
    return True


def nothing(_entry):
    return False


def a_or_b(one):
    return one.id in {"a", "b"}


def assert_four_are_open(state):
    found = Counter(one.submitted.id for one in open_entries(state).entries)
    assert found == Counter(["a", "b", "c", "kept"]), state


def claimed_files(state):
    return list((state / "ledger" / "claimed").iterdir())


def outcome(result):
    """Return the ids that a claim adopted, found expired, and left."""
    return ids(result.adopted), ids(result.expired), ids(result.left)


def dies_at(step, then=lambda: None):
    """Let this process end as by SIGKILL right after a step of claiming."""
    resume.fault_point = lambda at: then() or os._exit(DIED) if at == step else None


def claims_and_ends(state, name, die_at=""):
    """Claim all, note what came in a file, and end it; or die at a step."""
    dies_at(die_at)
    ledger = Ledger(state, name)
    result = adopt(ledger, anything)
    found = ids(result.adopted + result.expired)
    (state / f"got-{name}").write_text(json.dumps(found))
    for one in found:
        ledger.ended(one)
    ledger.close()


def got(state):
    """Return what each claimer has noted."""
    return [json.loads(path.read_text()) for path in sorted(state.glob("got-*"))]


def leave_four(state):
    """Leave the jobs a, b and kept of a detached session, and c of a dead one."""
    left_behind(state, "detached", *map(entry, ["a", "b", "kept"]), until_ns=later())
    left_behind(state, "dead", entry("c"))


def test_jobs_are_held_by_the_living_left_by_the_detached_and_expired_with_the_dead(tmp_path):
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


def test_a_dead_session_with_nothing_open_is_put_aside(tmp_path):
    left_behind(tmp_path, "dead")
    assert outcome(claim(tmp_path)) == ([], [], [])
    assert (tmp_path / "ledger" / "closed" / "dead.jsonl").exists()


def test_a_claimer_gets_what_it_wants_and_what_has_expired_and_leaves_the_rest(tmp_path):
    left_behind(tmp_path, "detached", entry("wanted"), entry("not"), until_ns=later())
    left_behind(tmp_path, "dead", entry("lost"), entry("wanted too"))
    result = claim(tmp_path, "me", lambda one: one.id.startswith("wanted"))
    assert outcome(result) == (["wanted", "wanted too"], ["lost"], ["not"])
    assert states(tmp_path) == {"wanted": "held", "wanted too": "held", "lost": "held", "not": "detached"}
    assert result.notes == result.left_alone == []
    assert not claimed_files(tmp_path)


def test_a_ledger_of_which_nothing_is_wanted_is_not_touched(tmp_path):
    path = left_behind(tmp_path, "detached", entry("not"), until_ns=later())
    before = path.stat()
    assert ids(claim(tmp_path, "me", nothing).left) == ["not"]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
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


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("then", [None, *STEPS])
def test_a_claimer_that_dies_between_two_steps_loses_nothing_and_gives_nothing_twice(tmp_path, step, then):
    leave_four(tmp_path)
    assert run(lambda: (dies_at(step), claim(tmp_path, "first", a_or_b))) == DIED
    assert_four_are_open(tmp_path)
    if then:
        run(lambda: (dies_at(then), claim(tmp_path, "second", a_or_b)))
    assert outcome(claim(tmp_path, "last", a_or_b)) == (["a", "b"], ["c"], ["kept"])
    assert states(tmp_path) == {"a": "held", "b": "held", "c": "held", "kept": "detached"}
    assert not claimed_files(tmp_path)
    assert ids(claim(tmp_path, "nobody").adopted) == ["kept"]


def die_at_call(number, *, torn):
    """Let this process end before its *number*-th change of the disk; if *torn*, in the middle of that write."""
    left = itertools.count(number, -1)

    def dying(call, *args, **options):
        if next(left) == 0:
            if torn and call is os.write:
                call(args[0], args[1][: len(args[1]) // 2])
            os._exit(DIED)
        return call(*args, **options)

    for name in ("write", "fsync", "rename", "replace", "mkdir", "unlink", "utime"):
        setattr(os, name, partial(dying, getattr(os, name)))


@pytest.mark.parametrize("torn", [False, True])
def test_a_claimer_may_die_before_and_within_every_single_change_of_the_disk(tmp_path, torn):
    for number in range(100):
        state = tmp_path / "turns" / str(number)
        leave_four(state)
        work = partial(claim, state, f"claimer{number}", a_or_b)
        code = run(lambda number=number, work=work: (die_at_call(number, torn=torn), work()))
        assert_four_are_open(state)
        # Whoever got through and died afterwards had made them its own: they are detached no longer.
        assert outcome(claim(state, "last", a_or_b)) == (["a", "b"], ["c"], ["kept"]), number
        assert not claimed_files(state)
        if code == 0:
            break
    assert number > 12  # as many changes does a claim make at least


@pytest.mark.servers
@pytest.mark.parametrize("steps", [STEPS, ()], ids=["die at random", "live"])
def test_of_claimers_at_once_that_none_loses_a_job_or_gets_one_twice(tmp_path, steps):
    chance = random.Random(20261121)  # noqa: S311 - to repeat it
    for turn in range(12):
        state = tmp_path / "turns" / str(turn)
        leave_four(state)
        ends = [chance.choice([*steps, "never"]) for _ in range(4)]
        codes = run_at_once([partial(claims_and_ends, state, f"c{n}", at) for n, at in enumerate(ends)])
        assert set(codes) <= ({0, DIED} if steps else {0})
        last = claim(state, "last")
        left = ids(last.adopted + last.expired)
        assert sorted([*itertools.chain(*got(state)), *left]) == ["a", "b", "c", "kept"], (turn, ends)
        assert steps or not [*left, *claimed_files(state), *(state / "ledger").glob("*.jsonl")]


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


@pytest.fixture
def stopped_claimer(tmp_path):
    """Start a process that claims, and stops when it has; return a function that lets it go on to its end."""
    claimed_out, claimed_in = os.pipe()
    go_out, go_in = os.pipe()
    children = []

    def begin(wanted):
        def stop(at):
            if at == "claimed":
                os.write(claimed_in, b"x")
                os.read(go_out, 1)

        def work():
            os.close(go_in)
            resume.fault_point = stop
            (tmp_path / "got-stopped").write_text(json.dumps(ids(claim(tmp_path, "stopped", wanted).adopted)))

        children.append(start(work))
        assert os.read(claimed_out, 1) == b"x"

    def go_on():
        os.write(go_in, b"x")
        assert codes_of([children.pop()]) == [0]

    yield SimpleNamespace(begin=begin, go_on=go_on)
    for pipe in (claimed_in, claimed_out, go_in, go_out):
        os.close(pipe)
    codes_of(children)


def test_what_another_session_is_taking_apart_and_gives_back_is_waited_for(
    tmp_path, monkeypatch, stopped_claimer
):
    left_behind(tmp_path, "detached", entry("theirs"), entry("mine"), until_ns=later())
    stopped_claimer.begin(lambda one: one.id == "theirs")
    waits = []
    monkeypatch.setattr(
        resume.time, "sleep", lambda s: (waits.append(s), waits[1:] or stopped_claimer.go_on())
    )
    result = claim(tmp_path, "slower", lambda one: one.id == "mine")
    assert (ids(result.adopted), result.expired) == (["mine"], [])
    assert got(tmp_path) == [["theirs"]]
    assert waits == [resume.CLAIM_INTERVAL_S]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_session_that_does_not_go_on_is_waited_for_only_if_it_has_what_is_wanted(
    tmp_path, monkeypatch, stopped_claimer, wanted
):
    left_behind(tmp_path, "detached", entry("a"), until_ns=later())
    stopped_claimer.begin(anything)
    clock, waits = itertools.count(0.0, resume.CLAIM_LIMIT_S / 4), []
    with monkeypatch.context() as patch:
        patch.setattr(resume.time, "monotonic", lambda: next(clock))
        patch.setattr(resume.time, "sleep", waits.append)
        assert outcome(claim(tmp_path, "me", lambda one: wanted)) == ([], [], [])
    assert bool(waits) is wanted
    stopped_claimer.go_on()
    assert got(tmp_path) == [["a"]]


@pytest.mark.parametrize("back", [False, True])
def test_a_file_that_moves_while_the_folders_are_listed_is_seen_or_looked_for_again(
    tmp_path, monkeypatch, back
):
    path = left_behind(tmp_path, "detached", entry("a"), until_ns=later())
    claimed = tmp_path / "ledger" / "claimed" / path.name
    claimed.parent.mkdir()
    here, there = (path.rename(claimed), path) if back else (path, claimed)
    listed = ledger_files._list_folder

    def listing(folder):
        found = listed(folder)
        if here.exists():
            here.rename(there)
        return found

    monkeypatch.setattr(ledger_files, "_list_folder", listing)
    files = ledger_files.LedgerSnapshot(tmp_path)
    assert ([file.path for file in files.roots()], files.moved) == ([there], False)


def test_what_a_dead_claimer_had_ended_is_not_given_again(tmp_path):
    left_behind(tmp_path, "detached", entry("a"), entry("b"), until_ns=later())

    def claims_ends_one_and_dies():
        ledger = Ledger(tmp_path, "first")
        dies_at("adopted", lambda: ledger.ended("a"))
        adopt(ledger, anything)

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
    owner.lease(later())
    assert owner.beat()
    taken = owner.path.rename(owner.path.with_name("suspended+1.jsonl"))
    before = taken.read_bytes()
    owner._beaten = 0.0
    assert not owner.beat()
    with pytest.raises(StoreError, match="taken over by another session"):
        owner.submitted(entry("more"))
    owner.close()
    assert taken.read_bytes() == before


def test_local_processes_of_another_host_are_nobody_elses(tmp_path):
    jobs = entry("job"), entry("processes", scheduler="local")
    path = left_behind(tmp_path, "x", *jobs, host="login2", start=1)
    os.utime(path, (1, 1))
    assert outcome(claim(tmp_path)) == (["job"], [], ["processes"])
    (left,) = (tmp_path / "ledger").glob("x+*.jsonl")
    os.utime(left, (1, 1))
    assert ids(claim(tmp_path, "me2").left) == ["processes"]


def write(content):
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "note"),
    [
        pytest.param(
            lambda path: left_behind(
                path.parents[1], path.stem, entry("theirs"), uid=os.getuid() + 1, start=1
            ),
            f": written by user {os.getuid() + 1}, left alone",
            id="of another user",
        ),
        pytest.param(
            write(b'{"schema": 4, "event": "opened"}\n'),
            ":1: schema 4 is newer than 3",
            id="of a newer version",
        ),
        pytest.param(write(b"[]\n"), ": a ledger without owner: its first line is missing", id="nobody's"),
        pytest.param(write(b""), "", id="empty"),
        pytest.param(write(b"\xff\xfe"), "", id="no text"),
        pytest.param(write(b'{"sch'), "", id="cut short"),
        pytest.param(
            lambda path: path.symlink_to("/dev/zero"),
            ": cannot be read: Too many levels of symbolic links",
            id="a link",
        ),
        pytest.param(lambda path: path.mkdir(), ": no ledger", id="a folder"),
    ],
)
def test_a_file_that_is_not_to_be_claimed_is_told_and_left(tmp_path, make, note):
    path = tmp_path / "ledger" / "odd.jsonl"
    path.parent.mkdir()
    make(path)
    result = claim(tmp_path)
    assert (outcome(result), result.notes) == (([], [], []), [])
    assert not note or f"{path}{note}" in "\n".join(result.left_alone)
    assert path.exists()


@pytest.mark.parametrize("torn", [b'{"schema": 2, "event": "ended", "id": "jo', b"\0" * 100])
def test_a_torn_last_line_is_skipped_and_what_comes_after_it_counts(tmp_path, torn):
    path = left_behind(tmp_path, "detached", entry("job"), entry("kept"), until_ns=later())
    with path.open("ab") as file:
        file.write(torn)
    assert ids(claim(tmp_path, "me", lambda one: one.id == "job").adopted) == ["job"]
    assert states(tmp_path, me="me") == {"kept": "detached"}


def test_a_ledger_of_the_first_schema_is_still_read(tmp_path):
    path = tmp_path / "ledger" / "old.jsonl"
    path.parent.mkdir()
    shutil.copy(Path(__file__).with_name("ledger_of_the_first_schema.jsonl"), path)
    rewrite_owner(path, uid=os.getuid(), host=Owner.me().host, boot=Owner.me().boot)
    (found,) = claim(tmp_path, "me", nothing).expired
    assert found == LedgerEntry("open", "local:cpu", scheduler="local", session="old")


def test_a_claim_whose_claimer_was_moved_away_by_hand_is_told_with_what_to_do(tmp_path):
    path = left_behind(tmp_path, "a", entry("job"))
    claimed = tmp_path / "ledger" / "claimed" / "a@gone.jsonl"
    claimed.parent.mkdir()
    path.rename(claimed)
    (note,) = claim(tmp_path).left_alone
    assert "session gone has claimed it and has no ledger any more" in note
    assert note.endswith(f"move it to {path}")


def test_a_claimer_whose_disk_is_full_gives_the_jobs_to_the_next(tmp_path, monkeypatch):
    left_behind(tmp_path, "dead", entry("job", directory="x" * 500))
    first, write = Ledger(tmp_path, "first"), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, content: write(file, content[:450]))
        with pytest.raises(StoreError, match=r"ledger/first\.jsonl: No space left on device"):
            adopt(first, anything)
    first.close()
    assert states(tmp_path) == {"job": "held"}  # this process has claimed it and lives
    rewrite_owner(first.path, start=1)
    assert ids(claim(tmp_path, "second").adopted) == ["job"]
    assert not first.path.exists()


def test_a_read_only_folder_can_be_looked_at_and_says_why_nothing_is_claimed(tmp_path, monkeypatch):
    left_behind(tmp_path, "dead", entry("job"))
    left_behind(tmp_path, "elsewhere", entry("watched"), host="login2")
    monkeypatch.setattr(ledger_files, "shared_now_ns", Mock(side_effect=OSError(30, "Read-only file system")))
    survey = open_entries(tmp_path)
    assert {one.submitted.id: one.state for one in survey.entries} == {"job": "expired", "watched": "held"}
    why = "Read-only file system: sessions of other hosts count as alive"
    assert survey.left_alone == (f"{tmp_path / 'ledger'}: {why}",)


def test_a_ledger_that_cannot_be_claimed_is_named_and_met_again(tmp_path, monkeypatch):
    path = left_behind(tmp_path, "dead", entry("job"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
        result = claim(tmp_path)
    assert (result.adopted, result.left_alone) == ([], [])
    assert result.notes == [f"{path}: cannot be claimed: Permission denied (left as it is)"]
    assert ids(claim(tmp_path, "me2").adopted) == ["job"]


@pytest.mark.parametrize("name", ["ledger", "ledger/claimed"])
def test_a_file_where_ledgers_should_be_is_named(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match=f"ledgers in {tmp_path / name} cannot be listed: Not a directory"):
        claim(tmp_path)


def test_a_ledger_that_cannot_be_put_aside_stays_its_claimers_until_the_next(tmp_path):
    left_behind(tmp_path, "dead", entry("job"))
    closed = tmp_path / "ledger" / "closed"
    closed.write_text("a file where a folder is needed")
    ledger = Ledger(tmp_path, "me")
    result = adopt(ledger, anything)
    assert ids(result.adopted) == ["job"]
    (note,) = result.notes
    assert re.fullmatch(r"cannot move the ledger .* \(the next session will take it apart\)", note)
    ledger.ended("job")
    ledger.close()  # stays, for it has a claim that is not taken apart
    closed.unlink()
    rewrite_owner(ledger.path, start=1)
    assert states(tmp_path) == {}
    assert claim(tmp_path, "me2").adopted == []
    assert sorted(path.name for path in closed.iterdir()) == ["dead.jsonl", "me.jsonl"]


def test_sessions_in_ledgers_are_those_that_are_open_and_those_whose_folders_are_in_use(tmp_path):
    assert sessions_in_ledgers(tmp_path) == frozenset()
    left_behind(tmp_path, "first", entry("a", directory="/state/runs/origin/a"), until_ns=later())
    left_behind(tmp_path, "second", entry("b", session="earlier"), until_ns=later())
    assert sessions_in_ledgers(tmp_path) == {"first", "origin", "second", "earlier"}
    claimed = tmp_path / "ledger/claimed"
    claimed.mkdir()
    (tmp_path / "ledger/first.jsonl").rename(claimed / "first@claimer.jsonl")
    closed = tmp_path / "ledger/closed"
    closed.mkdir()
    (tmp_path / "ledger/second.jsonl").rename(closed / "second.jsonl")
    assert sessions_in_ledgers(tmp_path) == {"first", "origin", "claimer"}


def test_sessions_are_not_known_where_a_ledger_of_ours_is_damaged(tmp_path):
    left_behind(tmp_path, "first", entry("a")).write_text("{\n")
    with pytest.raises(StoreError, match="a ledger without owner"):
        sessions_in_ledgers(tmp_path)
