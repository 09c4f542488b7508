"""One measurement of all ranks' reports: all ranks' samples, the slowest rank's time."""

from __future__ import annotations

import math
import statistics
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import (
    Figure,
    Measurement,
    MetricValue,
    RankReport,
    Rate,
    TimedOperation,
    percentile,
    thin,
)
from pytest_mlhpc.node.telemetry import contention

#: Appended to the name of a rate for what the slowest rank reached alone.
SLOWEST_RANK = "_of_slowest_rank"


def metrics(reports: Sequence[RankReport]) -> List[MetricValue]:
    """Return the metrics of all operations, in the order in which they were named.

    A value is the median of the repetitions, which are its samples.
    """
    by_name: Dict[str, List[TimedOperation]] = {}
    for report in reports:
        for timed in report.timed:
            by_name.setdefault(timed.name, []).append(timed)
    return [metric for timed in by_name.values() for metric in _of_operation(timed)]


def _of_operation(ranks: Sequence[TimedOperation]) -> List[MetricValue]:
    first = ranks[0]
    slowest = [max(seconds) for seconds in zip(*(timed.seconds for timed in ranks))]
    timed = all(seconds > 0 for one in ranks for seconds in one.seconds)
    if not slowest or not timed or any(len(one.rates) != len(first.rates) for one in ranks):
        return []
    found = [_metric(name, "s", "lower", slowest, first.tolerance) for name in first.times]
    for rates in zip(*(timed.rates for timed in ranks)):
        found += _of_rate(rates, ranks, slowest)
    return found


def _of_rate(
    rates: Sequence[Rate], ranks: Sequence[TimedOperation], slowest: Sequence[float]
) -> List[MetricValue]:
    rate = rates[0]
    if len({(one.metric, one.unit, one.together) for one in rates}) > 1:
        return []
    amounts = [one.amount for one in rates]
    if rate.together:
        if len(set(amounts)) > 1:
            return []
        return [_metric(rate.metric, rate.unit, "higher", [rate.amount / s for s in slowest], rate.tolerance)]
    total = sum(amounts)
    found = [_metric(rate.metric, rate.unit, "higher", [total / s for s in slowest], rate.tolerance)]
    if len(ranks) > 1:
        alone = [amount / statistics.median(timed.seconds) for amount, timed in zip(amounts, ranks)]
        name = rate.metric + SLOWEST_RANK
        found.append(
            MetricValue(name, min(alone), rate.unit, "higher", thin(alone), tolerance=rate.tolerance)
        )
    return found


def _metric(
    name: str, unit: str, better: str, samples: Sequence[float], tolerance: Optional[float]
) -> MetricValue:
    value = statistics.median(samples)
    return MetricValue(name, value, unit, better, thin(samples), samples[0], samples[-1], tolerance)


def combine(run: RunPlan, reports: Sequence[RankReport]) -> Measurement:
    """Return what the ranks that reported have measured together.

    Ranks that are missing are not made up for: ``ranks``, ``devices``, ``steps`` and ``samples`` are what was really
    there, and the controller compares them with the plan. A figure that cannot be formed is left out. Ranks of a base
    model that failed count as ranks and devices, and in no figure.

    Raises:
        ValueError: no report, or two of one rank.
        SchemaError: a report holds a figure that is not finite.
    """
    ranked = sorted(reports, key=lambda report: report.rank)
    numbers = [report.rank for report in ranked]
    if not ranked or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"run {run.run_id}: reports of ranks {numbers} cannot be combined, each rank has one"
        )
    counting = [report for report in ranked if report.failed is None] or ranked
    step_times = tuple(max(times) for times in zip(*(report.step_times_s for report in counting)))
    return Measurement(
        run_id=run.run_id,
        nonce=run.nonce,
        attempt=run.attempt,
        workload=run.workload,
        device_type=_agreed(report.device_type for report in ranked),
        device_model=_agreed(report.device_model for report in ranked),
        nodes=tuple(dict.fromkeys(report.host for report in ranked)),
        ranks=len(ranked),
        devices=len({(report.host, report.device_type, report.device_index) for report in ranked}),
        steps=min(report.steps for report in counting),
        samples=sum(report.samples for report in counting),
        started_ns=min(report.started_ns for report in counting),
        ended_ns=max(report.ended_ns for report in counting),
        metrics=tuple(_metrics(run, counting, step_times)),
        step_times_s=step_times,
        data_kind=_agreed(report.data_kind for report in counting),
        data_source=_agreed(report.data_source for report in counting),
        cache=_agreed(report.cache for report in counting),
        environment=next((report.environment for report in counting if report.environment), {}),
        contention=_contention(counting),
        calibration_before=_least(report.calibration_before for report in counting),
        calibration_after=_least(report.calibration_after for report in counting),
        per_rank=tuple(ranked),
    )


