"""Folders of runs on another file system: what is sent, what comes back, in which order, and what a hostile answer may do."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from allocation_worlds import AllocationWorld, worker_lines
from login_worlds import RUN, connections, write_ssh
from scripted_slurm import ScriptedSlurm

from pytest_mlhpc.config.model import BY_SSH
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.provisioner import StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.plan import read_plan
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.scheduler.client import (
    SchedulerUnavailable,
    SchedulerUnreachable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.scheduler.provisioner import JobProvisioner
from pytest_mlhpc.provision.scheduler.submit import write_job
from pytest_mlhpc.provision.slurm import over_ssh
from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns, RemoteSlurmClient
from pytest_mlhpc.provision.slurm.preflight import CONNECTION_PAUSES_S, refuse_unreachable
from pytest_mlhpc.provision.slurm.script import SLURM
from pytest_mlhpc.provision.ssh import RemoteHost, RemoteUnavailable


class World(AllocationWorld):
    """An allocation whose nodes see *shared*, and the copy of its folders."""

    def __init__(self, folder: Path, host: RemoteHost) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        super().__init__(folder / "state", "slurm", "srun", {"shared_directory": str(self.shared)})
        self.runs = RemoteRuns(host, folder / "state", str(self.shared))
        self.allocation = self.plan()
        self.here = Path(self.allocation.directory)
        self.there = self.shared / "runs/session/a"

    def send(self, **run) -> None:
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        plan = replace(self.allocation, runs=(replace(self.allocation.runs[0], **run),))
        write_job(plan, self.partition, None, SLURM, self.runs)
        self.runs.send(self.here)

    def write(self, name: str, content: bytes | str = "x") -> Path:
        """Write a file there, as a node does."""
        path = self.shared / "runs/session" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def lines(self, *kinds: str) -> bytes:
        return b"".join(worker_lines(self.allocation, *kinds))


@pytest.fixture
def host(tmp_path):
    made = RemoteHost("login", write_ssh(tmp_path / "bin"))
    yield made
    made.close()


@pytest.fixture
def world(tmp_path, host):
    return World(tmp_path, host)


def test_what_nodes_read_names_their_folder_and_what_we_read_names_ours(world):
    world.send()
    assert read_plan(world.here / "plan.json").directory == str(world.here)
    assert read_plan(world.there / "plan.json").directory == str(world.there)
    script = (world.there / "job.sh").read_text()
    assert f"--chdir={world.there}" in script
    assert str(world.folder) not in script
    assert script == (world.here / "job.sh").read_text()


def test_what_is_sent_is_this_users_alone(world):
    world.send()
    folders = [world.there, world.there / "run-a", world.there.parent / "lines", world.there.parent]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {(world.there / name).stat().st_mode & 0o777 for name in ("plan.json", "job.sh")} == {0o600}


def test_files_are_sent_with_their_modes_and_only_once(world, tmp_path):
    program = tmp_path / "bench.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    world.send(files={"bench.sh": str(program)})
    (sent,) = world.there.glob("files-*/bench.sh")
    assert (sent.read_text(), sent.stat().st_mode & 0o777) == ("#!/bin/sh\n", 0o700)
    before = sent.stat().st_ino
    world.runs.send(world.here)
    assert sent.stat().st_ino == before


def test_a_file_of_a_test_may_have_the_name_of_one_of_ours(world, tmp_path):
    mine = tmp_path / "plan.json"
    mine.write_text("not JSON")
    world.send(files={"plan.json": str(mine)})
    (sent,) = world.there.glob("files-*/plan.json")
    assert sent.read_text() == "not JSON"


def test_the_payload_is_sent_with_its_session(world, tmp_path):
    zipped = tmp_path / "abc.zip"
    zipped.write_bytes(b"payload")
    zipped.chmod(0o600)
    world.here.parent.mkdir(parents=True)
    copy = world.runs.copy_payload(zipped, world.here.parent)
    write_job(world.allocation, world.partition, copy, SLURM, world.runs)
    world.runs.send(world.here)
    assert (world.there.parent / "payload/abc.zip").read_bytes() == b"payload"
    assert f"PYTHONPATH={world.there.parent}/payload/abc.zip" in (world.there / "job.sh").read_text()


def test_more_than_is_sent_is_refused_with_what_to_do(world, monkeypatch):
    monkeypatch.setattr(over_ssh, "SENT_BYTES", 10)
    with pytest.raises(
        ProvisionError, match=r"by ssh go 10: put large ones on login, and name their paths there"
    ):
        world.send()


def test_a_shared_folder_that_is_not_there_is_named(world):
    world.shared.rmdir()
    with pytest.raises(
        ProvisionError,
        match=f"cannot write: login: {world.shared}/runs: No such file.*another shared_directory",
    ):
        world.send()


# --- what comes back


def read(world):
    """Return what is new of the batch's files."""
    return world.runs.files(world.allocation).read()


