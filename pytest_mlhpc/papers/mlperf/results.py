"""Results of repeated runs of one training at one scale, published results beside them, and the division that each run belongs to.

The rules' texts are not repeated; each is named by its section, and says to which division it applies.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_mlhpc.node.worker.quality.rules import DEPARTURE as SCHEDULE_DEPARTURE
from pytest_mlhpc.papers.mlperf import trained
from pytest_mlhpc.papers.mlperf.trained import CLOSED, LONGEST_INIT_S, QUALITY, ClosedDivision, TrainedRun
from pytest_mlhpc.papers.throughput import DATA, PUBLISHED, SOURCES
from pytest_mlhpc.report import keys
from pytest_mlhpc.store.record import SeriesKey

#: No result of MLPerf at all, whatever the division; one of the open division only; one of the closed division.
NEITHER, OPEN, CLOSED_DIVISION = "neither", "open", "closed"
HPC: Final = "HPC rules 3.0"
TRAINING: Final = "Training rules"


@dataclass(frozen=True)
class MlperfRule:
    """One rule: where it stands, and whether it binds both divisions or the closed one only."""

    name: str
    document: str
    section: str
    both: bool = False

    def __str__(self) -> str:
        """Return where to read it."""
        return f"{self.document}, {self.section!r}"


BENCHMARK: Final = MlperfRule("benchmark", HPC, "Benchmarks", both=True)
QUALITY_TARGET: Final = MlperfRule("quality_target", HPC, "Benchmarks", both=True)
DATA_SET: Final = MlperfRule("data_set", TRAINING, "Training and Test Sets", both=True)
CACHES: Final = MlperfRule("caches", HPC, "Data State at Start of Run", both=True)
INITIALISATION: Final = MlperfRule("initialisation", TRAINING, "Run Results", both=True)
CONVERGENCE: Final = MlperfRule("convergence", TRAINING, "Run Results", both=True)
RUNS: Final = MlperfRule("runs", HPC, "Benchmark Results", both=True)
EVALUATION: Final = MlperfRule("evaluation", TRAINING, "Quality measure", both=True)
MODEL: Final = MlperfRule("model", TRAINING, "Model")
OPTIMIZER: Final = MlperfRule("optimizer", HPC, "Hyperparameters and Optimizer")
METHOD: Final = MlperfRule("method", HPC, "Closed Division")

RULES: Final = (
    BENCHMARK, QUALITY_TARGET, DATA_SET, CACHES, INITIALISATION, CONVERGENCE, RUNS, EVALUATION, MODEL, OPTIMIZER, METHOD,
)  # fmt: skip


@dataclass(frozen=True)
class Departure:
    """One rule that a run does not keep, and by what."""

    rule: MlperfRule
    text: str

    def __str__(self) -> str:
        """Return ``what (rule)``."""
        return f"{self.text} ({self.rule})"


def departures(run: TrainedRun) -> tuple[Departure, ...]:
    """Return all departures of one run; none where it may count in the closed division."""
    closed = CLOSED.get(run.workload)
    if closed is None:
        return (Departure(BENCHMARK, f"{run.workload} is no benchmark of MLPerf HPC"),)
    return (
        *_quality(run),
        *_data(run, closed),
        *_running(run),
        *_model(run, closed),
        *_optimizer(run, closed),
        *_method(run),
    )


def of_group(workload: str, runs: int, lost: int) -> tuple[Departure, ...]:
    """Return what is wrong with so many *runs*, of which *lost* did not converge."""
    quality = QUALITY.get(workload)
    wanted = quality.runs if quality else None
    found = []
    if wanted is not None and runs != wanted:
        found.append(Departure(RUNS, f"{runs} of {wanted} runs"))
    if lost > 1:
        found.append(Departure(RUNS, f"{lost} runs did not converge, one may"))
    return tuple(found)


def division(found: tuple[Departure, ...]) -> str:
    """Return the strictest division whose rules are met: closed, open, neither."""
    if any(one.rule.both for one in found):
        return NEITHER
    return OPEN if found else CLOSED_DIVISION


def _quality(run: TrainedRun) -> Iterator[Departure]:
    quality = QUALITY[run.workload]
    if run.target is not None and not quality.as_strict(run.target):
        yield Departure(
            QUALITY_TARGET, f"the target was {run.target:g} of {quality.name}, not {quality.target:g}"
        )
    if not run.reached:
        wanted = quality.target if run.target is None else run.target
        yield Departure(
            CONVERGENCE, f"it ended before {quality.name} {'<=' if quality.lower else '>='} {wanted:g}"
        )
    if run.epochs is not None and run.evaluations < math.floor(run.epochs):
        yield Departure(EVALUATION, f"{run.evaluations} evaluations in {run.epochs:g} training epochs")


def _data(run: TrainedRun, closed: ClosedDivision) -> Iterator[Departure]:
    if run.data_kind != "real":
        yield Departure(DATA_SET, f"{run.data_kind or 'unknown'} data")
    for what, found, wanted in (
        ("training", run.train_samples, closed.train_samples),
        ("evaluation", run.eval_samples, closed.eval_samples),
    ):
        if found != wanted:
            have = "an unknown number of" if found is None else f"{found:,}"
            yield Departure(DATA_SET, f"{have} {what} samples, not {wanted:,}")


def _running(run: TrainedRun) -> Iterator[Departure]:
    if run.cache != "cold":
        yield Departure(CACHES, f"the cache was {run.cache}, not cold")
    if run.init_s is not None and run.init_s >= LONGEST_INIT_S:
        yield Departure(
            INITIALISATION,
            f"initialisation took {run.init_s / 60:.0f} min, {LONGEST_INIT_S / 60:.0f} are too many",
        )


def _model(run: TrainedRun, closed: ClosedDivision) -> Iterator[Departure]:
    for name, wanted in closed.model.items():
        found = run.parameters.get(name)
        if not _same(found, wanted):
            yield Departure(MODEL, f"{name}={'unset' if found is None else found}, not {wanted}")


def _optimizer(run: TrainedRun, closed: ClosedDivision) -> Iterator[Departure]:
    name = run.parameters.get("optimizer")
    if name not in closed.optimizers:
        yield Departure(OPTIMIZER, f"optimizer {name}, not {' or '.join(closed.optimizers)}")
    for key, wanted in closed.values.items():
        found = trained.first(run.events, key)
        if found is not None and not _same(found, wanted):
            yield Departure(OPTIMIZER, f"{key}={found}, not {wanted:g}")
    for key in closed.positive:
        found = trained.first(run.events, key)
        found = run.parameters.get(key) if found is None else found
        if found is not None and not (trained.number(found) or 0) > 0:
            yield Departure(OPTIMIZER, f"{key}={found}, not more than 0")
    for text in trained.values(run.events, SCHEDULE_DEPARTURE):
        yield Departure(OPTIMIZER, str(text))


def _method(run: TrainedRun) -> Iterator[Departure]:
    if run.parameters.get("bagging"):
        yield Departure(METHOD, "an ensemble of base models (bagging)")
    compression = run.parameters.get("gradient_compression")
    if compression == "powersgd":
        yield Departure(METHOD, f"gradients are exchanged with loss (gradient_compression={compression})")


def _same(found: Any, wanted: Any) -> bool:
    """Return whether two values, either of which may be a text, mean the same."""
    if str(found) == str(wanted):
        return True
    try:
        return math.isclose(float(found), float(wanted), rel_tol=1e-9)
    except (TypeError, ValueError):
        return False


def by_rule(found: tuple[Departure, ...]) -> Mapping[MlperfRule, tuple[str, ...]]:
    """Return the departures under their rules, in the rules' order."""
    return {
        rule: texts
        for rule in RULES
        if (texts := tuple(dict.fromkeys(one.text for one in found if one.rule is rule)))
    }


