"""How fast records get into InfluxDB and back: the real server of `ci/services`, on this machine; and a push of nothing new.

`python -m benchmarks.influx --points 10000000 --no-read` does the same with as many points as one likes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row, table
from pytest_mlhpc.cli.records import LANES
from pytest_mlhpc.influx import cursor as cursors
from pytest_mlhpc.influx.credentials import InfluxServer, server_of
from pytest_mlhpc.influx.push import InfluxSink, Patience, Sender, Sink, push_records
from pytest_mlhpc.influx.source import InfluxSource
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, to_json
from pytest_mlhpc.store.record import Record

POINTS = 300_000
METRICS = 24  #: of one record, as a training has
BENCHMARKS = 40  #: at least; more where that many nights do not hold all records
NIGHTS = 365  #: InfluxDB keeps a shard, with a cache of its own, for each week: decades of nights would measure those
RATE = 50_000
#: The store of which nothing is new: records, in so many files. Five years of nights have some 2,000 files.
OLD_RECORDS, OLD_FILES = 1_000_000, 2_000
NOTHING_NEW_S = 1.0
DAY_NS = 86400 * 1_000_000_000
_COMMAND = [sys.executable, "-m", "pytest_mlhpc.cli", "records", "push"]
_SERVICES = Path(__file__).resolve().parents[1] / "ci/services"


def records(count: int) -> Iterator[Record]:
    """Yield records of made-up nights, as long as real ones."""
    benchmarks = max(BENCHMARKS, -(-count // NIGHTS))
    for number in range(count):
        night, benchmark = divmod(number, benchmarks)
        name = f"resnet50[batch_per_device=64,kernel_size=7,name=test_{benchmark},optimizer=sgd,precision=bf16,ranks=4]"
        metrics = tuple(
            MetricValue(
                f"metric_{index}", 1000.0 + (number * 7919 + index * 31) % 997 / 13, "samples/s", "higher"
            )
            for index in range(METRICS)
        )
        measured = Measurement(
            run_id="r", nonce="n", attempt=0, workload="resnet50", device_type="cuda", device_model="NVIDIA H100", nodes=("n1",),
            ranks=4, devices=4, steps=200, samples=51200, started_ns=1, ended_ns=2, metrics=metrics,
            environment={"driver": "570.124.06", "kernel": "6.1.0-28-amd64", "torch": "2.8.0", "image": "sha256:0123456789ab"},
        )  # fmt: skip
        yield Record(
            id=f"0199{number:08d}-7000-8000-000000000000", session=f"0199{night:08d}-7000-8000-aaaaaaaaaaaa",
            node_id=f"suites/training/test_resnet50.py::test_{benchmark}[mysystem:gpu-4]", benchmark=name, system="mysystem",
            partition="gpu", environment="default", definition="resnet50 devices=4 nodes=1", device_model="NVIDIA H100", attempt=0,
            created_ns=1_700_000_000_000_000_000 + night * DAY_NS + benchmark * DAY_NS // benchmarks, verdict="passed",
            purpose="nightly", branch="main", commit="0123456789abcdef", nodes=("n1",), judged=("metric_0",), measurement=measured,
        )  # fmt: skip


def store(state: Path, points: int) -> None:
    """Fill the record files, one for the session of each night, without syncing them."""
    cursors.restart(state, 0)
    for session, some in itertools.groupby(records(-(-points // (METRICS + 1))), lambda one: one.session):
        path = state / f"records/2026-01/{session}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(_line, some)))


def _line(record: Record) -> bytes:
    return json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n"


def push(sink: Sink, state: Path) -> tuple[int, float]:
    """Send what waits; return how many points, and the seconds that it took."""
    start = cursors.read_start(state)
    assert start is not None
    sender = Sender(sink, state, Patience(time.monotonic() + 600), lanes=LANES)
    began = time.perf_counter()
    push_records(sender, start, sys.exit)
    return sender.progress.points, time.perf_counter() - began


class _Taking:
    """A server that takes everything at once."""

    def write(self, lines: bytes) -> None:
        """Take them."""


def nothing_new(folder: Path) -> list[Row]:
    """Push a large store to a sink that takes everything; then push again, and once by the command."""
    one = dataclasses.replace(next(records(1)), measurement=None, id="@" * 36)
    head, tail = _line(one).split(b"@" * 36)
    cursors.restart(folder, 0)
    each = OLD_RECORDS // OLD_FILES
    for number in range(OLD_FILES):
        path = folder / f"records/{number // 30:04d}/{number:08d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(b"%b%036d%b" % (head, number * each + line, tail) for line in range(each)))
    _, first = push(_Taking(), folder)
    _, again = push(_Taking(), folder)
    environ = {**os.environ, "MLHPC_INFLUX_URL": "http://127.0.0.1:9"}
    began = time.perf_counter()
    subprocess.run(
        [*_COMMAND, "--state-dir", str(folder)], env=environ, check=True, capture_output=True, timeout=600
    )
    whole = time.perf_counter() - began
    size = f"{OLD_RECORDS:,} records in {OLD_FILES:,} files"
    return [
        Row(f"first push of {size}, without a server", "-", f"{first:.0f} s", None),
        Row("push of nothing new", f"<= {NOTHING_NEW_S:g} s", f"{again:.2f} s", again <= NOTHING_NEW_S),
        Row("the same by `mlhpc records push`, start of Python included", "-", f"{whole:.2f} s", None),
    ]


def measure(points: int, *, read_back: bool = True) -> list[Row]:
    """Return the figures; reading back needs memory for all points."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-influx-") as folder:
        state, directory = Path(folder) / "state", str(Path(folder) / "server")
        _services("up", directory, "--for", str(os.getpid()))
        try:
            words = (shlex.split(line)[1] for line in _services("env", directory).splitlines())
            server = server_of(dict(word.split("=", 1) for word in words))
            store(state, points)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with InfluxSink(server, timeout_s=600) as sink:
                cpu = time.process_time()
                count, seconds = push(sink, state)
                cpu = time.process_time() - cpu
            rate = count / seconds
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            back = [_read_back(server)] if read_back else []
        finally:
            _services("down", directory, "--purge")
    return [
        Row(
            "points sent from record files to a local InfluxDB, a second",
            f">= {RATE:,}",
            f"{rate:,.0f} ({count:,} points)",
            rate >= RATE,
        ),
        Row("CPU time of the sender for a point", "-", f"{cpu / count * 1e6:.1f} us", None),
        Row("memory that sending takes", "-", f"{grown:.0f} MB", None),
        *back,
    ]


def _read_back(server: InfluxServer) -> Row:
    began = time.perf_counter()
    source = InfluxSource(server)
    read = sum(len(series.points) for series in source.series())
    rate = read / (time.perf_counter() - began)
    source.close()
    return Row("points read back as series, a second", "-", f"{rate:,.0f} ({read:,} points)", None)


def run() -> list[Row]:
    """Return the figures for the table of benchmarks/performance.md."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-influx-") as folder:
        return [*measure(POINTS), *nothing_new(Path(folder))]


def _services(command: str, directory: str, *words: str) -> str:
    argv = [sys.executable, str(_SERVICES), command, "influxdb", "--directory", directory, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=900).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influx", description=__doc__)
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--no-read", action="store_true", help="do not read them back")
    args = parser.parse_args()
    print(table(measure(args.points, read_back=not args.no_read)))
