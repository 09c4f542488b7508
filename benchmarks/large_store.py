"""What commands cost on a store of five years: processor time and memory over its size, and the exponent by which they grow.

Records are made up and in the product's own form: of four, one is a training as `mlhpc records prune` leaves it (26 figures, 7.7 kB)
and three are programs (2 figures, 2 kB). Each of 1,826 nights is a session with a file of its own; in larger stores a night has more
tests. `python -m benchmarks.large_store 1000000` measures one size alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.record_memory import measurement
from benchmarks.report import Row, table
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, to_json
from pytest_mlhpc.store.locations import index_path
from pytest_mlhpc.store.record import Record, without_samples
from pytest_mlhpc.store.store import json_line, month_of

SIZES = (10_000, 30_000, 100_000)
NIGHTS = 1_826
SEED = 24
DAY_NS = 86_400 * 10**9
#: Bound of a first `mlhpc status` of 50,000 records (s), to which its fitted growth is read off.
STATUS_S = 2.0
_PLACES = 8  #: systems

TEST = """
from pytest_mlhpc import Metric, program

@program(["bash", "-c", "echo rate: 100.0"], Metric("rate", r"rate: (\\S+)", "items/s"))
def test_trivial(run, baseline):
    assert run >= baseline
"""

#: What is measured, in this order: name, arguments. The first one finds no index; each is called twice.
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("status", ("status",)),
    ("status --night", ("status", "--night")),
    ("history changes", ("history", "changes")),
    ("alert (dry run)", ("alert", "send", "--dry-run")),
    ("report html, 365 days", ("report", "html", "--output", "report.html")),
    ("records usage", ("records", "usage")),
)


@dataclass(frozen=True)
class Cost:
    """Processor time with that of children (s), and the largest memory of one process (MB)."""

    cpu_s: float
    memory_mb: float


def fill(state: Path, count: int, now_ns: int) -> int:
    """Write *count* records of five years before *now_ns*; return their bytes."""
    training, program = _template(trained=True), _template(trained=False)
    tests = max(1, round(count / NIGHTS))
    draw = np.random.default_rng(SEED)
    size = 0
    for night in range(NIGHTS):
        night_ns = now_ns - (NIGHTS - night) * DAY_NS + DAY_NS // 2
        noise = draw.standard_normal(tests)
        milliseconds = b"%012x" % (night_ns // 10**6)  # as a UUIDv7 begins
        begins = milliseconds[:8] + b"-" + milliseconds[8:]
        lines = []
        for test in range(tests):
            slower = 0.95 if test % 40 == 7 and night > NIGHTS - 20 else 1.0
            values = {
                b"@id": b"%b-7000-8000-%012d" % (begins, night * tests + test),
                b"@session": b"0199%08d-7000-8000-aaaaaaaaaaaa" % night,
                b"@test": b"%d" % test,
                b"@system": b"system%d" % (test % _PLACES),
                b"1234567890123456789": b"%d" % (night_ns + test * 10**9),
                b"98765.4321": b"%.4f" % (1000.0 * slower * (1 + 0.01 * noise[test])),
            }
            lines.append(_filled(training if test % 4 == 0 else program, values))
        path = state / "records" / month_of(night_ns) / f"{values[b'@session'].decode()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))
        os.utime(path, ns=(night_ns + DAY_NS // 4,) * 2)
        size += path.stat().st_size
    return size


def _template(*, trained: bool) -> bytes:
    """Return the line of a record with marks where records differ."""
    plain = Measurement(
        run_id="@id", nonce="n", attempt=0, workload="command", device_type="none", device_model="", nodes=("n1",), ranks=1,
        devices=0, steps=0, samples=0, started_ns=1, ended_ns=2,
        metrics=(MetricValue("judged", 98765.4321, "items/s", "higher"), MetricValue("time", 12.5, "s", "lower")),
        environment={"driver": "570.124.06", "kernel": "6.1.0-28-amd64", "torch": "2.8.0"},
    )  # fmt: skip
    name = f"suites/{'training' if trained else 'programs'}/test_a.py::test_@test"
    record = Record(
        id="@id", session="@session", node_id=f"{name}[@system:gpu]", benchmark=f"{name}[precision=bf16,ranks=4]", system="@system",
        partition="gpu", environment="default", definition="resnet50 devices=4 nodes=1 " + "field=value " * 18,
        device_model="", attempt=0, created_ns=1234567890123456789, verdict="passed", purpose="nightly", branch="main",
        commit="0123456789abcdef", nodes=("n1",), judged=("judged",), explanation=("as on the nights before " * 12,),
        parameters={f"parameter_{number}": number for number in range(40 if trained else 8)}, root="/home/user/suite",
        measurement=plain,
    )  # fmt: skip
    if trained:
        record = replace(record, measurement=replace(measurement(record), run_id="@id"))
    return json_line(without_samples(to_json(record)))


def _filled(line: bytes, values: dict[bytes, bytes]) -> bytes:
    for mark, value in values.items():
        line = line.replace(mark, value)
    return line


def measured(argv: Sequence[str], folder: Path, state: Path) -> Cost:
    """Run a command and return what it cost."""
    environment = {**os.environ, "MLHPC_STATE": str(state)}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1) or b"Traceback" in (folder / "output").read_bytes():
        text = (folder / "output").read_text("utf-8", "replace")[-2000:]
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}: {text}")
    cost = Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
    sys.stderr.write(f"{' '.join(argv[2:5])}: {cost.cpu_s:.1f} s, {cost.memory_mb:.0f} MB\n")
    return cost


def at_size(count: int, folder: Path) -> dict[str, tuple[Cost, Cost]]:
    """Return what each command costs at first and again, on a store of *count* records."""
    state = folder / "state"
    fill(state, count, time.time_ns())
    found = {}
    (folder / "test_trivial.py").write_text(TEST)
    session = ("-m", "pytest", "-q", "--system", "local:cpu", "-p", "no:cacheprovider", "test_trivial.py")
    for name, arguments in COMMANDS:
        argv = [sys.executable, "-m", "pytest_mlhpc.cli", *arguments]
        found[name] = measured(argv, folder, state), measured(argv, folder, state)
        if name == "status":
            index_path(state).unlink()
            argv = [sys.executable, *session]
            found["a session of one test"] = measured(argv, folder, state), measured(argv, folder, state)
            index_path(state).unlink()
    return found


def _exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of the fitted line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def run(sizes: Sequence[int] = SIZES) -> list[Row]:
    """Return a row for each command: first and later calls over sizes, and the exponents."""
    costs = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="mlhpc-large-store-") as folder:
            costs.append(at_size(size, Path(folder)))
    heads = "/".join(f"{size // 1000}k" for size in sizes)
    rows = []
    for name in costs[0]:
        for which, what in ((0, "first"), (1, "again")):
            seconds = [one[name][which].cpu_s for one in costs]
            text = f"{', '.join(f'{one:.1f}' for one in seconds)} s of CPU; {costs[-1][name][which].memory_mb:.0f} MB"
            ok, reach = None, "-"
            if len(sizes) > 1:
                slope = _exponent(sizes, seconds)
                text += f"; exponent {slope:.2f}"
                if name == "status" and which == 0:
                    near = math.exp(np.interp(math.log(50_000), np.log(sizes), np.log(seconds)))
                    reach, ok = f"50,000: <= {STATUS_S:g} s", near <= STATUS_S
            rows.append(Row(f"{name}, {what}, {heads}", reach, text, ok))
    return rows


if __name__ == "__main__":
    print(table(run([int(word) for word in sys.argv[1:]] or SIZES)))
