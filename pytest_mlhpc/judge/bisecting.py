"""Which of several candidates made a series slower, by paired comparisons whose answers are noisy? Pure statistics.

Each comparison runs today's set-up against one that lacks some candidates; the loss shows in it if the culprit is one of these. Every
candidate has a probability, and so has *none*: the machine, or what cannot be set. Bayes' rule updates them after each comparison,
and the next one is that which splits the probability most evenly (Horstein 1963; Waeber, Frazier and Henderson 2013). It ends
once a candidate, or *none*, is as probable as :data:`SURE`.

The likelihood is that of normal differences within pairs, the same noise in all comparisons, with its variance integrated out
(reference prior; Box and Tiao, Bayesian Inference in Statistical Analysis, 2.4), and the loss of today around the recorded one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_mlhpc.jobs.job import BLOCK
from pytest_mlhpc.judge.paired import MOST_RUNS

#: How probable the culprit is when it is named.
SURE = 0.95
#: The probability of *none* before anything is measured: the share of level changes that nothing settable explains. Ours.
NONE = 0.2
#: Standard deviation of today's loss around the recorded one, as a share of it: levels of few nights are uncertain. Ours.
SPREAD = 0.25
#: A difference between equal sides, as a share of the loss, that says nothing: another path, another page of memory. Ours.
FLOOR = 0.125
#: How many standard errors lie between the loss and no loss where a comparison is as long as wanted: it errs in 5 of 100 alone.
SEPARATION = 3.3
#: How many differences of pairs the noise of nights stands for: few, as nights differ by more than runs on the same nodes. Ours.
PRIOR = 2
#: Losses of today that are considered, as shares of the recorded one: within two and a half standard deviations.
_FACTORS = tuple(1 + SPREAD * step / 4 for step in range(-10, 11))
_WEIGHTS = tuple(math.exp(-(((factor - 1) / SPREAD) ** 2) / 2) for factor in _FACTORS)


@dataclass(frozen=True)
class PairedEvidence:
    """What one comparison measured. The loss shows in it if one of *culprits* made it.

    ``mean`` and ``deviation`` are those of the differences of *pairs* (natural logarithms), positive where today's side is worse.
    """

    culprits: frozenset[int]
    pairs: int
    mean: float
    deviation: float

    @property
    def squares(self) -> float:
        """Sum of squared distances of the differences from their mean."""
        return (self.pairs - 1) * self.deviation**2


@dataclass(frozen=True)
class Posterior:
    """How probable each candidate is, and *none*, and the loss of today if it is one of the candidates (natural logarithm)."""

    candidates: tuple[float, ...]
    none: float
    loss: float


def priors(classes: Sequence[int]) -> list[float]:
    """Return the probability of each candidate before anything is measured: *classes* are equally probable, and so are those in one.

    Args:
        classes: how many candidates each class has, in the candidates' order: commits are one class, each set-up is one.
    """
    share = (1 - NONE) / len(classes)
    return [share / many for many in classes for _ in range(many)]


def posterior(before: Sequence[float], loss: float, found: Sequence[PairedEvidence]) -> Posterior:
    """Return how probable each candidate is after *found*.

    Args:
        before: their probabilities before; what is left of 1 is that of *none*.
        loss: the recorded loss, as a natural logarithm above 0.
        found: what comparisons measured, in any order.
    """
    # equal rows, equal likelihoods
    shown = [tuple(number in one.culprits for one in found) for number in range(len(before))]
    nothing = (False,) * len(found)
    tables = {row: _likelihoods(row, loss, found) for row in {*shown, nothing}}
    peak = max(value for table in tables.values() for value in table)
    weight = {
        row: math.fsum(w * math.exp(value - peak) for w, value in zip(_WEIGHTS, table, strict=True))
        for row, table in tables.items()
    }
    masses = [prior * weight[row] for prior, row in zip(before, shown, strict=True)]
    none = max(0.0, 1 - math.fsum(before)) * weight[nothing]
    total = math.fsum(masses) + none
    mass_of: dict[tuple[bool, ...], float] = {}
    for mass, row in zip(masses, shown, strict=True):
        mass_of[row] = mass_of.get(row, 0.0) + mass
    return Posterior(tuple(mass / total for mass in masses), none / total, loss * _factor(mass_of, tables))


def _likelihoods(row: Sequence[bool], loss: float, found: Sequence[PairedEvidence]) -> list[float]:
    """Return the logarithm of the likelihood for each loss of today, if the loss shows in those comparisons that *row* says."""
    pairs = sum(one.pairs for one in found)
    if not pairs:
        return [0.0] * len(_FACTORS)
    fixed = math.fsum(one.squares for one in found) + pairs * (FLOOR * loss) ** 2
    fixed += math.fsum(one.pairs * one.mean**2 for one, shows in zip(found, row, strict=True) if not shows)
    showing = [one for one, shows in zip(found, row, strict=True) if shows]
    return [
        -pairs
        / 2
        * math.log(fixed + math.fsum(one.pairs * (one.mean - factor * loss) ** 2 for one in showing))
        for factor in _FACTORS
    ]


def _factor(
    masses: Mapping[tuple[bool, ...], float],
    tables: Mapping[tuple[bool, ...], Sequence[float]],
) -> float:
    """Return the expected loss of today as a share of the recorded one, if one of the candidates made it."""
    total = math.fsum(masses.values())
    if not total:
        return 1.0
    expected = 0.0
    for row, mass in masses.items():
        if mass:
            peak = max(tables[row])
            shares = [w * math.exp(value - peak) for w, value in zip(_WEIGHTS, tables[row], strict=True)]
            mean = math.fsum(f * s for f, s in zip(_FACTORS, shares, strict=True)) / math.fsum(shares)
            expected += mass / total * mean
    return expected


def next_comparison(now: Posterior, possible: Mapping[str, frozenset[int]]) -> str:
    """Return the name of the possible comparison whose answer is least certain; empty if there is none."""

    def evenness(name: str) -> float:
        return abs(math.fsum(now.candidates[number] for number in possible[name]) - 0.5)

    return min(possible, key=evenness, default="")


def ending(now: Posterior, possible: Mapping[str, frozenset[int]]) -> str:
    """Return how it ends: ``named``, ``none``, ``undecided`` (nothing that is possible can tell what is left apart); empty while it goes on."""
    if not possible:
        return "undecided"
    many = len(now.candidates)
    best = most_probable(now, possible)
    comparable = frozenset[int]().union(*possible.values())
    if best[0] in comparable and math.fsum(now.candidates[number] for number in best) >= SURE:
        return "named"
    hidden = [number for number in range(many) if number not in comparable]
    if now.none + math.fsum(now.candidates[number] for number in hidden) >= SURE:
        return "undecided" if hidden else "none"
    return ""


def most_probable(now: Posterior, possible: Mapping[str, frozenset[int]]) -> tuple[int, ...]:
    """Return the most probable candidate, with those that no possible comparison tells from it."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for number in range(len(now.candidates)):
        row = tuple(number in culprits for culprits in possible.values())
        groups.setdefault(row, []).append(number)
    return tuple(max(groups.values(), key=lambda one: math.fsum(now.candidates[number] for number in one)))