def test_a_batchs_lines_come_with_the_time_at_which_they_were_written(world):
    world.send()
    world.write("lines/a.up", json.dumps({"job_id": "7", "nodes": ["n1"], "started_ns": 5}))
    path = world.write("lines/a.jsonl", world.lines("started"))
    os.utime(path, ns=(10**18, 10**18))
    found = read(world)
    assert (found.start.job_id, found.start.nodes, found.data) == ("7", ("n1",), world.lines("started"))
    assert (world.here.parent / "lines/a.jsonl").stat().st_mtime_ns == 10**18


def test_a_runs_files_are_here_before_the_line_that_tells_of_them(world, monkeypatch):
    world.send()
    world.write("a/run-a/rank0.log", "rate: 4\n")
    world.write("lines/a.jsonl", world.lines("started", "end"))
    files, order = world.runs.files(world.allocation), []
    monkeypatch.setattr(
        over_ssh, "_append", lambda *_: order.append((world.here / "run-a/rank0.log").read_text())
    )
    files.read()
    assert order == ["rate: 4\n"]


def test_a_job_that_runs_behind_a_broken_connection_says_so_until_it_is_there_again(world, monkeypatch):
    slurm = ScriptedSlurm(world.clock)
    world.provisioner = JobProvisioner(
        world.partition,
        slurm,
        lambda _: None,
        rules=SLURM,
        pending_limit_s=3600.0,
        clock=world.clock,
        runs=world.runs,
    )
    (world.folder / "runs").mkdir(parents=True)
    world.submit()
    world.write("lines/a.up", json.dumps({"job_id": "101", "nodes": ["n1"], "started_ns": 5}))
    world.write("lines/a.jsonl", world.lines("started"))
    world.follow()
    with monkeypatch.context() as patch:
        error = RemoteUnavailable("login: it does not let you in")
        patch.setattr(RemoteHost, "ask", Mock(side_effect=error))
        world.follow()
        world.follow()
    world.follow()
    _, broken, mended = world.all_of(StateChanged)
    assert (broken.state, broken.reason) == (
        JobState.RUNNING,
        f"{error}; the job goes on, and this is tried again",
    )
    assert (mended.state, mended.reason) == (JobState.RUNNING, "")


def test_half_a_line_waits_for_its_end(world):
    world.send()
    whole = world.lines("started")
    path = world.write("lines/a.jsonl", whole[:20])
    files = world.runs.files(world.allocation)
    assert files.read().data == b""
    path.write_bytes(whole)
    assert files.read().data == whole


def test_the_end_of_a_batch_comes_with_all_its_lines(world):
    world.send()
    world.write("lines/a.jsonl", world.lines("started", "end"))
    world.write("lines/a.over", json.dumps({"exit": 0}))
    found = read(world)
    assert (found.exit, found.data) == (0, world.lines("started", "end"))


def test_lines_that_were_cut_are_seen_as_on_a_shared_file_system(world):
    world.send()
    path = world.write("lines/a.jsonl", world.lines("started"))
    files = world.runs.files(world.allocation)
    files.read()
    path.write_bytes(b"")
    assert "was cut to 0 bytes" in files.read().damage
    path.unlink()
    assert "has vanished" in files.read().damage


