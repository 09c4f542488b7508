"""An allocation through the three files of its batch, whatever a file system shows of them."""

from __future__ import annotations

import json
import os

import pytest
from allocation_worlds import run_plan

from pytest_mlhpc.jobs.provisioner import Handle, StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.scheduler import allocation as module
from pytest_mlhpc.provision.scheduler.allocation import (
    AWAY_TOLERANCE_S,
    CUT_TOLERANCE_S,
    READ_BYTES,
    BatchFiles,
    BatchStart,
    JobAllocation,
    clock_note,
    list_batch_files,
)

UP = {"schema": 1, "job_id": "7", "nodes": ["node1"], "host": "node1", "started_ns": 0}
SECOND = 10**9
DAMAGED = ["", "{", "[]", "[" * 100_000, '{"nodes": 3}', '{"nodes": [1]}', "\udc80"]


@pytest.fixture
def put(tmp_path):
    """Write a file of the batch."""

    def write(suffix, content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"a.{suffix}").write_text(text, errors="surrogateescape")

    return write


@pytest.fixture
def put_up(put, tmp_path):
    """Write the file that says that the batch is up: when by the node's clock, and when by the file system's."""

    def write(started_s, file_s):
        put("up", {**UP, "started_ns": started_s * SECOND})
        os.utime(tmp_path / "a.up", ns=(file_s * SECOND, file_s * SECOND))

    return write


@pytest.fixture
def files(tmp_path):
    return BatchFiles(tmp_path, "a")


def test_nothing_there_is_no_news(files, tmp_path):
    update = files.read()
    assert (update.start, update.data, update.exit, update.damage) == (None, b"", None, "")
    assert list_batch_files(tmp_path / "nowhere") == {}


def test_files_tell_that_the_batch_is_up_what_it_reported_and_how_it_ended_each_once(
    files, put, put_up, tmp_path
):
    put_up(1_000, 1_000)
    put("jsonl", "one\n")
    assert list_batch_files(tmp_path) == {"a": {"up", "jsonl"}}
    first = files.read()
    put("jsonl", "one\ntwo\n")
    put("over", {"schema": 1, "exit": 143, "ended_ns": 1})
    second = files.read()
    assert (first.start.job_id, first.start.nodes, first.data) == ("7", ("node1",), b"one\n")
    assert (second.start, second.data, second.exit) == (None, b"two\n", 143)


def test_a_run_began_when_the_file_system_says_and_the_nodes_clock_is_compared_with_that(files, put_up):
    put_up(1_090, 1_000)
    assert files.read().start == BatchStart("7", ("node1",), 1_000 * SECOND, 90.0)


@pytest.mark.parametrize(
    ("ahead_s", "note"),
    [
        (90.0, "the clock of node1 is 90 s ahead of the file system's"),
        (-90.0, "the clock of node1 is 90 s behind"),
        (2.0, ""),
    ],
)
def test_a_clock_that_is_off_is_noted(ahead_s, note):
    found = clock_note(BatchStart("7", ("node1",), 0, ahead_s))
    assert (found[: len(note)], bool(found)) == (note, bool(note))


@pytest.mark.parametrize("content", DAMAGED)
def test_a_file_that_is_none_of_ours_says_nothing(files, put, content):
    put("up", content)
    put("over", "" if "nodes" in content else content)
    update = files.read()
    assert (update.start, update.exit) == (None, None)


def test_an_end_without_a_code_is_an_error_code(files, put):
    put("jsonl", "")
    put("over", {"exit": "zero"})
    assert files.read().exit == 1


def test_much_is_read_in_pieces_and_the_end_comes_last(files, put):
    put("jsonl", "x" * (READ_BYTES + 1))
    put("over", {"exit": 0})
    for expected in ((READ_BYTES, True, None), (1, False, 0)):
        update = files.read()
        assert (len(update.data), update.more, update.exit) == expected


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param(lambda path: os.truncate(path, 3), "was cut to 3 bytes", id="cut"),
        pytest.param(lambda path: path.unlink(), "has vanished", id="vanished"),
        pytest.param(
            lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
            "cannot be read: Too many levels of symbolic",
            id="a link",
        ),
    ],
)
def test_a_results_file_that_is_not_what_it_was_is_named(files, put, tmp_path, damage, text):
    put("jsonl", "one\ntwo\n")
    files.read()
    damage(tmp_path / "a.jsonl")
    update = files.read()
    assert update.damage.startswith(f"the results file {tmp_path / 'a.jsonl'} {text}")
    assert update.data == b""


@pytest.fixture
def allocation(tmp_path, files):
    plan = Plan("a", "", str(tmp_path), 1, 60.0, (run_plan(launcher="srun"),))
    talk = Conversation(plan, tmp_path / "slurm.out")
    return JobAllocation(Handle("a", tmp_path), "mlhpc-a", 0.0, tmp_path, tmp_path / "slurm.out", files, talk)


def test_an_allocation_that_begins_reports_nodes_job_and_time(allocation, put_up, caplog):
    put_up(1_000, 1_000)
    (event,) = allocation.read(5.0)
    found = (type(event), event.state, event.reason, event.nodes, event.native_id, event.since_ns)
    assert found == (StateChanged, JobState.RUNNING, "", ("node1",), "7", 1_000 * SECOND)
    assert caplog.messages == []
    assert allocation.state_events(JobState.QUEUED, "late news of the queue") == []


def test_a_clock_that_is_off_is_logged_and_shown(allocation, put_up, caplog):
    put_up(1_000, 1_090)
    (event,) = allocation.read(5.0)
    assert "the clock of node1 is 90 s behind" in event.reason
    assert event.reason in caplog.messages[0]


@pytest.mark.parametrize(
    ("sizes", "damage"),
    [
        pytest.param([(0.0, 100), (1.0, 10)], "", id="cut for a moment"),
        pytest.param(
            [(0.0, 100), (1.0, 10), (1.0 + CUT_TOLERANCE_S, 10)], "was cut to 10 bytes", id="cut for long"
        ),
        pytest.param(
            [(0.0, 100), (1.0, None), (AWAY_TOLERANCE_S, None)], "", id="away while its server restarts"
        ),
        pytest.param(
            [(0.0, 100), (1.0, None), (1.0 + AWAY_TOLERANCE_S, None)], "has vanished", id="away for long"
        ),
        pytest.param(
            [(0.0, 100), (1.0, 10), (2.0, 100), (3.0, 10), (2.0 + CUT_TOLERANCE_S, 10)],
            "",
            id="as it was yesterday, for a moment, in a network's file system",
        ),
    ],
)
def test_damage_is_believed_when_it_lasts(allocation, put, tmp_path, sizes, damage):
    for now, size in sizes:
        if size is None:
            (tmp_path / "a.jsonl").unlink(missing_ok=True)
        else:
            put("jsonl", "x" * size)
        allocation.read(now)
    assert allocation.damage.endswith(damage)
    assert bool(allocation.damage) == bool(damage)


def test_the_heartbeat_is_the_change_of_the_files_time_by_our_clock(allocation, put, tmp_path):
    put("up", UP)
    put("jsonl", "")
    allocation.read(1.0)
    allocation.read(2.0)
    assert allocation.beat_at == 1.0
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    allocation.read(3.0)
    assert allocation.beat_at == 3.0


def test_the_tail_of_a_log_of_any_size_is_its_end(allocation, tmp_path):
    assert allocation.log_tail() == ""
    with (tmp_path / "slurm.out").open("wb") as file:
        file.truncate(1 << 32)
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    assert allocation.log_tail().endswith("the end")
    assert len(allocation.log_tail()) <= module.TAIL_BYTES
