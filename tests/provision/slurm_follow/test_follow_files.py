"""Following a batch through its three files, whatever a file system shows of them."""

from __future__ import annotations

import json
import os
import time

import pytest

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import Handle, StateChanged
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.slurm import allocation as module
from pytest_mlhpc.provision.slurm.allocation import Allocation, clock_note
from pytest_mlhpc.provision.slurm.follow import AWAY_S, CUT_S, LOOK_BYTES, Follower, Up, present

UP = {"schema": 1, "job_id": "7", "nodes": ["node1"], "host": "node1", "started_ns": 0}


def put(folder, suffix: str, content) -> None:
    (folder / f"a.{suffix}").write_text(content if isinstance(content, str) else json.dumps(content))


def test_nothing_there_is_no_news(tmp_path):
    news = Follower(tmp_path, "a").look()
    assert (news.up, news.data, news.exit, news.damage) == (None, b"", None, "")
    assert present(tmp_path / "nowhere") == {}


def test_files_tell_that_the_batch_is_up_what_it_said_and_how_it_ended_each_once(tmp_path):
    follower = Follower(tmp_path, "a")
    put(tmp_path, "up", {**UP, "started_ns": time.time_ns()})
    put(tmp_path, "jsonl", "one\n")
    assert present(tmp_path) == {"a": {"up", "jsonl"}}
    news = follower.look()
    assert news.up is not None
    assert (news.up.job_id, news.up.nodes, news.data) == ("7", ("node1",), b"one\n")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("two\n")
    put(tmp_path, "over", {"schema": 1, "exit": 143, "ended_ns": 1})
    news = follower.look()
    assert (news.up, news.data, news.exit) == (None, b"two\n", 143)


def test_a_run_began_when_the_file_system_says_and_the_nodes_clock_is_compared_with_that(tmp_path):
    put(tmp_path, "up", {**UP, "started_ns": 1_090 * 10**9})
    os.utime(tmp_path / "a.up", ns=(1_000 * 10**9, 1_000 * 10**9))
    up = Follower(tmp_path, "a").look().up
    assert up == Up("7", ("node1",), 1_000 * 10**9, 90.0)
    assert clock_note(up).startswith("the clock of node1 is 90 s ahead of the file system's")
    assert "90 s behind" in clock_note(Up("7", ("node1",), 0, -90.0))
    assert clock_note(Up("7", ("node1",), 0, 2.0)) == ""


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"nodes": 3}', '{"nodes": [1]}', "\udc80"]
)
def test_a_file_that_is_none_of_ours_says_nothing(tmp_path, content):
    (tmp_path / "a.up").write_bytes(content.encode("utf-8", "surrogateescape"))
    (tmp_path / "a.over").write_bytes(
        content.encode("utf-8", "surrogateescape") if "nodes" not in content else b""
    )
    news = Follower(tmp_path, "a").look()
    assert (news.up, news.exit) == (None, None)


def test_an_end_without_a_code_is_an_error_code(tmp_path):
    put(tmp_path, "jsonl", "")
    put(tmp_path, "over", {"exit": "zero"})
    assert Follower(tmp_path, "a").look().exit == 1


def test_much_is_read_in_pieces_and_the_end_comes_last(tmp_path):
    put(tmp_path, "jsonl", "x" * (LOOK_BYTES + 1))
    put(tmp_path, "over", {"exit": 0})
    follower = Follower(tmp_path, "a")
    news = follower.look()
    assert (len(news.data), news.more, news.exit) == (LOOK_BYTES, True, None)
    news = follower.look()
    assert (news.data, news.more, news.exit) == (b"x", False, 0)


@pytest.mark.parametrize("how", ["cut", "vanished", "a link"])
def test_a_results_file_that_is_not_what_it_was_is_named(tmp_path, how):
    put(tmp_path, "jsonl", "one\ntwo\n")
    follower = Follower(tmp_path, "a")
    follower.look()
    path = tmp_path / "a.jsonl"
    if how == "cut":
        os.truncate(path, 3)
    else:
        path.unlink()
    if how == "a link":
        path.symlink_to("/etc/passwd")
    words = {
        "cut": "was cut to 3 bytes",
        "vanished": "has vanished",
        "a link": "cannot be read: Too many levels of symbolic",
    }
    news = follower.look()
    assert news.damage.startswith(f"the results file {path} ")
    assert words[how] in news.damage
    assert news.data == b""


