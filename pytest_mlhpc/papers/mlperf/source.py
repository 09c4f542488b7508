"""Records of the store, as this part needs them: runs to a quality target, and windows of steps. Reads files only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.papers.mlperf.trained import Trained, asked_for, trained
from pytest_mlhpc.report.figures import ACCEPTED
from pytest_mlhpc.report.keys import benchmark_of
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record


@dataclass(frozen=True)
class Found:
    """What is recorded. ``runs`` are oldest first; ``windows`` accepted records of other trainings; ``left_out`` says of whom and why."""

    runs: tuple[Trained, ...]
    windows: tuple[Record, ...]
    left_out: tuple[str, ...] = ()


def find(
    state_dir: Path,
    since_ns: int,
    tell: Callable[[str], None],
    *,
    system: str = "",
    holds: Sequence[str] = (),
) -> Found:
    """Return what was recorded since then, of *system* where it is given, and of benchmarks that hold all of *holds*.

    First attempts only: whoever counted re-runs too could choose.

    Raises:
        StoreError: the record files cannot be read.
    """
    if not (state_dir / "records").is_dir():  # else an index would be made where nobody wants one
        return Found((), ())
    index = Index(state_dir, tell)
    try:
        records = index.since(since_ns)
    finally:
        index.close()
    wanted = [
        record
        for record in reversed(records)
        if record.attempt == 0
        and (not system or record.system == system)
        and all(benchmark_of(record).holds(text) for text in holds)
    ]
    return sort_out(wanted)


def sort_out(records: Iterable[Record]) -> Found:
    """Part *records* (oldest first) in runs to a quality target, windows, and what is neither. A second copy counts once."""
    runs: dict[str, Trained] = {}
    windows: dict[str, Record] = {}
    left_out: dict[str, str] = {}
    for record in records:
        if not asked_for(record):
            if record.measurement is not None and record.verdict in ACCEPTED and neutral(record.overrides):
                windows[record.id] = record
            continue
        if not neutral(record.overrides):
            left_out[record.id] = "made with --mlhpc-set"
            continue
        found = trained(record)
        if isinstance(found, str):
            left_out[record.id] = found
        else:
            runs[record.id] = found
    return Found(
        tuple(runs.values()),
        tuple(windows.values()),
        tuple(f"{name}: {why}" for name, why in left_out.items()),
    )