#: Runs below which nothing is left when fastest and slowest are dropped.
FEWEST: Final = 3


@dataclass(frozen=True)
class ResultScore:
    """The result of a set of runs. ``seconds`` is None where there is none, and ``why`` says so.

    ``dropped`` are the fastest and the slowest (None: one that did not converge); ``counted`` the others, in order of time.
    """

    seconds: float | None
    runs: int
    lost: int
    counted: tuple[float, ...] = ()
    dropped: tuple[float | None, float | None] | None = None
    why: str = ""

    @property
    def spread(self) -> float | None:
        """Half the range of the runs that count, relative to the result."""
        if self.seconds is None or len(self.counted) < 2:
            return None
        return (max(self.counted) - min(self.counted)) / 2 / self.seconds


def olympic(times: Sequence[float | None]) -> ResultScore:
    """Return the score of runs that took *times* seconds; None stands for one that did not converge."""
    converged = sorted(time for time in times if time is not None and math.isfinite(time))
    runs, lost = len(times), len(times) - len(converged)
    if lost > 1:
        return ResultScore(
            None, runs, lost, why=f"{lost} of {runs} runs did not converge; a result allows one"
        )
    if runs < FEWEST:
        return ResultScore(
            None, runs, lost, tuple(converged), why=f"{runs} of the {FEWEST} runs that an olympic mean takes"
        )
    ordered: list[float | None] = [*converged, *([None] if lost else [])]
    counted = tuple(time for time in ordered[1:-1] if time is not None)
    return ResultScore(statistics.fmean(counted), runs, lost, counted, (ordered[0], ordered[-1]))


