"""Memory of the harness: a session that judges against a store of 2,000 training records, and one that makes 2,000.

The records are of 200 steps, with every step's time and every loss, as the reference presets leave them; all belong to
the series that is judged, so that nothing can be left aside. The pytest process itself reports the largest resident size
that the kernel saw of it (VmHWM, proc(5)). That is ``ru_maxrss`` without two flaws: this one is inherited from whoever
forked the process, and ``RUSAGE_CHILDREN`` would count programs that the tests started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row
from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, RankReport
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import Store, read_records

RECORDS = 2_000
TOGETHER = 50  #: records that share a file of the store, and tests that share a module: large ones take much to parse
STEPS, WARMUP = 200, 32
BOUND = 150

TEST = """
@program(["bash", "-c", "echo rate: 100.0"], RATE)
def test_trivial_{number}(run, baseline):
    assert run >= baseline
"""
HEAD = 'from pytest_mlhpc import Metric, program\n\nRATE = Metric("rate", r"rate: (\\S+)", "items/s")\n'

#: Runs last in the pytest process, whatever becomes of the session.
CONFTEST = """
import atexit
import os
import pathlib
import re

@atexit.register
def report():
    status = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path(os.environ["MEMORY_FILE"]).write_text(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])
"""


def session(folder: Path, tests: int) -> float:
    """Run a suite of *tests* trivial tests once and return the peak of the pytest process in MB."""
    for start in range(0, tests, TOGETHER):
        written = "".join(TEST.format(number=number) for number in range(start, min(start + TOGETHER, tests)))
        (folder / f"test_{start}.py").write_text(HEAD + written)
    (folder / "conftest.py").write_text(CONFTEST)
    memory = folder / "memory"
    environment = {**os.environ, "MLHPC_STATE": str(folder / "state"), "MEMORY_FILE": str(memory)}
    environment.pop("CI", None)
    argv = [sys.executable, "-m", "pytest", "-q", "--system", "local:cpu", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return int(memory.read_text()) * 1024 / 1e6


def measurement(record: Record) -> Measurement:
    """Return the measurement of a training run of one rank that also has the metric of *record*."""
    assert record.measurement is not None
    run = RunPlan(
        run_id=record.id, nonce=record.measurement.nonce, attempt=0, workload="resnet50", parameters={}, nodes=1, ranks=1,
        cores_per_rank=8, device_type="cpu", launcher="plain", time_limit_s=600.0, steps=STEPS, warmup_steps=WARMUP,
    )  # fmt: skip
    report = RankReport(
        rank=0, local_rank=0, host="node", device_type="cpu", device_index=0, device_model="processor", steps=STEPS,
        samples=8 * STEPS, started_ns=1, ended_ns=60_000_000_001, epoch_s=60.0, wait_s=1.5, copy_s=0.0, warmup_s=9.0,
        step_times_s=tuple(0.3 + step / 7919 for step in range(STEPS)),
        losses=tuple(7.0 - step / 1009 for step in range(STEPS + WARMUP)), forward_s=20.0, backward_s=35.0,
        optimizer_s=3.0, peak_memory_bytes=2**31, environment={f"OMP_{n}": "value" * 4 for n in range(25)},
        contention={"load_before": 0.1, "load_after": 0.9},
    )  # fmt: skip
    combined = combine(run, [report])
    return replace(combined, metrics=(*combined.metrics, *record.measurement.metrics))


def fill(state: Path) -> int:
    """Add 2,000 records to the series of the only record in the store; return the bytes that all take."""
    (record,) = read_records(state)
    template = replace(record, verdict="passed", measurement=measurement(record))
    for start in range(0, RECORDS, TOGETHER):
        store = Store(state, f"session-{start:05}")
        for number in range(start, start + TOGETHER):
            made_ns = record.created_ns - (RECORDS - number) * 1_000_000
            store.append(replace(template, id=f"{record.id[:-5]}{number:05}", created_ns=made_ns))
        store.close()
    return sum(path.stat().st_size for path in (state / "records").rglob("*.jsonl"))


def run() -> list[Row]:
    """Run the two sessions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = session(folder, 1)
        size = fill(folder / "state")
        reading = session(folder, 1)
    with tempfile.TemporaryDirectory() as name:
        writing = session(Path(name), RECORDS)
    stored = f"{reading:.0f} MB ({size / 1e6:.0f} MB on disk; {alone:.0f} MB with an empty store)"
    return [
        Row("harness that reads a store of 2,000 records", f"<= {BOUND} MB", stored, reading <= BOUND),
        Row("harness that makes 2,000 records", f"<= {BOUND} MB", f"{writing:.0f} MB", writing <= BOUND),
    ]
