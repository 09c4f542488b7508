"""Made-up nights of made-up systems, for tests and measurements of what looks back: plain data, the same each time."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from pytest_mlhpc.history.series import Night, Point, Series

DAY_NS = 86_400 * 10**9
#: 2026-06-01, 02:00 UTC.
FIRST_NS = 1_780_279_200 * 10**9


def benchmark(name: str = "test_cosmoflow", devices: int = 1) -> str:
    """The identity of a test, which has a parameter where it runs on several devices."""
    return f"suites/training/{name}.py::{name}{f'[{devices}]' if devices > 1 else ''}"


def definition(workload: str = "cosmoflow", *, devices: int = 1, batch: int = 16, steps: int = 100) -> str:
    return f"{workload} data=memory devices={devices} global_batch={batch} kernel_size=3 nodes=1 preset=small steps={steps} warmup=3"


def night(number: int = 0, **changes: Any) -> Night:
    """One nightly run that passed; *number* nights after the first."""
    fields: dict[str, Any] = {
        "id": f"r{number}", "session": f"s{number}", "system": "cirrus", "partition": "standard", "environment": "default",
        "node_id": "suites/training/test_cosmoflow.py::test_cosmoflow[cirrus:standard]", "device_model": "AMD EPYC 9825",
        "fingerprint": "", "benchmark": benchmark(), "definition": definition(), "attempt": 0, "created_ns": FIRST_NS + number * DAY_NS,
        "verdict": "passed", "purpose": "nightly", "branch": "main", "commit": "0123456789abcdef", "nodes": ("n1",),
        "node_hours": 0.5, "judged": ("effective_throughput",), "changes": {"driver": "570"},
    }  # fmt: skip
    return Night(**{**fields, **changes})


def series(
    nights: Sequence[Night], values: Sequence[float], metric: str = "effective_throughput", unit: str = "samples/s",
    better: str = "higher",
) -> Series:  # fmt: skip
    """The figures of *nights*, one each; NaN where a night has none."""
    pairs = zip(nights, values, strict=True)
    points = tuple(Point(one, value) for one, value in pairs if not math.isnan(value))
    return Series(nights[0].series(metric), unit, better, metric in nights[0].judged, points)


class GivenSource:
    """A Source of what a test made."""

    def __init__(self, every: Sequence[Series], more: Sequence[Night] = ()) -> None:
        self._series = sorted(every, key=lambda one: str(one.key))
        self._more = list(more)

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        once = {point.night.id: point.night for one in self._series for point in one.points}
        once |= {one.id: one for one in self._more}
        end = math.inf if until_ns is None else until_ns
        chosen = [one for one in once.values() if since_ns <= one.created_ns < end]
        yield from sorted(chosen, key=lambda one: (one.created_ns, one.id))

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        end = math.inf if until_ns is None else until_ns
        for one in self._series:
            if (system and one.key.system != system) or (benchmark and one.key.benchmark != benchmark):
                continue
            points = tuple(point for point in one.points if since_ns <= point.night.created_ns < end)
            if points:
                yield replace(one, points=points)


def a_year(
    nights: int = 365, names: Sequence[str] = ("test_cosmoflow", "test_deepcam", "test_resnet50"), *, seed: int = 1,
    systems: Mapping[str, tuple[str, str, float]] | None = None, scales: Sequence[int] = (1, 2, 4, 8), end_ns: int = 0,
) -> GivenSource:  # fmt: skip
    """Nights of three systems with noise, a driver that made one of them slower, failures, re-runs and an unfit node.

    The last night is at *end_ns*, where given.
    """
    dice = random.Random(seed)  # noqa: S311 - the same each time
    machines = systems or {
        "cirrus": ("standard", "AMD EPYC 9825", 100.0),
        "archer2": ("gpu", "AMD Instinct MI210", 310.0),
        "eidf": ("h100", "NVIDIA H100 80GB HBM3", 840.0),
    }
    first_ns = end_ns - (nights - 1) * DAY_NS if end_ns else FIRST_NS
    found: list[Series] = []
    broken: list[Night] = []
    for system, (partition, device, rate) in machines.items():
        for place, name in enumerate(names):
            for devices in scales:
                made = _bench(dice, _What(system, partition, device, name, devices), nights, first_ns)
                level = rate * devices ** (0.97 - 0.02 * place) / (1 + place)
                found += _figures(dice, made, level, devices, _drops(system, name, nights))
                broken += _failures(dice, made[-1], nights, first_ns)
    return GivenSource(found, broken)


def _drops(system: str, name: str, nights: int) -> Callable[[int], float]:
    """From which night on figures are lower, for a new driver or for no reason, or higher."""
    late = nights - 6 if (system, name) == ("eidf", "test_deepcam") else nights
    slower = nights * 3 // 4 if system == "archer2" else late
    better = nights // 3 if system == "cirrus" else nights
    return lambda number: (0.93 if number >= slower else 1.0) * (1.04 if number >= better else 1.0)


@dataclass(frozen=True)
class _What:
    system: str
    partition: str
    device: str
    name: str
    devices: int


_REGRESSED = "regressed: effective_throughput 92.9 samples/s: 7.1 % below 100 (3 of 4 re-runs agree)"
_DRIFTED = "drifted: the median of 30 nights is 7 % below the baseline"


def _bench(dice: random.Random, what: _What, nights: int, first_ns: int) -> list[Night]:
    system, partition, device, name, devices = astuple(what)
    computed = definition(name.removeprefix("test_"), devices=devices, batch=16 * devices)
    found = []
    for number in range(nights):
        where = f"{system}-n{dice.randint(1, 12):03}"
        drifted = system == "archer2" and number >= nights * 3 // 4
        late = system == "eidf" and name == "test_deepcam" and number >= nights - 6
        failure = _DRIFTED if drifted else _REGRESSED if late else ""
        changes = {
            "driver": "580.95" if drifted else "570.86", "torch": "2.8.0" if number < nights // 3 else "2.9.1", "kernel": "6.4.0",
        }  # fmt: skip
        unfit = {f"{system}-n013": "memory bandwidth 31 % below its peers"} if number % 29 == 3 else {}
        found.append(night(
            number, id=f"{system}-{name}-{devices}-{number}", session=f"{system}-{number}",
            node_id=f"suites/training/{name}.py::{name}[{system}:{partition}-{devices}]", system=system, partition=partition,
            device_model=device, benchmark=benchmark(name, devices), definition=computed, created_ns=first_ns + number * DAY_NS + dice.randint(0, 3600) * 10**9,
            verdict=failure.partition(":")[0] or "passed", failure=failure, commit=f"{pow(7, 57 + number // 9, 1 << 160):040x}",
            nodes=(where,), unfit=unfit, node_hours=0.4 * devices, changes=changes,
        ))  # fmt: skip
    return found


def _figures(
    dice: random.Random, nights: Sequence[Night], level: float, devices: int, factor: Callable[[int], float]
) -> Iterator[Series]:
    rates, epochs, waits, talks, steps = [], [], [], [], []
    for number in range(len(nights)):
        slow = 0.96 if dice.random() < 0.02 else 1.0
        rate = level * factor(number) * slow * dice.gauss(1.0, 0.006)
        rates.append(rate)
        epochs.append(3200 * devices / rate)
        waits.append(epochs[-1] * (0.12 + 0.03 * math.sin(number / 40)) * dice.gauss(1.0, 0.05))
        steps.append(16 * devices / rate)
        talks.append(steps[-1] * 0.06 * math.log2(devices) * dice.gauss(1.0, 0.05))
    yield series(nights, rates)
    seconds = {"epoch_time": epochs, "io_time": waits, "step_time": steps}
    if devices > 1:
        seconds["exposed_communication_time"] = talks
    for name, values in seconds.items():
        yield series(nights, values, name, "s", "lower")


def _failures(dice: random.Random, last: Night, nights: int, first_ns: int) -> Iterator[Night]:
    for number in sorted(dice.sample(range(nights), max(1, nights // 60))):
        created_ns = first_ns + number * DAY_NS + 7200 * 10**9
        verdict = dice.choice(["worker_killed", "node_failure", "out_of_memory"])
        broken = {
            "verdict": verdict,
            "failure": "worker_killed: rank 3 was killed by signal 9",
            "changes": {},
        }
        yield replace(last, id=f"{last.id}-broken-{number}", device_model="", created_ns=created_ns, **broken)