def test_logs_reports_and_artifacts_come_and_nothing_else(world):
    world.send(artifacts=("out/*",))
    plan = replace(world.allocation, runs=(replace(world.allocation.runs[0], artifacts=("out/*",)),))
    for name in (
        "slurm.out",
        "run-a/rank0.log",
        "run-a/out/table",
        "run-a/big.bin",
        "run-a/deep/x.log",
        "data/set.log",
        "other/out/x",
    ):
        world.write(f"a/{name}")
    (world.there / "run-a/link.log").symlink_to("/etc/passwd")
    world.runs.fetch(world.here, {run.run_id: run for run in plan.runs})
    found = {path.relative_to(world.here).as_posix() for path in world.here.rglob("*") if path.is_file()}
    assert found == {"plan.json", "job.sh", "slurm.out", "run-a/rank0.log", "run-a/out/table"}


def test_a_file_that_is_the_same_does_not_come_again(world):
    world.send()
    path = world.write("a/run-a/rank0.log")
    world.runs.fetch(world.here, {})
    copy = world.here / "run-a/rank0.log"
    before = copy.stat().st_ino
    world.runs.fetch(world.here, {})
    assert copy.stat().st_ino == before
    path.write_text("longer")
    world.runs.fetch(world.here, {})
    assert copy.read_text() == "longer"


def test_a_file_beyond_the_bound_ends_the_allocation_with_its_name(world, monkeypatch):
    monkeypatch.setattr(over_ssh, "FETCHED_BYTES", 3)
    world.send()
    world.write("a/run-a/rank0.log", "long")
    world.write("lines/a.jsonl", world.lines("started"))
    found = read(world)
    assert f"{world.there}/run-a/rank0.log has 4 bytes, by ssh come 3: write less" in found.damage
    assert found.tolerance_s == 0.0


def test_plan_and_job_script_never_come_back(world):
    world.send()
    for name in ("plan.json", "job.sh"):
        (world.there / name).write_text("hostile")
    world.runs.fetch(world.here, {})
    assert "hostile" not in (world.here / "plan.json").read_text() + (world.here / "job.sh").read_text()


def test_paths_in_messages_are_those_of_the_copies(world):
    there, log = str(world.there), f"{world.there}/run-a/rank0.log"
    conversation = Conversation(world.allocation, world.here / "slurm.out", there)
    found = conversation._with_paths_here({"log": log, "text": f"cannot write {log}", "exit": [0]})
    assert found == {"log": f"{world.here}/run-a/rank0.log", "text": f"cannot write {log}", "exit": [0]}


# --- the end


def test_what_is_over_is_removed_and_the_session_with_its_last_allocation(world):
    world.send()
    world.write("lines/a.jsonl", "x")
    world.runs.remove([world.here])
    assert list((world.shared / "runs").iterdir()) == []
    assert (world.here / "plan.json").exists()


def test_what_another_session_uses_is_left(world):
    world.send()
    RemoteRuns(world.runs._host, world.folder, str(world.shared)).remove([world.here])
    assert world.there.exists()


# --- commands


class HostileHost:
    """Answers what it likes."""

    destination = "login"

    def __init__(self, answer, body=b""):
        self.ask = lambda *_args, **_fields: (answer, body)


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        ([["../../x.log", 1, 1], ["/etc/x.log", 1, 1], ["a/../x.log", 1, 1], ["", 1, 1], ["./x.log", 1, 1], ["a\0.log", 1, 1]], []),
        ([["x.log", -1, 1], ["x.log", True, 1], ["x.log", 1e9, 1], ["x.log", 1], "x.log", 7, ["ok.log", 1, 2]], [("ok.log", 1, 2)]),
    ],
)  # fmt: skip
def test_names_and_sizes_of_a_hostile_listing_are_dropped(tmp_path, names, seen):
    runs = RemoteRuns(HostileHost({}, json.dumps(names).encode()), tmp_path, "/shared")
    assert list(runs._listed(tmp_path / "runs/s/a")) == seen


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 100_000, b"7", json.dumps([[1]] * 20001).encode()])
def test_a_listing_that_is_none_is_an_error(tmp_path, body):
    with pytest.raises(RemoteUnavailable, match="login sent what is no listing"):
        list(RemoteRuns(HostileHost({}, body), tmp_path, "/shared")._listed(tmp_path / "a"))


