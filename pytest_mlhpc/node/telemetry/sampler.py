"""No torch. Takes samples of one node of a running job and prints them: ``sampler --seconds 30 --job 4711``.

Lines are short, as those of several nodes come through one pipe, in which long ones are mixed (srun cuts at 1,024 bytes): each
sample is compressed and cut into pieces, ``mlhpc-screen HOST NUMBER PIECE PIECES TEXT``. With ``--lines`` its output is a file
for one reader of one node (``sidecar.py``), which never grows beyond some size (``samples.py``). It ends when its time is over, or
when nobody listens.

The interval grows where sampling is dear (a node with thousands of processes): CPU time of sampling stays below ``SHARE``
of one core.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import Callable, Iterator, Optional, Sequence, Tuple

from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.telemetry.readings import Devices, NoDevices, Reader, find_devices, parse_pairs
from pytest_mlhpc.node.telemetry.samples import IntervalWriter, NodeSample, Sample

#: Seconds from one sample to the next, if sampling is cheap.
INTERVAL_S = 0.5

#: Most CPU time of sampling, as a share of one core.
SHARE = 0.005

#: Limits of memory that are as good as none: control groups say "no limit" by a number of pages near 2^63 (v1).
NO_LIMIT = 1 << 60


class Sampler:
    """Samples the node; ``pause_s`` is how long to wait before the next sample."""

    def __init__(
        self,
        reader: Reader,
        devices: Optional[Devices] = None,
        interval_s: float = INTERVAL_S,
        root: Path = Path("/"),
    ) -> None:
        self._reader, self._devices = reader, devices or NoDevices("not looked for")
        self._interval_s, self._root = interval_s, root
        self._host = socket.gethostname()
        self._cost_s = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds until the next sample: the interval, longer where the last samples were dear."""
        return max(self._interval_s, self._cost_s / SHARE)

    def slow_down(self) -> None:
        """Sample half as often from now on."""
        self._interval_s *= 2

    def take(self) -> Sample:
        """Take one sample."""
        began = time.process_time()
        now = time.monotonic()
        processes, devices, node = self._reader.read(), self._devices.read(), self._node()
        cost = time.process_time() - began
        self._cost_s = cost if self._cost_s == 0.0 else 0.8 * self._cost_s + 0.2 * cost
        return Sample(now, cost, node, processes, devices)

    def _node(self) -> NodeSample:
        contended = contention.snapshot(self._root)
        total, free = memory(self._root)
        ticks = os.sysconf("SC_CLK_TCK")
        return NodeSample(
            host=self._host,
            cores=os.cpu_count() or 1,  # of all, as what keeps them busy is
            memory_bytes=total,
            memory_free_bytes=free,
            busy_s=None if contended.jiffies is None else contended.jiffies[0] / ticks,
            throttled_s=None if contended.throttled_us is None else contended.throttled_us / 1e6,
        )


def memory(root: Path = Path("/")) -> Tuple[Optional[int], Optional[int]]:
    """Return bytes of memory and of what is free: of the machine, or of the control group where that has less.

    A group's free memory counts what it may drop (inactive files, cgroup-v2.rst memory.stat) as the machine's does.
    """
    lines = parse_pairs(_read(root / "proc/meminfo"))
    total, free = _bytes(lines.get("MemTotal")), _bytes(lines.get("MemAvailable"))
    group = contention.parse_cgroup(_read(root / "proc/self/cgroup")) or "/"
    tree = root / "sys/fs/cgroup"
    for folder in (tree / group.lstrip("/"), tree / "memory" / group.lstrip("/"), tree, tree / "memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= NO_LIMIT or (total is not None and limit >= total):
            continue
        droppable = 0
        for line in _read(folder / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file") and value.isdigit():
                droppable = int(value)
        left = max(0, limit - used + droppable)
        return limit, left if free is None else min(left, free)
    return total, free


def _bytes(kib: Optional[int]) -> Optional[int]:
    return None if kib is None else kib << 10


def _number(folder: Path, *names: str) -> Optional[int]:
    for name in names:
        text = _read(folder / name).strip()
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


MARK = "mlhpc-screen"

#: Letters of one piece.
PIECE = 700


def pieces(host: str, number: int, sample: Sample) -> Iterator[str]:
    """Yield the lines of one sample."""
    text = base64.b64encode(zlib.compress(json.dumps(to_json(sample)).encode())).decode()
    parts = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    for place, part in enumerate(parts):
        yield f"{MARK} {host} {number} {place} {len(parts)} {part}\n"


def _printing() -> Callable[[Sample], None]:
    host, numbers = socket.gethostname(), itertools.count()

    def add(sample: Sample) -> None:
        sys.stdout.write("".join(pieces(host, next(numbers), sample)))
        sys.stdout.flush()

    return add


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Sample and print; 0 at the end of the time or of the parent, 1 if nobody listens any more."""
    parser = argparse.ArgumentParser(prog="watch")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--interval", type=float, default=INTERVAL_S)
    parser.add_argument("--job", help="only processes of this Slurm job; without: all that can be seen")
    parser.add_argument("--root", type=int, help="only processes below this one")
    parser.add_argument(
        "--for", dest="parent", type=int, help="end with this process, which started this one"
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="write short samples to the file that is its output, at most 2 MiB",
    )
    arguments = parser.parse_args(argv)
    sampler = Sampler(Reader(arguments.root, arguments.job), find_devices(), arguments.interval)
    parent = arguments.parent or os.getppid()
    end = time.monotonic() + arguments.seconds
    add = IntervalWriter(sys.stdout.fileno()).add if arguments.lines else _printing()
    while time.monotonic() < end and os.getppid() == parent:  # an orphan samples for nobody
        sample = sampler.take()
        try:
            add(sample)
        except BrokenPipeError:
            return 1
        _pause(min(time.monotonic() + sampler.pause_s, end), parent)
    return 0


def _pause(until: float, parent: int) -> None:
    """Sleep in short parts: where sampling is dear a pause lasts many seconds, and an orphan must not stay so long."""
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(max(0.0, min(INTERVAL_S, until - time.monotonic())))


if __name__ == "__main__":
    sys.exit(main())