@pytest.fixture
def followed(tmp_path):
    run = RunPlan(
        run_id="run", nonce="n", attempt=0, workload="tiny", parameters={}, nodes=1, ranks=1, cores_per_rank=1,
        device_type="cpu", launcher="srun", time_limit_s=60.0, steps=1, warmup_steps=0, python="python3",
    )  # fmt: skip
    plan = Plan("a", "", str(tmp_path), 1, 60.0, (run,))
    return Allocation(
        Handle("a", tmp_path), plan, "mlhpc-a", 0.0, tmp_path, Follower(tmp_path, "a"),
        Conversation(plan, tmp_path / "slurm.out"),
    )  # fmt: skip


def test_an_allocation_that_begins_tells_nodes_job_and_time(followed, tmp_path, caplog):
    put(tmp_path, "up", {**UP, "started_ns": time.time_ns()})
    (event,) = followed.look(5.0)
    assert isinstance(event, StateChanged)
    assert (event.state, event.reason, event.nodes, event.native_id) == (
        JobState.RUNNING,
        "",
        ("node1",),
        "7",
    )
    assert abs(event.since_ns - time.time_ns()) < 60e9
    assert caplog.messages == []
    assert followed.state(JobState.QUEUED, "late news of the queue") == []


def test_a_clock_that_is_off_is_logged_and_shown(followed, tmp_path, caplog):
    put(tmp_path, "up", {**UP, "started_ns": time.time_ns() - 90 * 10**9})
    (event,) = followed.look(5.0)
    assert "the clock of node1 is 90 s behind" in event.reason
    assert event.reason in caplog.messages[0]


def test_damage_is_believed_when_it_lasts(followed, tmp_path):
    put(tmp_path, "jsonl", "x" * 100)
    followed.look(0.0)
    os.truncate(tmp_path / "a.jsonl", 10)
    followed.look(1.0)
    assert followed.damage == ""
    followed.look(1.0 + CUT_S)
    assert "was cut to 10 bytes" in followed.damage


def test_a_file_server_that_restarts_is_waited_for(followed, tmp_path):
    put(tmp_path, "jsonl", "x" * 100)
    followed.look(0.0)
    (tmp_path / "a.jsonl").rename(tmp_path / "away")
    followed.look(1.0)
    followed.look(AWAY_S)
    assert followed.damage == ""
    followed.look(1.0 + AWAY_S)
    assert followed.damage.endswith("has vanished")


def test_a_network_file_systems_moment_of_yesterday_is_forgiven(followed, tmp_path):
    put(tmp_path, "jsonl", "x" * 100)
    followed.look(0.0)
    os.truncate(tmp_path / "a.jsonl", 10)
    followed.look(1.0)
    put(tmp_path, "jsonl", "x" * 100)
    followed.look(2.0)
    os.truncate(tmp_path / "a.jsonl", 10)
    followed.look(3.0)
    followed.look(2.0 + CUT_S)
    assert followed.damage == ""


def test_the_heartbeat_is_the_change_of_the_files_time_seen_by_our_clock(followed, tmp_path):
    put(tmp_path, "up", UP)
    put(tmp_path, "jsonl", "")
    followed.look(1.0)
    followed.look(2.0)
    assert followed.beat_seen == 1.0
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    followed.look(3.0)
    assert followed.beat_seen == 3.0


def test_last_words_are_the_end_of_a_log_of_any_size(followed, tmp_path):
    assert followed.last_words() == ""
    with (tmp_path / "slurm.out").open("wb") as file:
        file.truncate(1 << 32)
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    assert followed.last_words().endswith("the end")
    assert len(followed.last_words()) <= module.TAIL_BYTES
