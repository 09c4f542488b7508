"""Real servers for tests. Here Slurm: a cluster of `ci/slurm`, and the look for what a test left on it; Kubernetes has
`kubernetes_service.py`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

Service = TypeVar("Service")
ROOT = Path(__file__).resolve().parents[1]
NODES = ("node1", "node2", "node3", "node4", "gpu1", "gpu2")
#: Exit code of `ci/slurm up` for "not on this machine": packages or permissions are missing.
UNFIT = 4
_ENDED = frozenset(
    [
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
    ]
)
#: Longest wait for anything that a server does, and for the end of a command of `ci/`, in seconds: guards against a hang.
LIMIT_S = 600.0
START_LIMIT_S = 3600.0
#: How long a test's jobs may go on after it before they are said to be left: those that were cancelled end in a few seconds.
CLEAR_LIMIT_S = 120.0


class MissingServiceError(Exception):
    """A server cannot run on this machine. The text says what to install."""


def needs(config: pytest.Config, service: str, start: Callable[[], Service]) -> Service:
    """Return the started server; where it cannot run, skip, or fail if ``--require-services`` names it."""
    try:
        return start()
    except MissingServiceError as error:
        if service in required(config):
            pytest.fail(f"--require-services {service}: {error}", pytrace=False)
        pytest.skip(f"needs {service}: {error}")


def required(config: pytest.Config) -> list[str]:
    """Return the services that ``--require-services`` names; the root conftest has checked them."""
    return [name.strip() for name in config.getoption("--require-services").split(",")]


@dataclass(frozen=True)
class QueuedJob:
    """One line of squeue, jobs that have ended included."""

    id: str
    state: str
    reason: str
    nodes: str
    key: str
    folder: str
    command: str
    name: str

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


@dataclass(frozen=True)
class Slurm:
    """A real cluster. ``environment`` is all that its commands need; only a private one may be broken."""

    directory: Path
    private: bool
    environment: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        found = {"SLURM_CONF": str(self.directory / "etc/slurm.conf")}
        commands = self.directory / "bin"
        if commands.is_dir():  # a cluster of another release: its commands enter its root
            found["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
        object.__setattr__(self, "environment", found)

    def run(
        self, *argv: str | Path, limit_s: float = 1200.0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with this cluster in its environment; srun may wait for nodes that other tests hold."""
        return subprocess.run(
            list(map(str, argv)), env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, cwd=cwd,
            capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip

    def jobs(self) -> list[QueuedJob]:
        """Return every job that the controller still knows, ended ones included (MinJobAge: ten minutes)."""
        # Names and folders may hold anything: every field ends with a word that none of them can know.
        mark = f"|{secrets.token_hex(8)}|"
        columns = ("JobID", "State", "Reason", "NodeList", "WCKey", "WorkDir", "Command", "Name")
        form = ",".join(f"{column}:{mark}" for column in columns)
        done = self.run("squeue", "-h", "-a", "-r", "-t", "all", "-O", form)
        if done.returncode != 0:
            raise ConnectionError(done.stderr.strip())
        words = [word.removeprefix("\n") for word in done.stdout.split(mark)[:-1]]
        return [QueuedJob(*words[at : at + len(columns)]) for at in range(0, len(words), len(columns))]

    def node_states(self) -> dict[str, str]:
        """Return the state of every node, in Slurm's words."""
        answer = self.run("sinfo", "-h", "-N", "-o", "%N|%T").stdout
        return dict(line.split("|", 1) for line in answer.splitlines())

    def runs(self, daemon: str) -> bool:
        """Return whether a daemon of the cluster lives: `slurmctld`, `slurmd.node1` ..."""
        return is_alive(self.directory, daemon)

    # --- faults

    def kill_node(self, node: str) -> None:
        """Cut the power of a node: slurmd and all that ran there is gone."""
        self._fault("kill-node", node)

    def start_node(self, node: str) -> None:
        """Start it again; jobs can run there afterwards."""
        self._fault("start-node", node)

    def stop_controller(self) -> None:
        """End slurmctld; jobs run on."""
        self._fault("stop-controller")

    def start_controller(self) -> None:
        """Start it from its saved state."""
        self._fault("start-controller")

    def stop_database(self) -> None:
        """End slurmdbd and MariaDB."""
        self._fault("stop-database")

    def start_database(self) -> None:
        """Start them again."""
        self._fault("start-database")

    def _fault(self, *words: str) -> None:
        assert self.private, f"{words[0]} would disturb other tests: use the fixture own_slurm"
        control("slurm", *words, directory=self.directory)


def command(script: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `ci/SCRIPT` to its end."""
    foreign = ("COVERAGE_", "COV_CORE_", "MLHPC_INFLUX_")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and name != "MLHPC_TEST"  # what it starts is not the test's
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "ci" / script), *map(str, words)], env={**clean, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
    )  # fmt: skip


def control(script: str, *words: str, directory: Path) -> str:
    """Run `ci/SCRIPT` for a directory and return its output.

    Raises:
        MissingServiceError: Not on this machine.
        RuntimeError: It failed, with its message.
    """
    done = command(script, *words, "--directory", directory)
    if done.returncode == UNFIT:
        raise MissingServiceError(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(f"ci/{script} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def start(script: str, directory: Path, *options: str, install: bool) -> None:
    """Start a cluster (or join it) that lives no longer than this process; one that does not start leaves nothing."""
    more = () if install else ("--no-install",)
    try:
        control(script, "up", "--for", str(os.getpid()), *options, *more, directory=directory)
    except BaseException:
        leave(script, directory)
        raise


@contextlib.contextmanager
def killed_up(script: str, directory: Path, moment: str, *options: str) -> Iterator[None]:
    """Kill an `up` once it has started a daemon; whatever happens, the cluster is taken down. Nothing is installed for it."""
    argv = [sys.executable, ROOT / "ci" / script, "up", "--no-install", *options, "--directory", directory]
    clean = {key: value for key, value in os.environ.items() if key != "MLHPC_TEST"}
    try:
        with subprocess.Popen(argv, env=clean, stderr=subprocess.DEVNULL, start_new_session=True) as up:
            begun = directory / "pids" / moment
            try:
                wait_until(lambda: begun.exists() or up.poll() is not None)
            finally:
                up.kill()
        if up.returncode == UNFIT:
            pytest.skip(f"needs {script}: not on this machine")
        assert begun.exists()
        yield
    finally:
        control(script, "down", "--purge", directory=directory)


def leave(script: str, directory: Path) -> None:
    """Leave a shared cluster; the last one takes it down."""
    control(script, "down", "--purge", "--for", str(os.getpid()), directory=directory)


def session_folder(config: pytest.Config, name: str) -> Path:
    """Return where a server lies that all workers of this session of pytest share."""
    worker = getattr(config, "workerinput", None)
    return (
        Path(tempfile.gettempdir()) / f"mlhpc-{name}-{worker['testrunuid'][:12] if worker else os.getpid()}"
    )


def marked_processes(variable: str, directory: Path) -> list[str]:
    """Return the command lines of live processes with this directory in that variable of their environment."""
    mark = f"{variable}={directory}".encode()
    found = [pid for pid in _pids() if mark in _read(pid, "environ").split(b"\0")]
    return [_command_line(pid) for pid in found if _stat(pid) and _stat(pid)[0] not in "ZX"]


def start_slurm(directory: Path, *options: str, private: bool, install: bool) -> Slurm:
    """Start a Slurm (or join it) that lives no longer than this process."""
    start("slurm", directory, *options, install=install)
    return Slurm(directory, private=private)


def share_slurm(
    config: pytest.Config, *options: str, name: str = "slurm", install: bool = False
) -> Iterator[Slurm]:
    """Start one cluster for a whole session of pytest and yield it to this worker, as a session's fixture does.

    Args:
        config: Of pytest.
        options: Of `ci/slurm up`.
        name: Tells such clusters apart.
        install: Install what is missing even if ``--require-services`` names nothing.
    """
    directory = session_folder(config, name)
    install = install or "slurm" in required(config)
    yield needs(config, "slurm", lambda: start_slurm(directory, *options, private=False, install=install))
    leave("slurm", directory)


def end_slurm(cluster: Slurm) -> None:
    """Take a private cluster down, whatever else uses it."""
    control("slurm", "down", "--purge", directory=cluster.directory)


def given_slurm(environment: Mapping[str, str]) -> Slurm | None:
    """Return the cluster that the caller has up: MLHPC_TEST_SLURM, or SLURM_CONF where `ci/slurm env` set it.

    Any other SLURM_CONF is a site's: tests submit nothing there.
    """
    named = environment.get("MLHPC_TEST_SLURM")
    conf = environment.get("SLURM_CONF")
    directory = Path(named) if named else Path(conf).parent.parent if conf else None
    if directory is None or not (directory / "state.json").exists():
        return None
    return Slurm(directory, private=False)


# --- what a test left


def clear_away(cluster: Slurm, key: str, folders: list[Path], limit_s: float = CLEAR_LIMIT_S) -> list[str]:
    """Return what a test left on a cluster, in sentences, after clearing it away.

    Args:
        cluster: Where it ran.
        key: The workload key (wckey) that all its submissions carry.
        folders: Jobs that work or have their script below these are its own, too.
        limit_s: What ends by itself ends in that time.
    """
    if cluster.private and not cluster.runs("slurmctld"):
        if not any(cluster.runs(f"slurmd.{node}") for node in NODES):
            return []  # the test took it down
        cluster.start_controller()
    try:
        own = _jobs_of(cluster, key, folders)
    except ConnectionError as error:
        return [f"the controller does not answer: {error}"]
    left = [] if cluster.private else _clear_nodes(cluster)
    if not own:
        return left
    left += _clear_jobs(cluster, key, folders, limit_s)
    return left + _clear_steps(cluster, {job.id for job in own})


def _jobs_of(cluster: Slurm, key: str, folders: list[Path]) -> list[QueuedJob]:
    def below(path: str) -> bool:
        return any(path == str(folder) or path.startswith(f"{folder}/") for folder in folders)

    every = cluster.jobs()
    return [
        job
        for job in every
        if cluster.private or job.key.lstrip("*") == key or below(job.folder) or below(job.command)
    ]


def _clear_jobs(cluster: Slurm, key: str, folders: list[Path], limit_s: float) -> list[str]:
    def open_jobs() -> list[QueuedJob]:
        return [job for job in _jobs_of(cluster, key, folders) if not job.ended]

    def lasting() -> list[QueuedJob]:
        return [job for job in open_jobs() if job.state != "COMPLETING"]

    # What has just ended may still read RUNNING, and does so only until its node's message has come.
    wait_until(lambda: not lasting(), limit_s)
    left = lasting()
    if left:
        cluster.run("scancel", *(job.id for job in left))
    wait_until(lambda: not open_jobs())
    stuck = [job for job in open_jobs() if job.id not in {job.id for job in left}]
    return [
        f"job {job.id} ({job.name}) was left {job.state} on {job.nodes or 'no node'}" for job in left + stuck
    ]


def _clear_nodes(cluster: Slurm) -> list[str]:
    def broken() -> dict[str, str]:
        states = cluster.node_states().items()
        return {node: state for node, state in states if state.startswith(("drain", "down", "fail", "inval"))}

    # A test beside this one may drain a node for a moment, to look at it.
    if wait_until(lambda: not broken()):
        return []
    left = broken()
    for node in left:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    return [f"node {node} was left {state}" for node, state in left.items()]


def _clear_steps(cluster: Slurm, ids: set[str]) -> list[str]:
    def steps() -> list[int]:
        return [pid for pid in step_daemons(cluster.directory) if _step_job(pid) in ids]

    return _kill_lasting(steps, "lives on", LIMIT_S)


def _kill_lasting(find: Callable[[], list[int]], state: str, limit_s: float) -> list[str]:
    """Kill what is found for so long; return it in sentences."""
    if wait_until(lambda: not find(), limit_s):
        return []
    left = [f"{_command_line(pid)!r} (pid {pid}) {state}" for pid in find()]
    for pid in find():
        os.kill(pid, signal.SIGKILL)
    return left


def step_daemons(directory: Path) -> list[int]:
    """Return the pids of a cluster's step daemons: they keep slurmd's log open, their environment is overwritten."""

    def keeps_log(pid: int) -> bool:
        try:
            files = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            return False
        return any(file.startswith(f"{directory}/log/slurmd.") for file in files)

    return [pid for pid in _pids() if _step_job(pid) is not None and keeps_log(pid)]


def clear_strays(cookie: str, limit_s: float = CLEAR_LIMIT_S) -> list[str]:
    """Kill what lives on of a test's jobs outside of them (it left its process group); return it in sentences."""
    mark = f"MLHPC_TEST={cookie}".encode()

    def strays() -> list[int]:
        found = [(pid, _read(pid, "environ").split(b"\0")) for pid in _pids() if pid != os.getpid()]
        return [
            pid
            for pid, variables in found
            if mark in variables and any(one.startswith(b"SLURM_JOB_ID=") for one in variables)
        ]

    return _kill_lasting(strays, "outlived its job", limit_s)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5) stat from the state on."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def is_alive(directory: Path, daemon: str) -> bool:
    """Return whether the daemon of this name lives that `ci/` started in a directory."""
    try:
        pid, started = (directory / "pids" / daemon).read_text(encoding="ascii").split()
    except OSError:
        return False
    fields = _stat(int(pid))
    return bool(fields) and fields[0] not in "ZX" and fields[19] == started


def _step_job(pid: int) -> str | None:
    """Return the job of a step daemon, whose command line is `slurmstepd: [JOB.STEP]`; None for other processes."""
    line = _command_line(pid)
    return line[len("slurmstepd: [") :].partition(".")[0] if line.startswith("slurmstepd: [") else None


def wait_until(check: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Return whether it came true in time."""
    deadline = time.monotonic() + limit_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
