"""The cluster as a whole: up, down, status, and the faults that tests make."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from testcluster import box, configuration, database, nodes, ports, processes
from testcluster.configuration import NODES, Settings
from testcluster.daemons import BOX, START_LIMIT_S, Daemons
from testcluster.errors import ClusterError

#: How long a daemon gets to write its state down when it is asked to end, in seconds.
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Wish:
    """What the caller of ``up`` asks for; None: whatever is there, else the default."""

    accounting: str | None = None
    cgroup: bool | None = None
    port: int | None = None
    release: str | None = None
    root: Path | None = None
    binds: tuple[Path, ...] = ()


class Cluster:
    """The cluster of one directory. Callers hold :meth:`Daemons.locked` around everything that changes it."""

    def __init__(self, directory: Path) -> None:
        """Name the directory; nothing is made."""
        configuration.check_directory(directory)
        self.directory = directory
        self.daemons = Daemons(directory)
        self.conf = directory / "etc/slurm.conf"

    # --- up and down

    def up(self, wish: Wish) -> None:
        """Start what does not run; all nodes serve afterwards."""
        if os.geteuid() != 0:
            raise ClusterError(
                "run this as root: nodes need namespaces, device nodes and jobs of several users"
            )
        if self.is_up():
            self._check(wish)
            self._start(self.settings())
            return
        self.down()  # whatever is left of one that died
        with ports.free_range(configuration.PORTS, self.directory, first=wish.port) as port:
            try:
                self._make(wish, port)
            except BaseException:
                self.down(purge=True)  # nobody uses half a cluster; its logs stay
                raise

    def down(self, *, purge: bool = False) -> None:
        """End all that was started and everything that runs in jobs; with ``purge`` at once, as its directory is removed next.

        Raises:
            ClusterError: Something lives on.
        """
        if self.alive("slurmctld") and not purge:
            self._cancel_everything()  # so that accounting knows their end
        self._kill_nodes(*NODES)
        patience = 0.0 if purge else _PATIENCE_S
        for name in ("slurmctld", *database.NAMES, "munged", BOX):
            self.daemons.end(name, patience_s=patience)
        processes.end_all(self.daemons.every_process)
        self.daemons.forget()
        _remove_cgroups()

    def is_up(self) -> bool:
        """Return whether any of it lives (a test may have ended the rest)."""
        return any(self.alive(name) for name in self.daemons.names() if name not in {"watcher", BOX})

    def expected(self) -> list[str]:
        """Return the names of the daemons that a whole cluster has."""
        databases = database.NAMES if self.settings().accounting == "dbd" else ()
        holder = [BOX] if self.settings().root else []
        return [*holder, "munged", *databases, "slurmctld", *map(nodes.daemon_of, NODES)]

    def alive(self, name: str) -> bool:
        """Return whether one daemon lives."""
        return self.daemons.alive(name)

    def settings(self) -> Settings:
        """Return how the cluster was started.

        Raises:
            ClusterError: It never was.
        """
        try:
            return Settings.from_text((self.directory / "state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ClusterError(f"no cluster in {self.directory}; `ci/slurm up` starts one") from None

    # --- faults

    def start_node(self, node: str) -> None:
        """Start a node and wait until jobs can run there."""
        nodes.start(self.daemons, node, namespaces=self.settings().namespaces)
        if self.alive("slurmctld"):
            self.daemons.await_service(nodes.daemon_of(node), lambda: self._usable(node))

    def kill_node(self, node: str) -> None:
        """Cut the power of a node."""
        nodes.kill(self.daemons, node, namespaces=self.settings().namespaces)

    def start_controller(self) -> None:
        """Start slurmctld from its saved state and wait until it answers."""
        self.settings()
        self.daemons.start("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        self.daemons.await_service("slurmctld", lambda: self.call("scontrol", "ping").returncode == 0)

    def stop_controller(self) -> None:
        """End slurmctld; it saves its state, jobs run on."""
        self.daemons.end("slurmctld", patience_s=_PATIENCE_S)

    def start_database(self) -> None:
        """Start MariaDB and slurmdbd and wait until they answer."""
        settings = self.settings()
        if settings.accounting != "dbd":
            raise ClusterError(f"this cluster has no database (accounting {settings.accounting})")
        database.start(self.daemons, settings)

    def stop_database(self) -> None:
        """End slurmdbd and MariaDB; slurmctld keeps what it has to say until they are back."""
        for name in database.NAMES:
            self.daemons.end(name, patience_s=_PATIENCE_S)

    # --- questions

    def call(self, *argv: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster; 124 where it did not end in time."""
        try:
            return subprocess.run(
                self.daemons.inside(argv), env=self.daemons.environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=limit_s, check=False,
            )  # fmt: skip
        except ClusterError as error:
            return subprocess.CompletedProcess(argv, 126, "", str(error))
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 124, "", f"no answer within {limit_s:.0f} s")

    def node_states(self) -> dict[str, str]:
        """Return the state of every node in Slurm's words, empty when the controller does not answer."""
        answer = self.call("sinfo", "-h", "-N", "-o", "%N|%T").stdout
        return dict(line.split("|", 1) for line in answer.splitlines() if "|" in line)

    def _usable(self, *wanted: str) -> bool:
        states = self.node_states()
        # planned: idle, and kept for a job that waits
        serving = r"(idle|planned|mixed|allocated|completing)$"
        return all(re.match(serving, states.get(node, "")) for node in wanted)

    # --- parts

    def _make(self, wish: Wish, port: int) -> None:
        self._prepare()
        if wish.root:
            box.start(self.daemons, wish.root, wish.binds)
        settings = Settings(
            port=port, accounting=wish.accounting or "dbd", cgroup=bool(wish.cgroup),
            namespaces=nodes.namespaces_work(self.daemons),
            release=wish.release or "", root=str(wish.root or ""), binds=tuple(map(str, wish.binds)),
        )  # fmt: skip
        if settings.cgroup:
            _check_cgroups()
        self._configure(settings)
        self._start(settings)

    def _check(self, wish: Wish) -> None:
        settings = self.settings()
        for word in ("accounting", "cgroup", "port", "release"):
            asked, present = getattr(wish, word), getattr(settings, word)
            if asked is not None and asked != present:
                raise ClusterError(f"runs already with {word} {present}, not {asked}; `ci/slurm down` first")

    def _prepare(self) -> None:
        folder = self.directory
        # What a drained node or a queue left would otherwise come back.
        for stale in (folder / "bin", folder / "controller", *folder.glob("spool.*")):
            shutil.rmtree(stale, ignore_errors=True)
        for name in ("etc", "run", "log", "pids", "controller", "dev", "mysql", "pmix"):
            (folder / name).mkdir(mode=0o755, exist_ok=True)
        self._write("hosts", configuration.hosts(_present_hosts(), host=_host()), 0o644)

    def _configure(self, settings: Settings) -> None:
        folder, host = self.directory, _host()
        _make_key(folder / "etc/munge.key")
        for number in range(configuration.GPUS_PER_NODE):
            _make_device(folder / f"dev/nvidia{number}")
        # Tenths of a second: a cluster that runs fewer than ten jobs a second gives no id again for 76 days.
        first_job = 1000 + int(time.time() * 10) % 66_000_000
        for name, text, mode in (
            ("slurm.conf", configuration.slurm_conf(folder, settings, host=host, first_job=first_job), 0o644),
            ("slurmdbd.conf", configuration.slurmdbd_conf(folder, settings, host=host), 0o600),
            ("gres.conf", configuration.gres_conf(folder), 0o644),
            ("cgroup.conf", configuration.cgroup_conf(settings, version=self._version()), 0o644),
            ("mpi.conf", f"PMIxCliTmpDirBase={folder}/pmix\n", 0o644),
        ):
            self._write(name, text, mode)
        (folder / "state.json").write_text(settings.to_text(), encoding="utf-8")

    def _write(self, name: str, text: str, mode: int) -> None:
        path = self.directory / "etc" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)

    def _start(self, settings: Settings) -> None:
        folder, munge_socket = self.directory, self.directory / "run/munge.sock"
        if settings.root and not self.alive(BOX):
            box.start(self.daemons, Path(settings.root), [Path(path) for path in settings.binds])
        self.daemons.start(
            "munged",
            [
                "munged", "-F", "--force", f"--key-file={folder}/etc/munge.key", f"--socket={munge_socket}",
                f"--pid-file={folder}/run/munged.pid", f"--log-file={folder}/log/munged.log",
                f"--seed-file={folder}/run/munged.seed", "--num-threads=2",
            ],
        )  # fmt: skip
        self.daemons.await_service("munged", lambda: ports.answers(munge_socket))
        if settings.accounting == "dbd":
            database.start(self.daemons, settings)
        self.start_controller()  # before the nodes: those that find none wait a second
        for node in NODES:
            nodes.start(self.daemons, node, namespaces=settings.namespaces)
        if not processes.wait_until(lambda: self._usable(*NODES), START_LIMIT_S):
            reasons = self.call("sinfo", "-N", "-o", "%N %T %E").stdout
            raise ClusterError(f"not all nodes came up:\n{reasons}{self.daemons.last_words('slurmd')}")

    def _kill_nodes(self, *wanted: str) -> None:
        try:
            namespaces = self.settings().namespaces
        except ClusterError:
            return
        nodes.kill(self.daemons, *wanted, namespaces=namespaces)

    def _cancel_everything(self) -> None:
        jobs = self.call("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.call("scancel", *jobs)
            processes.wait_until(lambda: not self.call("squeue", "-h").stdout.strip(), _PATIENCE_S)

    def _version(self) -> tuple[int, int]:
        words = self.call("slurmctld", "-V").stdout
        match = re.search(r"(\d+)\.(\d+)", words)
        if match is None:
            raise ClusterError(f"slurmctld -V answers {words!r}")
        return int(match[1]), int(match[2])


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _make_key(path: Path) -> None:
    if not path.exists():
        path.touch(mode=0o600)
        path.write_bytes(os.urandom(1024))


def _make_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mknod(path, 0o020666, os.makedev(1, 3))  # mem(4): /dev/null is 1, 3
    path.chmod(0o666)


def _present_hosts() -> str:
    try:
        return Path("/etc/hosts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _check_cgroups() -> None:
    if not Path("/sys/fs/cgroup/memory/cgroup.procs").exists() or not Path("/sys/fs/cgroup/freezer").is_dir():
        raise ClusterError("--cgroup v1: this machine has no cgroup v1 memory and freezer controllers")
    if any(Path("/sys/fs/cgroup").glob("*/slurm_node1")):
        raise ClusterError("--cgroup v1: another Slurm on this machine uses it, and both would have a node1")


def _remove_cgroups() -> None:
    """Remove what nodes left. rmdir(2) refuses a cgroup in use, so those of another cluster stay."""
    for node in NODES:
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    Path(folder).rmdir()
                except OSError:
                    continue
