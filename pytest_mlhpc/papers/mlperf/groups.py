"""Repeated runs of one training on one machine at one scale: their result and their division. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pytest_mlhpc.papers.mlperf import rules, scoring
from pytest_mlhpc.papers.mlperf.rules import Departure
from pytest_mlhpc.papers.mlperf.scoring import Score
from pytest_mlhpc.papers.mlperf.trained import Trained
from pytest_mlhpc.report import keys
from pytest_mlhpc.store.record import SeriesKey

#: Repeated runs differ in it by the rules (MLPerf Training rules, "Run Results": random numbers).
_REPEATED = "seed"


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, oldest first."""

    runs: tuple[Trained, ...]

    @property
    def key(self) -> SeriesKey:
        """The oldest one's series."""
        return self.runs[0].key

    @property
    def benchmark(self) -> keys.Benchmark:
        """The oldest one's benchmark."""
        return self.runs[0].benchmark

    @property
    def workload(self) -> str:
        """What was trained."""
        return self.runs[0].workload

    @property
    def name(self) -> str:
        """The test's name, for people."""
        key = keys.parse(self.benchmark)
        return (key.name if key else "") or self.workload

    @property
    def machine(self) -> str:
        """Where, for people: ``system:partition``."""
        return machine_of(self.key)

    @property
    def staging(self) -> str:
        """How its data came to the nodes: ``files`` or ``archives``; empty where nothing was staged."""
        return str(self.runs[0].parameters.get("staging") or "")

    @property
    def score(self) -> Score:
        """The olympic mean; a run that did not reach its target is one that did not converge."""
        return scoring.olympic([run.time_s if run.reached else None for run in self.runs])

    @property
    def departures(self) -> tuple[Departure, ...]:
        """All that single runs and their number depart from."""
        found = [one for run in self.runs for one in rules.departures(run)]
        lost = sum(not run.reached for run in self.runs)
        return tuple(dict.fromkeys([*found, *rules.of_group(self.workload, len(self.runs), lost)]))

    @property
    def division(self) -> str:
        """The strictest division whose rules all runs keep together."""
        return rules.division(self.departures)


def machine_of(key: SeriesKey) -> str:
    """Return the machine of a series for people: system, partition, and the environment where it has a name."""
    place = ":".join(filter(None, (key.system, key.partition)))
    return f"{place} {key.environment}" if key.environment not in ("", "default") else place


def groups(runs: Iterable[Trained]) -> tuple[Group, ...]:
    """Return *runs* in groups, in the order of machines and keys."""
    found: dict[SeriesKey, list[Trained]] = {}
    for run in sorted(runs, key=lambda one: (one.created_ns, one.record)):
        found.setdefault(replace(run.key, benchmark=_without_seed(run.benchmark)), []).append(run)
    made = [Group(tuple(some)) for some in found.values()]
    return tuple(sorted(made, key=lambda one: (one.machine, keys.order(one.benchmark))))


def _without_seed(benchmark: keys.Benchmark) -> str:
    """Return what is left without the seed: a seed that parametrizes a test stands in its identity, too."""
    key = keys.parse(benchmark)
    if key is None:
        return json.dumps(benchmark)
    fields = {name: value for name, value in key.fields.items() if name != _REPEATED}
    return json.dumps([benchmark.name.partition("[")[0], key.workload, sorted(fields.items())])
