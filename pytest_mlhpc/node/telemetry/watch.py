"""No torch. Looks at one node of a running job and prints what it sees: ``watch --seconds 30 --job 4711``.

Lines are short, as those of several nodes come through one pipe, in which long ones are mixed (srun cuts at 1,024 bytes): each
sample is compressed and cut into pieces, ``mlhpc-screen HOST NUMBER PIECE PIECES TEXT``. With ``--lines`` its output is a file
for one reader of one node (``beside.py``), which never grows beyond some size (``looks.py``). It ends when its time is over, or
when nobody listens.
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
from typing import Callable, Iterator, Optional, Sequence

from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.telemetry.devices import find_devices
from pytest_mlhpc.node.telemetry.processes import Reader
from pytest_mlhpc.node.telemetry.sampler import INTERVAL_S, Sampler
from pytest_mlhpc.node.telemetry.samples import Looks, Sample

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
    """Look and print; 0 at the end of the time or of the parent, 1 if nobody listens any more."""
    parser = argparse.ArgumentParser(prog="watch")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--interval", type=float, default=INTERVAL_S)
    parser.add_argument("--job", help="only processes of this Slurm job; without: all that can be seen")
    parser.add_argument("--root", type=int, help="only processes below this one")
    parser.add_argument(
        "--for", dest="parent", type=int, help="end with this process, which started this one"
    )
    parser.add_argument(
        "--lines", action="store_true", help="write short looks to the file that is its output, at most 2 MiB"
    )
    arguments = parser.parse_args(argv)
    sampler = Sampler(Reader(arguments.root, arguments.job), find_devices(), arguments.interval)
    parent = arguments.parent or os.getppid()
    end = time.monotonic() + arguments.seconds
    add = Looks(sys.stdout.fileno()).add if arguments.lines else _printing()
    while time.monotonic() < end and os.getppid() == parent:  # an orphan looks for nobody
        sample = sampler.take()
        try:
            add(sample)
        except BrokenPipeError:
            return 1
        _pause(min(time.monotonic() + sampler.pause_s, end), parent)
    return 0


def _pause(until: float, parent: int) -> None:
    """Sleep in short parts: where looking is dear a pause lasts many seconds, and an orphan must not stay so long."""
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(max(0.0, min(INTERVAL_S, until - time.monotonic())))


if __name__ == "__main__":
    sys.exit(main())
