"""A against B: is one of two sides slower, by runs that alternate on the same nodes? Pure statistics.

Runs come in blocks A B B A, in which a steady drift of the machine hits both sides alike. Logarithms of figures are compared
within their blocks: a randomised block design (Montgomery, Design and Analysis of Experiments, ch. 4). Analyses between blocks
follow Haybittle (1971) and Peto et al. (1976): early ones ask for so much certainty that the last one keeps nearly all of it.
The levels of all analyses add up to *alpha* (Bonferroni), and so do those of all comparisons of a session, so that in at most
*alpha* of sessions two equal sides are called different. The interval of an analysis holds whenever it is made: a repeated
confidence interval (Jennison and Turnbull 1989).
"""

from __future__ import annotations

import enum
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.jobs.job import BLOCK
from pytest_mlhpc.judge.fence import SMALLEST

#: Most runs of one comparison, both sides together, and the fewest after which it is analysed.
MOST_RUNS, FEWEST_RUNS = 30, 8
#: Chance that two equal sides are called different, in any comparison of a session.
ALPHA = 0.05
#: Share of *alpha* that each analysis but the last spends.
EARLY = 0.01
#: Smallest difference that is asked for, unless the user says otherwise: nothing below it is ever called a change.
PRECISION = SMALLEST


class PairedVerdict(enum.StrEnum):
    """What is known of A against B."""

    WORSE = "worse"
    BETTER = "better"
    EQUAL = "equal"  #: no difference as large as the precision asked for
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class PairedResult:
    """One metric of A against B. Changes are relative to B and positive where A is better.

    ``first`` and ``second`` are the medians of A and B; ``noise`` is the standard deviation of the difference of a pair, as a
    share, None with one pair. ``low`` and ``high`` bound the change, infinite before the first analysis.
    """

    verdict: PairedVerdict
    change: float
    low: float
    high: float
    runs: int
    first: float
    second: float
    noise: float | None

    @property
    def decided(self) -> bool:
        """Whether further runs are needless."""
        return self.verdict is not PairedVerdict.UNCLEAR


def analyses(most: int) -> list[int]:
    """Return the numbers of runs after which a comparison of at most *most* runs is analysed, the last of them *most*."""
    return [*(runs for runs in range(FEWEST_RUNS, most - BLOCK + 1, BLOCK)), most]


def level(runs: int, most: int, alpha: float) -> float:
    """Return the two-sided level of the analysis after *runs* of at most *most*; 0 where there is none."""
    planned = analyses(most)
    if runs not in planned:
        return 0.0
    return alpha * (1 - EARLY * (len(planned) - 1)) if runs == most else alpha * EARLY


def follow(
    pairs: Sequence[tuple[float, float]], better: str, *, most: int, precision: float, alpha: float
) -> PairedResult:
    """Return the result of the first analysis of *pairs* that decides, else of the last; see :func:`compare`.

    All analyses hold together, so what an earlier one has decided stands whatever later runs say.
    """
    made = [runs for runs in analyses(most) if runs <= 2 * len(pairs)]
    for runs in made:
        found = compare(pairs[: runs // 2], better, most=most, precision=precision, alpha=alpha)
        if found.decided:
            return found
    return found if made else compare(pairs, better, most=most, precision=precision, alpha=alpha)


def compare(
    pairs: Sequence[tuple[float, float]],
    better: str,
    *,
    most: int = MOST_RUNS,
    precision: float = PRECISION,
    alpha: float = ALPHA,
) -> PairedResult:
    """Return what pairs of positive figures say, two pairs a block, in the order of their runs.

    Args:
        pairs: figures of A and B.
        better: ``lower`` or ``higher``.
        most: runs of the whole comparison, both sides together; it must be even.
        precision: smallest difference that matters, as a share.
        alpha: chance that equal sides are called different.
    """
    sign = -1.0 if better == "lower" else 1.0
    logs = [(sign * math.log(first), sign * math.log(second)) for first, second in pairs]
    differences = [first - second for first, second in logs]
    runs, mean = 2 * len(pairs), statistics.fmean(differences)
    low, high, verdict = -math.inf, math.inf, PairedVerdict.UNCLEAR
    if nominal := level(runs, most, alpha):
        half = _half_width(logs, mean, nominal)
        low, high = math.expm1(mean - half), math.expm1(mean + half)
        if -precision < low and high < precision:
            verdict = PairedVerdict.EQUAL
        elif not low <= 0 <= high:
            verdict = PairedVerdict.BETTER if mean > 0 else PairedVerdict.WORSE
    noise = statistics.stdev(differences) if len(pairs) > 1 else None
    first, second = (statistics.median(side) for side in zip(*pairs, strict=True))
    return PairedResult(verdict, math.expm1(mean), low, high, runs, first, second, noise)


def _half_width(logs: Sequence[tuple[float, float]], mean: float, nominal: float) -> float:
    """Return half the width of the interval of the mean difference: residuals are those within blocks, less the difference.

    A drift within blocks makes it wider, never narrower.
    """
    squares, blocks = 0.0, 0
    for at in range(0, len(logs), BLOCK // 2):
        values = [value for pair in logs[at : at + BLOCK // 2] for value in pair]
        middle = statistics.fmean(values)
        squares += sum((value - middle) ** 2 for value in values)
        blocks += 1
    runs = 2 * len(logs)
    free = runs - blocks - 1
    residual = max(0.0, squares - runs * mean**2 / 4)
    return quantile(nominal, free) * math.sqrt(residual / free * 4 / runs)


@functools.lru_cache(maxsize=256)  # a comparison has few analyses, a simulation thousands of comparisons
def quantile(nominal: float, free: int) -> float:
    """Return which deviation from zero Student's t with *free* degrees of freedom exceeds with probability *nominal*, both tails."""
    low, high = 0.0, 1.0
    while two_sided(high, free) > nominal:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, free) > nominal else (low, middle)
    return high


def two_sided(t: float, free: int) -> float:
    """Return the probability that Student's t with *free* degrees of freedom deviates from zero by more than *t*.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4, which are exact.
    """
    angle = math.atan(t / math.sqrt(free))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = free % 2
    term = cosine if odd else 1.0
    total = term if free > 1 or not odd else 0.0
    for number in range(2 + odd, free - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1 - inside)
