"""Record files and run folders of sessions of long ago, written by the store and then dated back."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nights_of import DAY, store
from worlds import measurement, rank, record

from pytest_mlhpc.node.protocol.schema import Figure, MetricValue, Rate, RunEvent, TimedOperation, to_json
from pytest_mlhpc.provision.payload import make_directory
from pytest_mlhpc.store import record as product
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import record_of

NOW_NS = time.time_ns()
#: Two years ago, and a time long before that.
BEFORE_NS, OLD_DAYS = NOW_NS - 730 * DAY, 800


def sampled(number: int, days: float = OLD_DAYS, value: float = 100.0, **changes: Any) -> Record:
    """Return a record with every list of observations that a run can report, made so many days ago."""
    steps = tuple(0.1 + place / 7000 for place in range(200))
    report = rank(
        step_times_s=steps,
        losses=steps,
        timed=(TimedOperation("all_reduce", steps, (Rate("bus_bandwidth", "B/s", 8.0),), ("latency",)),),
        figures=(Figure("gap", 0.2, "s", "lower", samples=steps),),
        events=(RunEvent("eval_accuracy", 5, 0.7, {"epoch": 1}),),
    )
    loss = MetricValue("loss", 0.1, "1", "lower", steps, first=2.0, last=0.1, tolerance=0.3)
    peak = MetricValue("gemm_flops_fp32", 100.0, "FLOP/s", "higher", (90.0, 100.0, 110.0, *steps))
    found = measurement(value, more=(loss, peak), step_times_s=steps, per_rank=(report,))
    fields = {"created_ns": NOW_NS - int(days * DAY), "measurement": found, "session": f"s{number}"}
    return record(number, **{**fields, **changes})


def without_samples(record: Record) -> Record:
    """Return the record as pruning leaves it."""
    return record_of(product.without_samples(to_json(record)))


def stored(state_dir: Path, records: Sequence[Record], session: str = "old", days: float = OLD_DAYS) -> Path:
    """Store *records* in one file that was last written so many days ago; return its path."""
    store(state_dir, records, session)
    (path,) = state_dir.glob(f"records/*/{session}.jsonl")
    dated(path, days)
    return path


def newest(state_dir: Path) -> Path:
    """Store a session of a week ago, so that no older one is the newest."""
    return stored(state_dir, [sampled(9000, 7)], "newest", 7)


def run_folder(state_dir: Path, session: str, days: float = OLD_DAYS) -> Path:
    """Make a session's folder as a session does, with a log of a run, all last written so many days ago."""
    folder = state_dir / "runs" / session
    make_directory(folder / "allocation", "logs")
    (folder / "allocation/logs/rank-0.log").write_text("x" * 20_000)
    dated(folder, days)
    return folder


def dated(path: Path, days: float) -> None:
    """Let *path* and all below it be last written so many days ago."""
    moment = NOW_NS - int(days * DAY)
    for one in (*path.rglob("*"), path):
        if not one.is_symlink():
            os.utime(one, ns=(moment, moment))