@pytest.mark.parametrize("found", [None, [], [[1, 2]], [["x", 1, 1]], [[1, -1, 1]], ["x"]])
def test_pieces_that_were_not_asked_for_are_an_error(tmp_path, found):
    runs = RemoteRuns(HostileHost({"found": found}), tmp_path, "/shared")
    with pytest.raises(RemoteUnavailable, match="login sent another answer than was asked for"):
        list(runs.pieces([(tmp_path / "a", 0)]))


@pytest.fixture
def programs(tmp_path):
    """Return a function that writes a command of the login node, and returns the client that runs it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "python3").symlink_to(Path(sys.executable).resolve())
    host = RemoteHost(
        "login", write_ssh(tmp_path / "bin", f'PATH={folder}; export PATH; exec /bin/sh -c "$last"')
    )

    def write(name, text):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
        return RemoteSlurmClient(host)

    yield write
    host.close()


def test_commands_are_run_there(programs):
    assert programs("sinfo", "echo slurm 24.11.5").version() == "24.11.5"


def test_a_command_that_is_not_there_makes_slurm_unusable(programs):
    with pytest.raises(SchedulerUnusable, match="login: the command 'sinfo' is not on PATH"):
        programs("squeue", "").version()


def test_a_command_that_is_killed_or_fails_is_named(programs):
    with pytest.raises(SchedulerUnavailable, match="login: sinfo was killed by signal 9"):
        programs("sinfo", "kill -9 $$").version()
    with pytest.raises(SchedulerUnavailable, match="Unable to contact slurm controller"):
        programs("sinfo", "echo Unable to contact slurm controller >&2; exit 1").version()


def test_an_answer_without_an_exit_code_is_an_error(tmp_path):
    with pytest.raises(SchedulerUnavailable, match="login does not say how sinfo ended"):
        RemoteSlurmClient(HostileHost({"code": "0"})).version()


def test_jobs_of_the_login_are_this_users_and_others_are_not(programs, monkeypatch):
    """The uid here and there differ: whoever asks for its own jobs means the login's."""
    client = programs("squeue", 'printf "%s\\n" "$@" > "$0.words"')
    monkeypatch.setattr(over_ssh.CliClient, "_own_uid", lambda _self: "4711")
    client.jobs(names=["mlhpc-a"], user="4711")
    asked = Path(client._host._environ["PATH"].partition(":")[0]).parent / "programs/squeue.words"
    assert f"--user={os.getuid()}" in asked.read_text().splitlines()


def test_the_ledger_says_how_a_cluster_is_reached(world):
    partition = replace(world.partition, ssh="ada@login")
    assert partition.cluster == f"{BY_SSH}ada@login:{world.shared}"
    assert partition.apart
    assert (world.partition.cluster, world.partition.apart) == ("", False)


class SleptClock:
    """A clock that goes on where somebody sleeps."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __call__(self) -> float:
        return sum(self.waits)


def test_a_login_node_that_turns_one_connection_away_is_asked_again(tmp_path):
    (slurm := tmp_path / "sinfo").write_text("#!/bin/sh\necho slurm 24.11.5\n")
    slurm.chmod(0o755)
    away = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; echo closed >&2; exit 255; }}"
    environ = write_ssh(tmp_path / "bin", f"{away}; PATH={tmp_path}:$PATH; {RUN}")
    clock = SleptClock()
    host = RemoteHost("me@login", environ, clock)
    refuse_unreachable(RemoteSlurmClient(host), clock.waits.append)
    host.close()
    assert (clock.waits, connections(tmp_path / "bin")) == ([CONNECTION_PAUSES_S[0]], 2)


def test_a_login_node_that_takes_no_connection_is_refused_after_four_attempts(tmp_path):
    clock = SleptClock()
    host = RemoteHost("me@login", write_ssh(tmp_path / "bin", "echo no route >&2; exit 255"), clock)
    with pytest.raises(SchedulerUnreachable, match="no route"):
        refuse_unreachable(RemoteSlurmClient(host), clock.waits.append)
    assert (clock.waits, connections(tmp_path / "bin")) == ([*CONNECTION_PAUSES_S], 4)
