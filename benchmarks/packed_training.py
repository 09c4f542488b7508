"""What a training costs beyond its own steps where it shares an allocation: forked by a warm process against fresh, in one run.

Slurm and Kubernetes have two partitions that differ in ``warm`` alone. Each side is a session with several trainings in one
allocation, in turns. A run lasts from the first of its processes to the last; its steps are the warm-up and the timed window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import Row
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import read_records

#: Trainings of an allocation, and allocations of each side.
RUNS, TURNS = 5, 2

#: The two partitions, and what ``warm`` is there.
PARTITIONS = {"forked": True, "fresh": False}

SUITE = f"""
import pytest
from pytest_mlhpc import train

@pytest.mark.parametrize("turn", range({RUNS}))
@train("cosmoflow", preset="smoke", judge=False)
def test_training(run, turn):
    pass
"""


def rows(where: str, state: Path, session: Callable[[str], None]) -> list[Row]:
    """Return the figures of trainings *where*; *session* runs the suite in one allocation of a partition.

    Raises:
        SystemExit: a rank was not what its partition says.
    """
    for turn in range(2 * TURNS):
        session(list(PARTITIONS)[turn % 2])
    found = list(read_records(state))
    sides = {name: [one for one in found if one.partition == name] for name in PARTITIONS}
    for name, warm in PARTITIONS.items():
        said = {one.measurement.environment["interpreter"] for one in sides[name] if one.measurement}
        if said != {"warm" if warm else "fresh"} or len(sides[name]) != RUNS * TURNS:
            raise SystemExit(f"{len(sides[name])} ranks of {where} on {name} were {', '.join(sorted(said))}")
    first = statistics.median(map(_beyond, _firsts(sides["forked"])))
    later = [one for one in sides["forked"] if one not in _firsts(sides["forked"])]
    forked, fresh = (statistics.median(map(_beyond, one)) for one in (later, sides["fresh"]))
    text = f"{fresh:.2f} s; {forked:.2f} s (the first of an allocation {first:.2f} s)"
    return [
        Row(f"CosmoFlow, smoke, {where}, beyond its steps: fresh; forked", "<= 0.7 s", text, forked <= 0.7),
        Row("... forked against fresh, compute throughput", "+-1 %", _apart(sides), None),
    ]


def _firsts(records: Sequence[Record]) -> list[Record]:
    """Return the first record of each session: its rank waited for the warm process."""
    return [
        one for at, one in enumerate(records) if one.session not in {other.session for other in records[:at]}
    ]


def _beyond(record: Record) -> float:
    return record.run_s - _value(record, "epoch_time") - _value(record, "warmup_time")


def _value(record: Record, name: str) -> float:
    if record.measurement is None:
        raise SystemExit(f"{record.node_id} has measured nothing: {record.failure}")
    return next(one.value for one in record.measurement.metrics if one.name == name)


def _apart(sides: dict[str, list[Record]]) -> str:
    here, there = ([_value(one, "compute_throughput") for one in sides[name]] for name in PARTITIONS)
    error = (
        sum(statistics.stdev(one) ** 2 / len(one) / statistics.mean(one) ** 2 for one in (here, there)) ** 0.5
    )
    return f"{statistics.median(here) / statistics.median(there) - 1:+.1%} (standard error {error:.1%})"