def io_time(report: RankReport) -> float:
    """Return the seconds for which this rank's training stood still for data."""
    copy_s = report.copy_s if report.exposed_copy_s is None else report.exposed_copy_s
    return report.wait_s + report.first_batch_s + copy_s


def _metrics(run: RunPlan, ranked: Sequence[RankReport], step_times: Sequence[float]) -> List[MetricValue]:
    epoch_s = max(report.epoch_s for report in ranked)
    samples = sum(report.samples for report in ranked)
    if any(report.timed for report in ranked):
        found = [MetricValue("epoch_time", epoch_s, "s", "lower"), *metrics(ranked)]
        found += [metric for metric in _resources(ranked, samples) if metric.unit != "samples/J"]
    else:
        found = _throughputs(ranked, epoch_s, samples)
        found += _steps(step_times)
        found += _phases(ranked)
        found += _losses(ranked)
        found += _operations(ranked, epoch_s, samples)
        found += _resources(ranked, samples)
    found += figures(ranked)
    if run.calibrate:
        rates = [
            rate
            for report in ranked
            for rate in (report.calibration_before, report.calibration_after)
            if rate
        ]
        if rates:
            found.append(MetricValue("calibration_rate", statistics.median(rates), "Hz", "none", thin(rates)))
    return found


def _throughputs(ranked: Sequence[RankReport], epoch_s: float, samples: int) -> List[MetricValue]:
    waiting = max(ranked, key=io_time)
    io_s = io_time(waiting)
    compute_s = epoch_s - io_s
    found = [
        MetricValue("epoch_time", epoch_s, "s", "lower"),
        MetricValue("io_time", io_s, "s", "lower"),
        MetricValue("compute_time", compute_s, "s", "lower"),
        MetricValue("wait_time", waiting.wait_s, "s", "lower"),
        MetricValue("copy_time", waiting.copy_s, "s", "lower"),
        MetricValue("first_batch_time", _loader_start(ranked), "s", "lower"),
        MetricValue("warmup_time", max(report.warmup_s for report in ranked), "s", "lower"),
    ]
    if waiting.exposed_copy_s is not None:
        found.append(MetricValue("exposed_copy_time", waiting.exposed_copy_s, "s", "lower"))
    if waiting.read_s is not None:
        found.append(MetricValue("read_time", waiting.read_s, "s", "lower"))
    if epoch_s > 0:
        found.append(MetricValue("effective_throughput", samples / epoch_s, "samples/s", "higher"))
        found.append(MetricValue("compute_fraction", compute_s / epoch_s, "1", "higher"))
        tokens = ranked[0].tokens_per_sample
        if tokens:
            found.append(MetricValue("tokens_throughput", samples * tokens / epoch_s, "tokens/s", "higher"))
    if compute_s > 0:
        found.append(MetricValue("compute_throughput", samples / compute_s, "samples/s", "higher"))
    return found


def _loader_start(ranked: Sequence[RankReport]) -> float:
    """Return the longest wait for a first batch: of the run where it was reported, else of the window."""
    return max(
        report.first_batch_s if report.loader_start_s is None else report.loader_start_s for report in ranked
    )


def _steps(step_times: Sequence[float]) -> List[MetricValue]:
    if not step_times:
        return []
    slowest, ends = thin(step_times), (step_times[0], step_times[-1])
    third = len(step_times) // 3
    early, late = (statistics.median(part) for part in (step_times[: third or 1], step_times[-third or -1 :]))
    # Warm-up was long enough, and nothing throttles, where this is within a few percent of one.
    trend = [MetricValue("step_time_trend", late / early, "1", "none")] if early > 0 else []
    return [
        *trend,
        MetricValue("step_time", statistics.median(step_times), "s", "lower", slowest, *ends),
        MetricValue("step_time_p95", percentile(step_times, 0.95), "s", "lower"),
        MetricValue("step_time_max", max(step_times), "s", "lower"),
    ]


def _phases(ranked: Sequence[RankReport]) -> List[MetricValue]:
    found: List[MetricValue] = []
    reporting = [report for report in ranked if report.backward_s is not None and report.steps > 0]
    if reporting:
        least = min(reporting, key=lambda report: report.backward_s or 0.0)
        phases = (
            ("forward", least.forward_s),
            ("backward", least.backward_s),
            ("optimizer", least.optimizer_s),
        )
        found += [
            MetricValue(f"{name}_time", seconds / least.steps, "s", "lower")
            for name, seconds in phases
            if seconds is not None
        ]
    if len(ranked) > 1:
        exposed = _least(
            report.exposed_communication_s / report.steps
            for report in ranked
            if report.exposed_communication_s is not None and report.steps > 0
        )
        if exposed is not None:
            found.append(MetricValue("exposed_communication_time", exposed, "s", "lower"))
        arrivals = [report.arrival_s for report in ranked if report.arrival_s is not None]
        if arrivals:
            found.append(MetricValue("rank_skew", max(arrivals) - min(arrivals), "s", "lower"))
    return found


