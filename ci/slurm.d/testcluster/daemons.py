"""The daemons of one directory: started once, recorded, ended only if they are the ones recorded."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from testcluster import packages, processes
from testcluster.errors import ClusterError
from testcluster.processes import Process

#: Every daemon has this in its environment, and slurmstepd inherits it. Jobs do not: they get their user's environment.
MARK = "MLHPC_SLURM_DIRECTORY"
#: How long a daemon may take until it serves, in seconds; a loaded machine needs a multiple of the usual one.
START_LIMIT_S = 1200.0
#: The daemon that holds the root of a cluster of another release, see :mod:`testcluster.box`.
BOX = "box"


class Daemons:
    """What runs for ``directory``. A daemon's record is ``pids/NAME``: its pid and start time."""

    def __init__(
        self, directory: Path, *, mark: str = MARK, variables: Mapping[str, str] | None = None
    ) -> None:
        """Name the directory; nothing is made.

        Args:
            directory: Where all of it lies.
            mark: Variable of the environment by which what was started for this directory is found again.
            variables: More variables for every daemon; None: those of Slurm.
        """
        self.directory = directory
        self.mark = mark
        self._variables = (
            {"SLURM_CONF": str(directory / "etc/slurm.conf")} if variables is None else variables
        )

    @property
    def environment(self) -> dict[str, str]:
        """Return all that a daemon gets: nothing of the caller's, so that no test's marks are on it."""
        return {
            "PATH": packages.PATH,
            "LANG": "C.UTF-8",
            "HOME": str(Path.home()),
            **self._variables,
            self.mark: str(self.directory),
        }

    def recorded(self, name: str) -> Process | None:
        """Return the process that was started under this name, alive or not."""
        try:
            return processes.parse((self.directory / "pids" / name).read_text(encoding="ascii"))
        except OSError:
            return None

    def names(self) -> list[str]:
        """Return the names of all that was started and not ended by us."""
        folder = self.directory / "pids"
        return (
            sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
            if folder.is_dir()
            else []
        )

    def alive(self, name: str) -> bool:
        """Return whether the daemon of this name lives."""
        return processes.alive(self.recorded(name))

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` in the cluster's own root; ``argv`` where it has none.

        Raises:
            ClusterError: The process that holds the root is gone.
        """
        holder = self.recorded(BOX)
        if holder is None:
            return list(argv)
        if not processes.alive(holder):
            raise ClusterError(
                f"nothing holds the root of the cluster in {self.directory}; `ci/slurm up` makes it again"
            )
        return ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--", *argv]

    def start(self, name: str, argv: Sequence[str], *, outside: bool = False, **variables: str) -> None:
        """Start a daemon that does not live yet, in the cluster's own root unless ``outside``.

        Its output goes to ``log/NAME.out``.
        """
        if self.alive(name):
            return
        if not outside:
            argv = self.inside(argv)
        for folder in ("log", "pids"):
            (self.directory / folder).mkdir(mode=0o755, exist_ok=True)
        log = self.directory / "log" / f"{name}.out"
        try:
            process = processes.spawn(argv, log=log, environment={**self.environment, **variables})
        except OSError as error:
            raise ClusterError(f"cannot start {name}: {error}{self.last_words(name)}") from error
        temporary = self.directory / "pids" / f".{name}"
        temporary.write_text(f"{process}\n", encoding="ascii")
        temporary.replace(self.directory / "pids" / name)

    def await_service(self, name: str, check: Callable[[], bool], *, limit_s: float = START_LIMIT_S) -> None:
        """Wait until a daemon serves.

        Raises:
            ClusterError: It ended, or did not serve in time; with its last words.
        """
        served = processes.wait_until(lambda: check() or not self.alive(name), limit_s)
        if not self.alive(name):
            raise ClusterError(f"{name} ended while starting{self.last_words(name)}")
        if not served:
            raise ClusterError(f"{name} does not serve after {limit_s:.0f} s{self.last_words(name)}")

    def every_process(self) -> list[Process]:
        """Return what lives for the directory, the watcher and this command excepted: by its mark, by its record, and all below."""
        spared, watcher = {os.getpid(), os.getppid()}, self.recorded("watcher")
        recorded = [process for name in self.names() if (process := self.recorded(name))]
        marked = processes.with_variable(self.mark, str(self.directory))
        found = [
            process
            for process in {*marked, *recorded}
            if process != watcher and process.pid not in spared and processes.alive(process)
        ]
        return [*found, *processes.descendants(found)]

    def forget(self) -> None:
        """Remove the records of all daemons, that of the watcher excepted."""
        for name in self.names():
            if name != "watcher":
                (self.directory / "pids" / name).unlink(missing_ok=True)

    def end(self, *names: str, patience_s: float) -> None:
        """End daemons and forget them; those that never lived count as ended."""
        found = [process for name in names if (process := self.recorded(name))]
        processes.end(found, patience_s=patience_s)
        for name in names:
            (self.directory / "pids" / name).unlink(missing_ok=True)

    def last_words(self, name: str) -> str:
        """Return the ends of a daemon's logs, for an error."""
        words: list[str] = []
        for log in sorted((self.directory / "log").glob(f"{name}.*")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            words.extend(f"\n  {log.name}: {line}" for line in lines)
        return "".join(words)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands away from this directory for the block; makes the directory.

        Raises:
            ClusterError: It belongs to somebody else.
        """
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        while True:
            if self.directory.stat().st_uid != os.geteuid():
                raise ClusterError(f"{self.directory} belongs to somebody else")
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._is_current(descriptor):
                    yield
                    return
                self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)  # removed while we waited
            finally:
                os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), (self.directory / "lock").stat())
        except OSError:
            return False
