"""Is this measurement what was asked for, and what became of each attempt of a job? Anything less is a failure with a name. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_mlhpc.jobs.job import Attempt, Job, first_failure
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, RankReport, TimedOperation
from pytest_mlhpc.store.record import Epoch, Failure

#: Durations of a rank's report that may be zero but never negative; ``epoch_s`` must be positive.
_DURATIONS = (
    "wait_s", "copy_s", "warmup_s", "first_batch_s", "read_s", "forward_s", "backward_s", "optimizer_s",
    "exposed_communication_s", "arrival_s",
)  # fmt: skip


@dataclass(frozen=True)
class CheckedAttempt:
    """One attempt with its failure: the one that it reported, or that its measurement is not what was asked for."""

    attempt: Attempt
    spec: JobSpec
    failure: Failure | None

    @property
    def measurement(self) -> Measurement | None:
        """The measurement, if it may be judged."""
        return None if self.failure else self.attempt.measurement


@dataclass(frozen=True)
class CheckedJob:
    """What became of an ended job: its attempts, those that were lost and retried, and whether more of them may come."""

    spec: JobSpec
    attempts: tuple[CheckedAttempt, ...]
    lost: tuple[CheckedAttempt, ...]
    refused: Failure | None  #: why a re-run was refused
    compared: bool  #: it has a second side
    planned: int  #: runs of a comparison that were submitted
    pending: int  #: attempts that have not ended

    @property
    def first(self) -> CheckedAttempt:
        """The attempt whose measurement is the job's."""
        return self.attempts[0]

    @property
    def has_result(self) -> bool:
        """Whether its first attempt ended well."""
        return self.first.failure is None and (self.spec.about_nodes or self.first.measurement is not None)

    @property
    def is_judged(self) -> bool:
        """Whether it has figures to be judged."""
        return bool(self.spec.judged) and not self.spec.about_nodes and self.first.measurement is not None

    @property
    def epoch(self) -> Epoch:
        """What its figures may be compared with."""
        measurement = self.first.attempt.measurement
        return Epoch(self.spec.definition, measurement.device_model if measurement else "")

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements that may be judged, in the order of attempts."""
        return [one.measurement for one in self.attempts if one.measurement is not None]


def check_job(job: Job) -> CheckedJob:
    """Check the measurement of each attempt of *job* that reported no failure."""
    return CheckedJob(
        spec=job.spec,
        attempts=tuple(_checked(job, attempt) for attempt in job.attempts),
        lost=tuple(CheckedAttempt(one, job.spec_of(one.number), one.failure) for one in job.lost),
        refused=job.refused,
        compared=job.opponent is not None,
        planned=job.planned,
        pending=job.pending,
    )


def _checked(job: Job, attempt: Attempt) -> CheckedAttempt:
    spec, failure = job.spec_of(attempt.number), attempt.failure
    if failure is None and attempt.measurement is not None:
        failure = first_failure(check(attempt.measurement, spec, attempt.run))
    return CheckedAttempt(attempt, spec, failure)


def check(measurement: Measurement, spec: JobSpec, run: RunPlan) -> list[Failure]:
    """Return all that is wrong with *measurement*, worst first; empty when it may be judged.

    A `command` run (``run.argv``) has no device, steps or data of ours: only its identity, clock and metrics count.
    """
    nodes = measurement.nodes
    found = [*_identity(measurement, run)]
    if not found:  # another run's figures say nothing about this one
        if not run.argv:
            found += [*_device(measurement, run), *_amount(measurement, run), *_data(measurement, run)]
            found += _timed(measurement, run)
        found += [*_clock(measurement), *_losses(measurement), *_metrics(measurement, spec)]
    return [Failure(outcome, text, nodes=nodes) for outcome, text in found]


_Found = Iterator[tuple[str, str]]


def _identity(measurement: Measurement, run: RunPlan) -> _Found:
    for what, asked, found in (
        ("run id", run.run_id, measurement.run_id),
        ("nonce", run.nonce, measurement.nonce),
        ("attempt", run.attempt, measurement.attempt),
        ("workload", run.workload, measurement.workload),
    ):
        if asked != found:
            yield "foreign_result", f"{what}: asked for {asked!r}, the result says {found!r}"


def _device(measurement: Measurement, run: RunPlan) -> _Found:
    types = {measurement.device_type, *(rank.device_type for rank in measurement.per_rank)}
    if types != {run.device_type}:
        yield "wrong_device", f"asked for {run.device_type}, ran on {', '.join(sorted(types))}"


def _amount(measurement: Measurement, run: RunPlan) -> _Found:
    numbers = sorted(rank.rank for rank in measurement.per_rank)
    if measurement.ranks < run.ranks:
        yield "too_few_ranks", f"asked for {run.ranks} ranks, {measurement.ranks} reported"
    elif measurement.ranks > run.ranks or numbers not in ([], list(range(run.ranks))):
        ranks = f"{measurement.ranks} ranks reported, numbered {numbers}"
        yield "foreign_result", f"asked for {run.ranks} ranks, {ranks}"
    if measurement.devices < run.ranks:
        yield (
            "too_few_devices",
            f"asked for {run.ranks} devices (one a rank), {measurement.devices} were used",
        )
    if len(set(measurement.nodes)) < run.nodes:
        where = ", ".join(measurement.nodes) or "none"
        yield "too_few_devices", f"asked for {run.nodes} nodes, the ranks ran on {where}"
    counting = [rank for rank in measurement.per_rank if rank.failed is None]
    steps = min([measurement.steps, *(rank.steps for rank in counting)])
    timed = min([len(measurement.step_times_s), *(len(rank.step_times_s) for rank in counting)])
    if steps < run.steps:
        yield "too_few_steps", f"asked for {run.steps} steps, {steps} were measured"
    elif timed < run.steps:
        yield "too_few_steps", f"asked for {run.steps} steps, times of {timed} were reported"
    if measurement.samples <= 0 or any(rank.samples <= 0 for rank in counting):
        yield "too_few_steps", "a rank consumed no sample"


def _data(measurement: Measurement, run: RunPlan) -> _Found:
    if run.data_kind == "real" and measurement.data_kind != "real":
        yield "foreign_result", f"asked for real data, the run read {measurement.data_kind} data"
    if measurement.data_source != run.data_source:
        yield (
            "foreign_result",
            f"asked for data from {run.data_source}, it came from {measurement.data_source}",
        )
    if run.cache == "cold" and measurement.cache != "cold":
        yield "foreign_result", f"asked for a cold page cache, it was {measurement.cache}"


def _timed(measurement: Measurement, run: RunPlan) -> _Found:
    """Look at operations that ranks repeated: each by all ranks that it is for, as often as asked, in a time above zero."""
    timed: dict[str, dict[int, TimedOperation]] = {}
    for rank in measurement.per_rank:
        for one in rank.timed:
            if rank.rank in timed.setdefault(one.name, {}):
                yield "duplicate_result", f"rank {rank.rank} timed {one.name} twice"
            timed[one.name][rank.rank] = one
    for name, by_rank in timed.items():
        wanted = set(next(iter(by_rank.values())).ranks) or set(range(run.ranks))
        if missing := sorted(wanted - set(by_rank)):
            who = ", ".join(map(str, missing[:8]))
            yield "metric_missing", f"{name} was not timed by all ranks that take part; missing: {who}"
        for number, one in by_rank.items():
            yield from _repetitions(number, one, run.steps)


def _repetitions(rank: int, timed: TimedOperation, steps: int) -> _Found:
    if len(timed.seconds) < steps:
        yield (
            "too_few_steps",
            f"rank {rank} timed {timed.name} {len(timed.seconds)} times, asked were {steps}",
        )
    if not all(seconds > 0 for seconds in timed.seconds):
        yield "clock_backwards", f"rank {rank}: {timed.name} took {min(timed.seconds):.6g} s"
    for rate in timed.rates:
        if not rate.amount > 0:
            yield "metric_invalid", f"rank {rank}: {rate.metric} of an amount of {rate.amount:g}"


def _clock(measurement: Measurement) -> _Found:
    for who, start, end in (
        ("the run", measurement.started_ns, measurement.ended_ns),
        *((f"rank {rank.rank}", rank.started_ns, rank.ended_ns) for rank in measurement.per_rank),
    ):
        if end < start:
            yield "clock_backwards", f"{who} ended {(start - end) / 1e9:.6g} s before it started"
    if any(not time > 0 for time in measurement.step_times_s):
        yield "clock_backwards", f"a step took {min(measurement.step_times_s):.6g} s"
    for rank in measurement.per_rank:
        if rank.failed is None:
            yield from _durations(rank)


def _durations(rank: RankReport) -> _Found:
    if not rank.epoch_s > 0:
        yield "clock_backwards", f"rank {rank.rank}: its timed window took {rank.epoch_s:.6g} s"
    for name in _DURATIONS:
        duration = getattr(rank, name)
        if duration is not None and not duration >= 0:
            yield "clock_backwards", f"rank {rank.rank}: {name} is {duration:.6g} s"
    if any(not time > 0 for time in rank.step_times_s):
        yield "clock_backwards", f"rank {rank.rank}: a step took {min(rank.step_times_s):.6g} s"


def _losses(measurement: Measurement) -> _Found:
    loss = measurement.metric("loss")
    figures = [] if loss is None else [loss.value, loss.first, loss.last, *loss.samples]
    if any(figure is not None and not math.isfinite(figure) for figure in figures):
        yield "loss_nan", "the loss became NaN or infinite"
    for rank in measurement.per_rank:
        bad = next((number for number, one in enumerate(rank.losses) if not math.isfinite(one)), None)
        if bad is not None:
            yield "loss_nan", f"rank {rank.rank}: the loss of observation {bad} is {rank.losses[bad]}"


def _metrics(measurement: Measurement, spec: JobSpec) -> _Found:
    reported = [metric.name for metric in measurement.metrics]
    for name in dict.fromkeys((*spec.expected_metrics, *spec.judged)):
        if name not in reported:
            yield (
                "metric_missing",
                f"{name} was not reported; the run reported {', '.join(reported) or 'no metric'}",
            )
    for metric in measurement.metrics:
        if metric.name != "loss" and (wrong := _wrong(metric, judged=metric.name in spec.judged)):
            yield "metric_invalid", wrong
    for name, rule in spec.metrics.items():
        found = measurement.metric(name)
        if found is not None and (found.unit, found.better) != (rule["unit"], rule["better"]):
            yield (
                "metric_invalid",
                (f"{name}: asked for {rule['unit']} ({rule['better']}), found {found.unit} ({found.better})"),
            )


def _wrong(metric: MetricValue, *, judged: bool) -> str:
    """Return what is wrong with one figure: rates and judged figures are positive, others of a unit not negative."""
    figures = f"{metric.name} is {metric.value} {metric.unit}"
    if not math.isfinite(metric.value):
        return figures
    if metric.value <= 0 and (judged or metric.unit.endswith("/s")):
        return f"{figures}; only a positive figure makes sense"
    if metric.value < 0 and metric.unit != "1":
        return f"{figures}; a negative figure makes no sense"
    return ""
