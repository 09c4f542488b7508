"""PAYLOAD. The processes of one program that a test has asked for, and what they print."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.batch.words import LauncherWords
from pytest_mlhpc.node.processes import CappedLog, reap

#: Most bytes that are kept of one stream of one process.
OUTPUT_CAP = 16 * 1024 * 1024

#: Most reads of 64 KiB from one pipe in one go, and after the end (a stranger may write for ever).
READS, READS_AT_END = 16, 1024


class Programs:
    """Starts processes, keeps their output in *folder* (``stdout.N``, ``stderr.N``), and knows how they ended."""

    def __init__(self, folder: Path) -> None:
        self.error = ""  #: why one could not be started
        self._folder = folder
        self._processes: List[subprocess.Popen[bytes]] = []
        self._logs: List[Tuple[CappedLog, CappedLog]] = []
        self._open: Dict[int, CappedLog] = {}
        self._words = LauncherWords()
        self._codes: Dict[int, int] = {}

    def start(self, argv: List[str], environment: Mapping[str, str], cwd: str) -> None:
        """Start one process; if that fails ``error`` says why, and no more are started.

        Raises:
            OSError: its logs cannot be made.
        """
        if self.error:
            return
        number = len(self._logs)
        logs = tuple(
            CappedLog(self._folder / f"{name}.{number}", OUTPUT_CAP) for name in ("stdout", "stderr")
        )
        self._logs.append((logs[0], logs[1]))
        try:
            process = subprocess.Popen(
                argv,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            bad_folder = getattr(error, "filename", None) == cwd
            self.error = f"cannot start {argv[0]!r}" + (f" in {cwd!r}" if bad_folder else "") + f": {why}"
            return
        self._processes.append(process)
        for stream, log in zip((process.stdout, process.stderr), logs):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._open[stream.fileno()] = log

    @property
    def outputs(self) -> List[int]:
        """Descriptors from which output may come."""
        return list(self._open)

    @property
    def ended(self) -> bool:
        """Whether all processes have ended by themselves."""
        self._note(reap())
        return all(process.pid in self._codes for process in self._processes)

    def hear(self, reads: int = READS) -> None:
        """Take what was printed.

        Raises:
            OSError: it cannot be kept.
        """
        for descriptor, log in list(self._open.items()):
            with contextlib.suppress(BlockingIOError):
                for _ in range(reads):
                    data = os.read(descriptor, 1 << 16)
                    if not data:
                        del self._open[descriptor]
                        break
                    log.write(data)
                    if any(log is errors for _, errors in self._logs):
                        self._words.feed(data)

    def close(self, ended: Mapping[int, int]) -> None:
        """Take the last output and give descriptors back; *ended* are the exit codes of what had to be ended.

        Raises:
            OSError: output cannot be kept.
        """
        self._note(ended)
        try:
            self.hear(READS_AT_END)
        finally:
            for process in self._processes:
                process.returncode = self._codes.get(process.pid, 0)  # reaped here, not by Popen
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
            for pair in self._logs:
                for log in pair:
                    log.close()
            self._open.clear()

    @property
    def broken_off(self) -> bool:
        """Whether srun, or what it started, was ended by a signal, as happens when the whole job is."""
        words = self._words
        ended = words.cancelled or any(death.exit < 0 for death in words.deaths)
        return ended or any(code < 0 for code in self._codes.values())

    def told(self, *, labelled: bool) -> Dict[str, Any]:
        """Return what the test is told: exit code as a shell gives it, names of logs, and srun's own troubles."""
        codes = [self._codes.get(process.pid, 0) for process in self._processes]
        code = next((code for code in codes if code), 0)
        words = self._words
        return {
            "exit": 128 - code if code < 0 else code,
            "error": self.error,
            "stdout": [str(out.path.relative_to(self._folder.parent)) for out, _ in self._logs],
            "stderr": [str(err.path.relative_to(self._folder.parent)) for _, err in self._logs],
            "dropped": sum(log.dropped for pair in self._logs for log in pair),
            "labelled": labelled,
            "failed_nodes": words.failed_nodes if labelled else [],
            "not_started": words.not_started if labelled else "",
        }

    def _note(self, ended: Mapping[int, int]) -> None:
        self._codes.update(
            {process.pid: ended[process.pid] for process in self._processes if process.pid in ended}
        )
