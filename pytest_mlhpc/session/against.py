"""A against B in one session: the second side of each test, what is refused, the verdict on its runs, and the table of all.

Open this to know what `--mlhpc-against` runs, and why a test has no second side. The statistics are in ``judge/paired.py``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.overrides import Against
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.jobs.budget import (
    BudgetLimit,
    budget_refusal,
    hours_text,
    is_charged,
    parse_limit,
    total_bound,
)
from pytest_mlhpc.jobs.builds import rebuilt
from pytest_mlhpc.jobs.job import Job, Opponent, is_first_side
from pytest_mlhpc.jobs.software import SoftwareError, check_size, target_with
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.judged_metric import usable
from pytest_mlhpc.judge.paired import (
    ALPHA,
    FEWEST_RUNS,
    MOST_RUNS,
    PRECISION,
    PairedResult,
    PairedVerdict,
    follow,
)
from pytest_mlhpc.node.files import make_private
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.options import Settings
from pytest_mlhpc.session.check_measurement import CheckedJob
from pytest_mlhpc.session.revision import Revision, source_of
from pytest_mlhpc.store.locations import make_directories
from pytest_mlhpc.store.record import Failure, Judgement, MetricVerdict, Verdict
from pytest_mlhpc.store.text import aligned, count, quantity

#: Launchers that the batch starts itself, so that they have to be found before the software of a side is set up.
_OUTER_LAUNCHERS = frozenset({"mpirun", "poprun"})

#: What to do instead of a second image in a pod: its agent, and the devices, belong to one container (docs/decisions/against.md).
_POD_IMAGE = "compare variables.NAME=VALUE or rev=REVISION, or two sessions on nodes of one node_selector"

#: Why no revision can be compared: all would be the same.
NOTHING_OF_CHECKOUT = "nothing that it runs comes from the checkout"

_VERDICTS = {
    PairedVerdict.WORSE: Verdict.REGRESSED,
    PairedVerdict.BETTER: Verdict.IMPROVED,
    PairedVerdict.EQUAL: Verdict.PASSED,
    PairedVerdict.UNCLEAR: Verdict.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Comparison:
    """What holds for all comparisons of a session. ``metrics`` are compared in all: each has its share of ``ALPHA``."""

    against: Against
    metrics: int
    revision: Revision | None = None  #: of B

    @property
    def alpha(self) -> float:
        """The chance of one comparison that equal sides are called different."""
        return ALPHA / max(1, self.metrics)

    @property
    def precision(self) -> float:
        """The smallest difference that is asked for, as a share."""
        return PRECISION if self.against.precision is None else self.against.precision


def refuse(settings: Settings) -> None:
    """Refuse options that a comparison cannot have.

    Raises:
        UsageError: names them.
    """
    given = {
        "--mlhpc-wait": settings.wait_s is not None,
        "--mlhpc-resume": settings.resume is not None,
        "--mlhpc-each-node": settings.each_node is not None,
        "--mlhpc-baseline=update": settings.baseline == "update",
        "-o mlhpc_here": settings.here,
    }
    if settings.against is not None and (wrong := [name for name, is_set in given.items() if is_set]):
        raise UsageError(
            f"--mlhpc-against {settings.against} with {', '.join(wrong)}: a comparison is decided within its session, from runs "
            "of its own allocations, and no baseline; leave one of them out"
        )


def second_side(spec: JobSpec, against: Against) -> JobSpec:
    """Return B of the test *spec*.

    Raises:
        SoftwareError: the test has no such side; the text says why.
    """
    partition = spec.target.partition
    if reason := _not_comparable(spec):
        raise SoftwareError("against", reason)
    if partition.scheduler == "kubernetes" and (against.environment or against.image):
        raise SoftwareError(
            "against", f"the pods of {partition.id} have one image for both sides; {_POD_IMAGE}"
        )
    if against.rev and spec.at_revision is None:
        return spec  # tests are only collected, and nothing is checked out
    base, target = spec.at_revision or spec, spec.target
    if against.environment or against.image:
        target = target_with(target, against.environment, spec.modules, against.image or spec.image)
    other = replace(
        base, target=target, image=against.image or spec.image, env={**base.env, **against.variables}
    )
    other = replace(other, builds=tuple(rebuilt(build, target) for build in other.builds))
    if partition.scheduler == "kubernetes":
        check_size({**spec.files, **{f"B/{name}": source for name, source in other.files.items()}}, partition)
    if _started_with(other) == _started_with(spec):
        what = NOTHING_OF_CHECKOUT if against.rev else f"{against} is what it has"
        raise SoftwareError("against", f"both sides are the same: {what}")
    if spec.launcher in _OUTER_LAUNCHERS and _software(spec) != _software(other):
        raise SoftwareError(
            "against",
            f"{spec.launcher} is started before the modules or virtual environment of either side is set up; use launcher srun",
        )
    if spec.target.environment.extra.get("uenv") != target.environment.extra.get("uenv"):
        raise SoftwareError(
            "against", "a uenv is mounted for a whole job, so two sides of a job have the same"
        )
    return other


def _not_comparable(spec: JobSpec) -> str:
    if spec.about_nodes:
        return "it measures nothing"
    if not spec.judged:
        return "no metric of it is judged, so none is compared; leave judge=False out"
    return "its pod has no agent that could run two sides" if spec.agentless else ""


def _started_with(spec: JobSpec) -> tuple[object, ...]:
    """Return what its processes are started with: two environments of other names may be the same."""
    environment = spec.target.environment
    software = (
        environment.python,
        {**environment.variables, **spec.env},
        environment.modules,
        environment.extra,
    )
    return (*software, *source_of(spec))


def _software(spec: JobSpec) -> tuple[object, ...]:
    environment = spec.target.environment
    extra = environment.extra
    return (environment.modules, *(extra.get(name) for name in ("setup", "venv", "conda")))


def affordable_runs(specs: Sequence[JobSpec], settings: Settings) -> int:
    """Return how many runs each comparison of *specs* may have within all budgets, both sides together.

    Raises:
        UsageError: so few that nothing could be said; the text says what would do.
    """
    limits = [parse_limit(settings.budget)] if settings.budget else []
    wanted: list[tuple[Sequence[JobSpec], BudgetLimit]] = [(specs, limit) for limit in limits]
    for partition in {spec.target.partition.id: spec.target.partition for spec in specs}.values():
        if partition.budget:
            mine = [spec for spec in specs if spec.target.partition.id == partition.id]
            limit = parse_limit(partition.budget, f"systems.yaml: {partition.id}: budget")
            wanted.append((mine, limit))
    most, fewest = _bounds(settings.against or Against())
    for runs in range(most, fewest - 1, -2):
        if not any(budget_refusal(_repeated(some, runs), limit) for some, limit in wanted):
            return runs
    some, limit = next(one for one in wanted if budget_refusal(_repeated(one[0], fewest), one[1]))
    least = total_bound(_repeated(some, fewest), 0, limit.unit)
    raise UsageError(
        f"a comparison needs at least {fewest} runs of each test, which are {hours_text(least, limit.unit)} for "
        f"{count(len(some), 'test')} at their time limits; the budget is {limit} ({limit.source}). Raise it to "
        f"{math.ceil(100 * least) / 100:g}, lower time_limit, or select fewer tests (-k)"
    )


def _bounds(against: Against) -> tuple[int, int]:
    """Return how many runs a comparison has at most, and the fewest after which anything could be said."""
    most = MOST_RUNS if against.runs is None else against.runs
    return most, min(FEWEST_RUNS, most)


def _repeated(specs: Sequence[JobSpec], runs: int) -> list[JobSpec]:
    return [spec for spec in specs for _ in range(runs)]


def announcement(comparison: Comparison, jobs: Sequence[Job], runs: int) -> list[str]:
    """Return the lines that say what is compared, and how, before anything is submitted."""
    jobs = [job for job in jobs if job.opponent is not None]
    one = hours_text(total_bound(_repeated([job.spec for job in jobs], runs), 0))
    cost = f", at most {one}" if any(is_charged(job.spec) for job in jobs) else ""
    fewest = min(FEWEST_RUNS, runs)
    many = f"{fewest} to {runs}" if fewest < runs else f"{runs}"
    how = f"each in one allocation, A B B A in turns, {many} runs{cost}"
    lines = [f"A against B: B has {comparison.against}; {count(len(jobs), 'test')}, {how}"]
    return [*lines, comparison.revision.announcement] if comparison.revision is not None else lines


def opponents(specs: Sequence[JobSpec], settings: Settings, session_id: str) -> tuple[list[Job], int]:
    """Return a job with both sides for each of *specs*, and how many runs each may have.

    Runs that go before others have one side: they are made once, for both. Both sides of a session have a digest of their own in the ledger: no later session adopts half a comparison.

    Raises:
        UsageError: a test has no second side, or the budget is too small.
    """
    against = settings.against or Against()
    before = {
        one.node_id: Job(replace(one, session=session_id)) for spec in specs for one in spec.needs.values()
    }
    pairs, refused = [], []
    for spec in specs:
        if spec.node_id in before:
            continue
        try:
            other = second_side(spec, against)
        except SoftwareError as error:
            refused.append(f"{spec.node_id}: {error}")
            continue
        pairs.append((replace(spec, session=session_id), replace(other, session=session_id)))
    if refused:
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise UsageError(
            f"--mlhpc-against {against}: {'; '.join(refused[:5])}{more}. Leave such tests out (-k, --deselect)"
        )
    runs = affordable_runs([first for first, _ in pairs], settings)
    compared = {
        first.node_id: Job(first, opponent=Opponent(other, runs, min(FEWEST_RUNS, runs)))
        for first, other in pairs
    }
    return [{**before, **compared}[spec.node_id] for spec in specs], runs


@dataclass(frozen=True)
class NamedResult:
    """The result of one metric."""

    metric: str
    unit: str
    better: str
    result: PairedResult


def judge_pairs(job: CheckedJob, comparison: Comparison) -> tuple[Judgement, tuple[NamedResult, ...]] | None:
    """Return the verdict on a comparison, None while more of its runs are on their way and are needed."""
    results = []
    for name in job.spec.judged:
        pairs = _pairs(job, name)
        if not pairs:
            return None
        better, unit = pairs[0][0].better, pairs[0][0].unit
        result = follow(
            [(first.value, second.value) for first, second in pairs],
            better,
            most=job.planned,
            precision=comparison.precision,
            alpha=comparison.alpha,
        )
        results.append(NamedResult(name, unit, better, result))
    if job.pending and job.refused is None and not all(one.result.decided for one in results):
        return None
    return _judgement(comparison, results), tuple(results)


def _pairs(job: CheckedJob, name: str) -> list[tuple[MetricValue, MetricValue]]:
    """Return the metric *name* of A and B of each pair of runs that is complete, up to the first that is not."""
    ended = {
        attempt.number: metric
        for attempt in (one.attempt for one in job.attempts)
        if attempt.over and attempt.measurement and usable(metric := attempt.measurement.metric(name))
    }
    pairs = []
    for number in range(1, job.planned, 2):
        first, second = ended.get(number), ended.get(number + 1)
        if first is None or second is None:
            break
        pairs.append((first, second) if is_first_side(number) else (second, first))
    return pairs


def _judgement(comparison: Comparison, results: Sequence[NamedResult]) -> Judgement:
    metrics = tuple(
        MetricVerdict(
            name=one.metric,
            value=one.result.first,
            unit=one.unit,
            better=one.better,
            baseline=one.result.second,
            change=one.result.change,
            width=comparison.precision,
            verdict=_VERDICTS[one.result.verdict],
            reason=sentence(one, comparison),
        )
        for one in results
    )
    worst = min(results, key=lambda one: list(PairedVerdict).index(one.result.verdict))
    lines = [f"A against B ({comparison.against}): {sentence(one, comparison)}" for one in results]
    return Judgement(_VERDICTS[worst.result.verdict], metrics, tuple(lines))


def sentence(one: NamedResult, comparison: Comparison) -> str:
    """Return what is known of one metric as text."""
    result = one.result
    change = f"{abs(result.change):.1%} {'better' if result.change > 0 else 'worse'}"
    many = f"{interval_text(result)} %, {result.runs} runs"
    if result.verdict is PairedVerdict.EQUAL:
        return f"{one.metric} is equal within {comparison.precision:.1%} ({many})"
    if result.verdict is PairedVerdict.UNCLEAR:
        return f"{one.metric} of A is {change} than B's, which may be chance ({many})"
    return f"{one.metric} of A is {change} than B's ({many})"


def broken_run(job: CheckedJob) -> Failure | None:
    """Return the failure of the first run of either side that broke; it says which."""
    for one in sorted(job.attempts, key=lambda one: one.attempt.number):
        if one.attempt.over and one.failure is not None:
            number = one.attempt.number
            side = "A" if is_first_side(number) else "B"
            of = f" of {job.planned}" if job.planned else ""
            return replace(one.failure, text=f"run {number}{of} ({side}): {one.failure.text}")
    return None


def loss_of(judgement: Judgement) -> Failure | None:
    """Return the failure that A is worse than B, None where it is not."""
    if judgement.verdict is not Verdict.REGRESSED:
        return None
    return Failure(Verdict.REGRESSED.value, judgement.explanation[0])


def interval_text(result: PairedResult) -> str:
    """Return the interval of the change in per cent; ``?`` before the first analysis."""
    if not math.isfinite(result.low) or not math.isfinite(result.high):
        return "?"
    return f"{100 * result.low:+.1f} to {100 * result.high:+.1f}"


HEADINGS = ("benchmark", "metric", "A", "B", "A to B", "interval", "runs", "verdict")


def table_of(jobs: Iterable[Job], comparison: Comparison) -> list[str]:
    """Return the lines of the closing table: a row for each metric, the worst first, one over all, and how chance is handled."""
    rows, results, broken = [], [], []
    for job in jobs:
        name = job.spec.node_id.rpartition("::")[2]
        outcome = job.outcome
        if outcome is None or not outcome.comparison:
            broken.append((name, "-", "-", "-", "-", "-", "-", _no_result(job)))
            continue
        for one in outcome.comparison:
            results.append(one)
            rows.append(_row(name, one))
    order = [verdict.value for verdict in PairedVerdict]
    ordered = sorted(rows, key=lambda row: (order.index(row[-1]), row))
    every = [HEADINGS, *broken, *ordered]
    if len(results) > 1:
        every.append(_over_all([one.result for one in results]))
    lines = aligned([[[cell] for cell in row] for row in every])
    if results:
        lines += [
            f"plus: A is better. B has {comparison.against}. Equal: no difference as large as {comparison.precision:.1%}.",
            _chance(comparison),
        ]
    return lines


def _row(name: str, one: NamedResult) -> tuple[str, ...]:
    result = one.result
    sides = [quantity(value, one.unit) for value in (result.first, result.second)]
    change = f"{100 * result.change:+.1f} %"
    return (
        name, one.metric, *sides, change, f"{interval_text(result)} %", str(result.runs), result.verdict.value,
    )  # fmt: skip


def _no_result(job: Job) -> str:
    outcome = job.outcome
    return outcome.failure.outcome if outcome is not None and outcome.failure is not None else "no_result"


def _chance(comparison: Comparison) -> str:
    if comparison.metrics == 1:
        return f"All intervals hold with {1 - ALPHA:.0%}, interim analyses counted."
    return (
        f"All {comparison.metrics} intervals hold together with {1 - ALPHA:.0%}: each has {comparison.alpha:.2%} of chance "
        "(Bonferroni), interim analyses counted."
    )


def over_all(results: Sequence[PairedResult]) -> tuple[PairedVerdict, float, float, float]:
    """Return the verdict over all metrics, their mean change, and bounds of it, which hold whenever all intervals do.

    Worse: any is. Better: any is, and none is worse. Equal: all are.
    """
    verdicts = {result.verdict for result in results}
    found = next(
        (one for one in (PairedVerdict.WORSE, PairedVerdict.BETTER) if one in verdicts), PairedVerdict.UNCLEAR
    )
    if verdicts == {PairedVerdict.EQUAL}:
        found = PairedVerdict.EQUAL
    bounds = [
        math.expm1(sum(math.log1p(value) for value in values) / len(results))
        if min(values) > -1 and math.isfinite(max(values))
        else math.nan
        for values in (
            [one.change for one in results],
            [one.low for one in results],
            [one.high for one in results],
        )
    ]
    return (found, *bounds)  # type: ignore[return-value]


def _over_all(results: Sequence[PairedResult]) -> tuple[str, ...]:
    verdict, change, low, high = over_all(results)
    interval = "?" if math.isnan(low) or math.isnan(high) else f"{100 * low:+.1f} to {100 * high:+.1f} %"
    runs = str(sum(result.runs for result in results))
    return ("over all", "-", "-", "-", f"{100 * change:+.1f} %", interval, runs, verdict.value)


def write(folder: Path, jobs: Iterable[Job], comparison: Comparison, state_dir: Path) -> Path:
    """Write ``against.json`` below *folder* and return its path.

    Raises:
        StoreError: it cannot be written.
    """
    ended = [(job.spec.node_id, job.outcome) for job in jobs if job.outcome is not None]
    tests = [
        {"test": test, "results": [_plain(one) for one in outcome.comparison]}
        for test, outcome in ended
        if outcome.comparison
    ]
    failures = [
        {"test": test, "outcome": outcome.failure.outcome, "text": outcome.failure.text}
        for test, outcome in ended
        if outcome.failure is not None and not outcome.comparison
    ]
    content: Mapping[str, Any] = {
        "schema": 1,
        "created_ns": time.time_ns(),
        "against": str(comparison.against),
        "comparisons": comparison.metrics,
        "alpha": comparison.alpha,
        "precision": comparison.precision,
        **_revisions(comparison.revision),
        "tests": tests,
        "failures": failures,
    }
    path, new = folder / "against.json", folder / "against.json.new"
    try:
        make_directories(folder.parent, state_dir)
        make_private(folder)
        new.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {os.strerror(error.errno or 0)}") from error
    return path


def _revisions(revision: Revision | None) -> dict[str, Any]:
    """Return the commits of both sides, and whether A has changes beyond its own; nothing where B has no revision."""
    if revision is None:
        return {}
    return {"A": {"commit": revision.head, "dirty": revision.dirty}, "B": {"commit": revision.commit}}


def _plain(one: NamedResult) -> dict[str, Any]:
    values = {"metric": one.metric, "unit": one.unit, "better": one.better, **asdict(one.result)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
