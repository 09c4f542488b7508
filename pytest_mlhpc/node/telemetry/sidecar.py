"""No torch. The sampler of a benchmark's node (field ``telemetry``): on each node one process, started by the node's first rank.

It is a process of its own, as a thread would take turns with the training for Python's lock. It samples all that the rank's
parent has started (the batch, torchrun, Slurm's step: all ranks of the node), writes lines into a file of the rank's, which stays
small however long that runs (``samples.py``), and ends with the rank, however that ends.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Callable

from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.node.protocol.schema import RankReport
from pytest_mlhpc.node.telemetry.samples import LONGEST, figures, parse, window
from pytest_mlhpc.node.worker.environment import WorkerFailure

if TYPE_CHECKING:
    from pytest_mlhpc.node.protocol.plan import RunPlan
    from pytest_mlhpc.node.worker.base import Accelerator
    from pytest_mlhpc.node.worker.distributed import Group

#: Seconds that the sampler may take to its first sample, or to another one; and to end after SIGTERM.
LOOK_S, END_S = 60.0, 10.0

#: Bytes for samples that must be free at the beginning, of the 2 MiB that they may become.
LEAST_BYTES = 64 << 10

_OR_WITHOUT = "or run without telemetry"

Measure = Callable[["RunPlan", "Group", "Accelerator", Path, Callable[[int, int, float], None]], RankReport]


def watched(measure: Measure) -> Measure:
    """Return *measure* with the sampler beside it; its figures are those of the timed window.

    A record that lacks them is refused (``metric_missing``): where they cannot be had that is reported before *measure* begins.

    Raises:
        WorkerFailure: ``disk_full``, there is no file for samples; ``launch_failed``, the sampler cannot be started or ends at once.
    """

    def measured(
        run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Callable[..., None]
    ) -> RankReport:
        if group.local_rank != 0:
            return measure(run, group, accelerator, directory, progress)
        with open_file() as file:
            watcher = start(file)
            try:
                await_interval(file, watcher)
                _check(watcher)
                report = measure(run, group, accelerator, directory, progress)
                await_interval(file, watcher)  # short runs have a sample before and one after
            finally:
                end(watcher)
            file.seek(0)
            intervals = parse(file)
        behind_s = (time.time_ns() - time.monotonic_ns()) / 1e9
        found = window(intervals, report.started_ns / 1e9 - behind_s, report.ended_ns / 1e9 - behind_s)
        return dataclasses.replace(report, figures=(*report.figures, *figures(found)))

    return measured


def open_file() -> IO[bytes]:
    """Return an empty temporary file with room for some samples.

    Raises:
        WorkerFailure: ``disk_full``, it cannot be made or written.
    """
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - who asked for it closes it
        try:
            at = 0
            while at < LEAST_BYTES:  # a full disk takes an empty file, and the first part of a write
                at += os.pwrite(file.fileno(), bytes(LEAST_BYTES - at), at)
            os.ftruncate(file.fileno(), 0)
        except OSError:
            file.close()
            raise
    except OSError as error:
        where = (
            f"in {tempfile.tempdir} on {socket.gethostname()}"
            if tempfile.tempdir
            else f"on {socket.gethostname()}"
        )
        text = f"telemetry has no file for what it sees {where}: {error.strerror or error}"
        advice = f"make room there, name another folder in TMPDIR, {_OR_WITHOUT}"
        raise WorkerFailure(unwritten(error), f"{text}; {advice}") from error
    return file


def start(file: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the sampler; it writes a line for each sample to *file*.

    Raises:
        WorkerFailure: ``launch_failed``, the node does not start it.
    """
    argv = [
        "-m",
        "pytest_mlhpc.node.telemetry.sampler",
        "--seconds",
        "1e9",
        "--root",
        str(os.getppid()),
        "--for",  # told, as who is killed at once has left an orphan before it could ask for its parent
        str(os.getpid()),
        "--lines",
    ]
    try:
        return subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        text = f"the sampler of telemetry cannot be started on {socket.gethostname()}: {error}"
        advice = f"look at its limits on processes and memory, {_OR_WITHOUT}"
        raise WorkerFailure("launch_failed", f"{text}; {advice}") from error


def _check(watcher: subprocess.Popen[Any]) -> None:
    code = watcher.poll()
    if code is None:
        return
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    text = f"the sampler of telemetry ended with {how} on {socket.gethostname()} before the run began"
    advice = f"`{sys.executable} -m pytest_mlhpc.node.telemetry.sampler --seconds 1` there tells why, {_OR_WITHOUT}"
    raise WorkerFailure("launch_failed", f"{text}; {advice}")


def await_interval(file: IO[bytes], watcher: subprocess.Popen[Any]) -> None:
    """Wait until one more sample is written, the sampler has ended, or it takes too long: then the record lacks its figures.

    The place in *file*, which the sampler writes on, stays; of what was written the end alone is read.
    """
    deadline = time.monotonic() + LOOK_S
    before = _newest(file)
    while watcher.poll() is None and time.monotonic() < deadline:
        if _newest(file) > before:
            return
        time.sleep(0.02)


def _newest(file: IO[bytes]) -> float:
    """Return the time of the last whole sample; below all times, if there is none, or the file is just being cut."""
    size = os.fstat(file.fileno()).st_size
    end = os.pread(file.fileno(), 2 * LONGEST, max(0, size - 2 * LONGEST))
    lines = end[: end.rfind(b"\n") + 1].splitlines(keepends=True)
    return max((one.time_s for one in parse(lines[-1:])), default=float("-inf"))


def end(watcher: subprocess.Popen[Any]) -> None:
    """End the sampler."""
    watcher.terminate()
    try:
        watcher.wait(END_S)
    except subprocess.TimeoutExpired:
        watcher.kill()
        watcher.wait()