def _losses(ranked: Sequence[RankReport]) -> List[MetricValue]:
    """Return the mean over ranks, which is the global batch's; warm-up comes first.

    ``first`` and ``last`` are means over a tenth of the steps each, because the loss of one batch is mostly noise: a
    test that compares them asks whether training made progress. The value is ``last``.
    """
    losses = [statistics.fmean(of_step) for of_step in zip(*(report.losses for report in ranked))]
    if not losses:
        return []
    tenth = max(1, len(losses) // 10)
    first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    return [MetricValue("loss", last, "1", "none", thin(losses), first, last)]


def _operations(ranked: Sequence[RankReport], epoch_s: float, samples: int) -> List[MetricValue]:
    first = ranked[0]
    found: List[MetricValue] = []
    if first.parameters is not None:
        found.append(MetricValue("parameters", float(first.parameters), "1", "none"))
    if first.forward_flop_per_sample is not None:
        found.append(MetricValue("forward_flop_per_sample", first.forward_flop_per_sample, "FLOP", "none"))
    if first.train_flop_per_sample is None:
        return found
    found.append(MetricValue("train_flop_per_sample", first.train_flop_per_sample, "FLOP", "none"))
    if epoch_s > 0:
        achieved = first.train_flop_per_sample * samples / epoch_s
        found.append(MetricValue("achieved_flops", achieved, "FLOP/s", "higher"))
        peaks = [report.peak_flops_per_s for report in ranked]
        peak = sum(value for value in peaks if value is not None)
        if None not in peaks and peak > 0:
            found.append(MetricValue("model_flops_utilization", achieved / peak, "1", "higher"))
    return found


def _resources(ranked: Sequence[RankReport], samples: int) -> List[MetricValue]:
    found: List[MetricValue] = []
    peaks = [report.peak_memory_bytes for report in ranked if report.peak_memory_bytes is not None]
    if peaks:
        found.append(
            MetricValue("peak_memory", float(max(peaks)), "B", "lower", thin([float(peak) for peak in peaks]))
        )
    energies = [report.energy_j for report in ranked if report.energy_j is not None]
    if len(energies) == len(ranked) and sum(energies) > 0:
        found.append(MetricValue("energy", sum(energies), "J", "lower", thin(energies)))
        found.append(MetricValue("energy_efficiency", samples / sum(energies), "samples/J", "higher"))
    return found


def figures(ranked: Sequence[RankReport]) -> List[MetricValue]:
    """Return the metrics that a mode of running added, each combined over the ranks that reported it.

    Raises:
        ValueError: two ranks tell one figure in different units or want it combined differently.
    """
    by_name: Dict[str, List[Figure]] = {}
    for report in ranked:
        for figure in report.figures:
            by_name.setdefault(figure.name, []).append(figure)
    return [_combined(reporting) for reporting in by_name.values()]


def _combined(reporting: Sequence[Figure]) -> MetricValue:
    first = reporting[0]
    for other in reporting:
        if (other.unit, other.better, other.over) != (first.unit, first.better, first.over):
            raise ValueError(f"ranks disagree on what the figure {first.name} is")
    values = [figure.value for figure in reporting]
    value = {
        "sum": math.fsum(values),
        "mean": statistics.fmean(values),
        "max": max(values),
        "min": min(values),
        "first": first.value,
    }[first.over]
    samples = next((figure.samples for figure in reporting if figure.value == value), ())
    return MetricValue(first.name, value, first.unit, first.better, thin(samples))


def _contention(ranked: Sequence[RankReport]) -> Mapping[str, float]:
    """Return the worst node's figures; ``other_cores`` is what ran there beside our own ranks, in cores."""
    found: Dict[str, float] = {}
    by_host: Dict[str, List[Mapping[str, float]]] = {}
    for report in ranked:
        by_host.setdefault(report.host, []).append(report.contention or {})
        for name, value in (report.contention or {}).items():
            found[name] = max(value, found.get(name, value))
    others = [
        cores
        for reporting in by_host.values()
        for cores in [contention.other_cores(reporting)]
        if cores is not None
    ]
    if others:
        found["other_cores"] = max(others)
    return found


def _agreed(values: Iterable[str]) -> str:
    """Return the one value, or all different ones joined, so that a mixture matches nothing that was asked."""
    return "+".join(sorted(set(values)))


def _least(values: Iterable[Optional[float]]) -> Optional[float]:
    return min((value for value in values if value is not None), default=None)
