"""Made-up nights of one benchmark: records with figures, a day apart, the last one in the last few hours."""

import contextlib
import itertools
import random
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds import SECOND, measurement, record

from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import Store

DAY = 86_400 * 1_000_000_000
HOUR = DAY // 24


def quiet(count: int, level: float = 100.0, seed: int = 1) -> list[float]:
    """*count* figures within about 1 % of *level*."""
    choose = random.Random(seed)  # noqa: S311 - test data, the same each time
    return [level * choose.gauss(1.0, 0.004) for _ in range(count)]


def nights(
    values: Sequence[float],
    *,
    environments: Sequence[Mapping[str, str]] = (),
    last_ns: int | None = None,
    **changes: Any,
) -> list[Record]:
    """Records of *values*, oldest first; of *environments* each holds for its night, the last one for all later ones."""
    end_ns = time.time_ns() - HOUR if last_ns is None else last_ns
    found = []
    for number, value in enumerate(values):
        environment = environments[min(number, len(environments) - 1)] if environments else {}
        name = "".join(str(changes.get(field, "")) for field in ("system", "benchmark"))
        fields = {
            "id": f"01890000-0000-7000-{zlib.crc32(name.encode()) % 9000 + 1000}-{number:012d}",
            "created_ns": end_ns - (len(values) - 1 - number) * DAY,
            "session": f"01890000-0000-7000-8000-{number:012d}",
            "measurement": measurement(value, environment=environment),
            "commit": "c0ffee0123456789",
            "nodes": ("n1",),
            **changes,
        }
        found.append(record(number, **fields))
    return found


def store(state_dir: Path, records: Sequence[Record], session: str = "s1") -> Path:
    """Append *records* to one file of the store and return it; without any, the folder of such files."""
    with contextlib.closing(Store(state_dir, session)) as writer:
        for one in records:
            writer.append(one)
    return writer.path or state_dir / "records"


@pytest.fixture
def recorded(state_dir):
    """Return what stores a run on a machine, *days* ago; later calls store newer runs."""
    numbers = itertools.count(1)

    def put(machine="cirrus:standard", *, days=0.0, **fields):
        number = next(numbers)
        system, _, partition = machine.partition(":")
        created_ns = time.time_ns() - int(days * DAY) - (10_000 - number) * SECOND
        run = {"system": system, "partition": partition, "created_ns": created_ns, **fields}
        if isinstance(run.get("benchmark"), Benchmark):
            run |= run["benchmark"]._asdict() | {"benchmark": run["benchmark"].name}
            del run["name"]
        store(state_dir, [record(number, **run)])

    return put