#: Repeated runs differ in it by the rules (MLPerf Training rules, "Run Results": random numbers).
_REPEATED = "seed"


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone, oldest first."""

    runs: tuple[TrainedRun, ...]

    @property
    def apart(self) -> str:
        """Why its times do not compare with published ones: another model, data, or target than the rules demand."""
        kinds = (DATA_SET, MODEL, QUALITY_TARGET)
        found = by_rule(self.departures).items()
        return "; ".join(text for rule, texts in found if rule in kinds for text in texts)

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
    def score(self) -> ResultScore:
        """The olympic mean; a run that did not reach its target is one that did not converge."""
        return olympic([run.time_s if run.reached else None for run in self.runs])

    @property
    def departures(self) -> tuple[Departure, ...]:
        """All that single runs and their number depart from."""
        found = [one for run in self.runs for one in departures(run)]
        lost = sum(not run.reached for run in self.runs)
        return tuple(dict.fromkeys([*found, *of_group(self.workload, len(self.runs), lost)]))

    @property
    def division(self) -> str:
        """The strictest division whose rules all runs keep together."""
        return division(self.departures)


def machine_of(key: SeriesKey) -> str:
    """Return the machine of a series for people: system, partition, and the environment where it has a name."""
    place = ":".join(filter(None, (key.system, key.partition)))
    return f"{place} {key.environment}" if key.environment not in ("", "default") else place


def groups(runs: Iterable[TrainedRun]) -> tuple[RunGroup, ...]:
    """Return *runs* in groups, in the order of machines and keys."""
    found: dict[SeriesKey, list[TrainedRun]] = {}
    for run in sorted(runs, key=lambda one: (one.created_ns, one.record)):
        found.setdefault(replace(run.key, benchmark=_without_seed(run.benchmark)), []).append(run)
    made = [RunGroup(tuple(some)) for some in found.values()]
    return tuple(sorted(made, key=lambda one: (one.machine, keys.order(one.benchmark))))


def _without_seed(benchmark: keys.Benchmark) -> str:
    """Return what is left without the seed: a seed that parametrizes a test stands in its identity, too."""
    key = keys.parse(benchmark)
    if key is None:
        return json.dumps(benchmark)
    fields = {name: value for name, value in key.fields.items() if name != _REPEATED}
    return json.dumps([benchmark.name.partition("[")[0], key.workload, sorted(fields.items())])


_SC21: Final = "sc21"
#: How the sources of rates in rounds of MLPerf HPC begin.
_ROUNDS: Final = ("MLPerf HPC", "logs of MLPerf HPC")


@dataclass(frozen=True)
class Reference:
    """One published result: minutes to train, or samples per second of one device, or both."""

    source: str
    system: str
    workload: str
    division: str = ""
    devices: int | None = None
    minutes: float | None = None
    per_device: float | None = None


def references(workload: str) -> tuple[Reference, ...]:
    """Return what is published of *workload*: times first, then rates of rounds of MLPerf HPC."""
    times = [
        Reference(_SC21, system, workload, division, devices, minutes)
        for name, division, system, devices, minutes in DATA["minutes"]
        if name == workload
    ]
    rates = [
        Reference(one.source, one.system, workload, "", one.devices, None, one.per_device)
        for one in PUBLISHED
        if one.workload == workload and one.per_device is not None and SOURCES[one.source].startswith(_ROUNDS)
    ]
    return (*times, *rates)
