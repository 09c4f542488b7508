"""What being looked at costs a training: the same steps with the sampler beside them and without, in turns, in one process.

A step is a fixed piece of work of one thread, so that its CPU time and its wall time mean the same. The sampler is the one of
``mlhpc screen`` and of ``telemetry=True``: another process, which looks at this process's tree every half second. While it shall not
look it is stopped (SIGSTOP), so that turns can be short; of each side the fastest rounds count, those that nothing else disturbed.
Its own CPU time is a figure of its own: it is paid where a rank uses all cores. So is what the hook adds to each step.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row
from pytest_mlhpc.node.telemetry.hook.mlhpc_screen_hook import HookRecord

#: Rounds of each side, and seconds of CPU time of one; the fastest quarter of each side is compared.
ROUNDS, ROUND_S = 24, 0.5

REACH = 0.01


def work(count: int) -> int:
    """Do *count* fixed pieces of work."""
    total = 0
    for number in range(count):
        total += number * number % 7
    return total


def timed(count: int) -> tuple[float, float]:
    """Return wall and CPU seconds of a round."""
    wall, cpu = time.perf_counter(), time.process_time()
    work(count)
    return time.perf_counter() - wall, time.process_time() - cpu


def best(times: list[float]) -> float:
    """Return the mean of the fastest quarter."""
    return statistics.fmean(sorted(times)[: max(1, len(times) // 4)])


def cpu_of(pid: int) -> float:
    """Return CPU seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def beside() -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Return (wall, CPU) of each round, watched and alone, and the sampler's CPU time as a share of watched wall time."""
    count = 10_000
    while timed(count)[1] < ROUND_S:
        count *= 2
    with tempfile.TemporaryFile() as file:
        argv = [
            sys.executable,
            "-m",
            "pytest_mlhpc.node.telemetry.sampler",
            "--seconds",
            "1e9",
            "--root",
            str(os.getpid()),
            "--lines",
        ]
        watcher = subprocess.Popen(argv, stdout=file, stdin=subprocess.DEVNULL)
        try:
            while os.fstat(file.fileno()).st_size == 0:
                time.sleep(0.05)
            return _turns(watcher.pid, count)
        finally:
            watcher.send_signal(signal.SIGCONT)
            watcher.terminate()
            watcher.wait()


def _turns(watcher: int, count: int) -> tuple[dict[str, list[tuple[float, float]]], float]:
    rounds: dict[str, list[tuple[float, float]]] = {"watched": [], "alone": []}
    before = cpu_of(watcher)
    for turn in range(ROUNDS):
        for side in ("watched", "alone") if turn % 2 else ("alone", "watched"):
            os.kill(watcher, signal.SIGCONT if side == "watched" else signal.SIGSTOP)
            rounds[side].append(timed(count))
    used = cpu_of(watcher) - before
    return rounds, used / sum(wall for wall, _ in rounds["watched"])


def hook_s() -> float:
    """Return the seconds that the hook takes for one step and one batch, profile apart: the fastest of many rounds."""
    with tempfile.TemporaryDirectory() as folder:
        record = HookRecord(folder, (0, 0))
        optimizer = object()
        found = []
        for _ in range(200):
            begin = time.perf_counter()
            for _ in range(100):
                if record.own():
                    record.wait_s += time.monotonic() - time.monotonic()
                if record.own():
                    record.step(optimizer)
            found.append((time.perf_counter() - begin) / 100)
    return statistics.median(found)


def run() -> list[Row]:
    """Let both sides take turns."""
    rounds, share = beside()
    rows = []
    for place, what in enumerate(("wall time", "CPU time")):
        watched, alone = (best([one[place] for one in rounds[side]]) for side in ("watched", "alone"))
        added = watched / alone - 1
        rows.append(
            Row(
                f"sampler beside a training, {what} of its steps",
                "<= 1 %",
                f"{100 * added:+.2f} %",
                added <= REACH,
            )
        )
    rows.append(
        Row("CPU time of the sampler, share of one core", "<= 1 %", f"{100 * share:.2f} %", share <= REACH)
    )
    each = hook_s()
    rows.append(
        Row(
            "hook of `mlhpc screen`, share of a step of 10 ms",
            "<= 1 %",
            f"{each / 1e-4:.3f} % ({1e6 * each:.1f} us)",
            each <= 1e-4,
        )
    )
    return rows
