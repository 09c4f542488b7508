"""PAYLOAD, no torch. Metrics of operations that all ranks timed: all ranks' amounts over the slowest rank's time.

An operation whose ranks do not say the same of it makes no metric: the controller then finds it missing.
"""

from __future__ import annotations

import statistics
from typing import Dict, List, Optional, Sequence

from pytest_mlhpc.node.protocol.samples import thin
from pytest_mlhpc.node.protocol.schema import Metric, RankReport
from pytest_mlhpc.node.protocol.timed import Rate, Timed

#: Appended to the name of a rate for what the slowest rank reached alone.
SLOWEST_RANK = "_of_slowest_rank"


def metrics(reports: Sequence[RankReport]) -> List[Metric]:
    """Return the metrics of all operations, in the order in which they were named.

    A value is the median of the repetitions, which are its samples.
    """
    by_name: Dict[str, List[Timed]] = {}
    for report in reports:
        for timed in report.timed:
            by_name.setdefault(timed.name, []).append(timed)
    return [metric for timed in by_name.values() for metric in _of_operation(timed)]


def _of_operation(ranks: Sequence[Timed]) -> List[Metric]:
    first = ranks[0]
    slowest = [max(seconds) for seconds in zip(*(timed.seconds for timed in ranks))]
    timed = all(seconds > 0 for one in ranks for seconds in one.seconds)
    if not slowest or not timed or any(len(one.rates) != len(first.rates) for one in ranks):
        return []
    found = [_metric(name, "s", "lower", slowest, first.tolerance) for name in first.times]
    for rates in zip(*(timed.rates for timed in ranks)):
        found += _of_rate(rates, ranks, slowest)
    return found


def _of_rate(rates: Sequence[Rate], ranks: Sequence[Timed], slowest: Sequence[float]) -> List[Metric]:
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
        found.append(Metric(name, min(alone), rate.unit, "higher", thin(alone), tolerance=rate.tolerance))
    return found


def _metric(
    name: str, unit: str, better: str, samples: Sequence[float], tolerance: Optional[float]
) -> Metric:
    value = statistics.median(samples)
    return Metric(name, value, unit, better, thin(samples), samples[0], samples[-1], tolerance)