def wanted_runs(loss: float, found: Sequence[PairedEvidence], nights: float) -> int:
    """Return how many runs the next comparison is to have, both sides together: whole blocks, few where the noise is small.

    Args:
        loss: the recorded loss (natural logarithm).
        found: what comparisons measured.
        nights: deviation of the difference of two nights (natural logarithm), which counts like :data:`PRIOR` differences.
    """
    free = PRIOR + sum(one.pairs - 1 for one in found)
    squares = PRIOR * nights**2 + math.fsum(one.squares for one in found)
    return runs_for(loss, math.sqrt(squares / free))


def runs_for(loss: float, deviation: float) -> int:
    """Return how many runs tell *loss* from none where differences of pairs have this *deviation* (natural logarithms)."""
    pairs = (SEPARATION * max(deviation, FLOOR * loss) / loss) ** 2
    return min(MOST_RUNS, BLOCK * max(1, math.ceil(2 * pairs / BLOCK)))


def comparisons_without_noise(before: Sequence[float], possible: Mapping[str, frozenset[int]]) -> int:
    """Return how many comparisons it takes if none errs, and each answer leaves as many candidates as it can."""
    left, steps = {*range(len(before))}, 0
    weights = [*before]
    none = True  # still possible
    while True:
        total = math.fsum(weights[number] for number in left) + none * (1 - math.fsum(before))
        now = Posterior(
            tuple(weights[number] / total if number in left else 0.0 for number in range(len(before))),
            0.0,
            1.0,
        )
        telling = {
            name: culprits
            for name, culprits in possible.items()
            if culprits & left and (left - culprits or none)
        }
        if not telling:
            return steps
        culprits, steps = telling[next_comparison(now, telling)], steps + 1
        if len(left & culprits) >= len(left - culprits) + none:
            left, none = left & culprits, False
        else:
            left -= culprits
