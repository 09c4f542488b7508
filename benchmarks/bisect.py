"""``mlhpc history bisect``: how often it names the right commit, and by how many runs; simulated, beside plain git bisect and testing all."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.against import NOISE, PAIRED
from benchmarks.report import Row
from pytest_mlhpc.judge import bisecting
from pytest_mlhpc.judge.bisecting import PairedEvidence
from pytest_mlhpc.judge.paired import ALPHA, follow

TRIALS = 400
#: Losses in paired standard deviations, and how many commits are candidates.
LOSSES, CANDIDATES = (1.0, 2.0, 4.0), (2, 8, 64)
#: Runs of each commit that plain git bisect measures, and of each where all are tested.
STEPS = (5, 10)
#: The loss of today differs from the recorded one by so much (standard deviation, as a share of it).
OTHER_LOSS = 0.1
#: Nodes of one allocation are slower or faster than those of another by this (standard deviation, as a share): one run's noise.
NODES = NOISE
BUDGET = 300


@dataclass(frozen=True)
class Case:
    """A loss whose culprit is known; None: none of the candidates made it, and it does not come back."""

    seed: int
    many: int
    loss: float  #: as recorded, natural logarithm
    culprit: int | None

    def slow(self, commits: int) -> bool:
        """Whether the first *commits* of the candidates, without the others, are slow."""
        return self.culprit is not None and commits > self.culprit


def ours(case: Case) -> tuple[int | str | None, int]:
    """Return what is named and how many runs it took, as ``mlhpc history bisect`` decides."""
    rng = random.Random(case.seed)  # noqa: S311 - noise
    today = case.loss * rng.gauss(1, OTHER_LOSS)
    before = bisecting.priors([case.many])
    possible = {f"rev={number}": frozenset(range(number, case.many)) for number in range(case.many)}
    found: list[PairedEvidence] = []
    runs = 0
    while True:
        now = bisecting.posterior(before, case.loss, found)
        if how := bisecting.ending(now, possible):
            return (bisecting.most_probable(now, possible)[0] if how == "named" else None), runs
        wanted = bisecting.wanted_runs(case.loss, found, PAIRED)
        if runs + wanted > BUDGET:
            return "budget", runs
        name = bisecting.next_comparison(now, possible)
        worse = today if case.slow(case.many) and not case.slow(min(possible[name])) else 0.0
        pairs = [
            (math.exp(rng.gauss(0, NOISE) - worse), math.exp(rng.gauss(0, NOISE))) for _ in range(wanted // 2)
        ]
        result = follow(pairs, "higher", most=wanted, precision=math.expm1(case.loss / 2), alpha=ALPHA)
        assert result.noise is not None
        found.append(
            PairedEvidence(possible[name], result.runs // 2, -math.log1p(result.change), result.noise)
        )
        runs += result.runs


def plain(case: Case, each: int, nodes: float) -> tuple[int, int]:
    """Return the same of git bisect: the mean of *each* runs of a commit is good or bad by the middle of the recorded levels."""
    rng = random.Random(case.seed)  # noqa: S311 - noise
    today = case.loss * rng.gauss(1, OTHER_LOSS)
    good, bad, runs = 0, case.many, 0  # commits of the candidates that it has
    while bad - good > 1:
        middle = (good + bad) // 2
        level = _mean(rng, each, nodes) - (today if case.slow(middle) else 0.0)
        good, bad, runs = (
            (good, middle, runs + each) if level < -case.loss / 2 else (middle, bad, runs + each)
        )
    return bad - 1, runs


def all_tested(case: Case, each: int) -> tuple[int, int]:
    """Return the same of measuring each commit *each* times, and the step that fits best (least squares)."""
    rng = random.Random(case.seed)  # noqa: S311 - noise
    today = case.loss * rng.gauss(1, OTHER_LOSS)
    levels = [
        _mean(rng, each, 0.0) - (today if case.slow(commits) else 0.0) for commits in range(case.many + 1)
    ]
    errors = [_squares(levels[:first]) + _squares(levels[first:]) for first in range(1, case.many + 1)]
    return min(range(case.many), key=errors.__getitem__), each * (case.many + 1)


def _mean(rng: random.Random, each: int, nodes: float) -> float:
    return rng.gauss(0, nodes) + statistics.fmean(rng.gauss(0, NOISE) for _ in range(each))


def _squares(levels: Sequence[float]) -> float:
    middle = statistics.fmean(levels)
    return math.fsum((level - middle) ** 2 for level in levels)


def _cases(many: int, deviations: float) -> list[Case]:
    found = []
    for seed in range(TRIALS):
        culprit = random.Random(seed).randrange(many)  # noqa: S311 - the same each time
        found.append(Case(seed, many, deviations * PAIRED, culprit))
    return found


def _share(wrong: int) -> str:
    return f"{100 * wrong / TRIALS:.1f}"


def _row(deviations: float, many: int) -> Row:
    cases = _cases(many, deviations)
    named = [ours(case) for case in cases]
    right = sum(got == case.culprit for (got, _), case in zip(named, cases, strict=True))
    none = sum(got is None for got, _ in named)
    spent = sum(got == "budget" for got, _ in named)
    wrong = TRIALS - right - none - spent
    runs = statistics.fmean(runs for _, runs in named)
    texts = [f"{_share(right)}, {_share(wrong)}, {_share(none)}, {_share(spent)}; {runs:.0f}"]
    for each in STEPS:
        for nodes in (0.0, NODES):
            answers = [plain(case, each, nodes) for case in cases]
            correct = sum(got == case.culprit for (got, _), case in zip(answers, cases, strict=True))
            texts.append(f"{_share(correct)}; {statistics.fmean(runs for _, runs in answers):.0f}")
    answers = [all_tested(case, STEPS[0]) for case in cases]
    correct = sum(got == case.culprit for (got, _), case in zip(answers, cases, strict=True))
    texts.append(f"{_share(correct)}; {answers[0][1]}")
    name = f"{deviations:g} paired standard deviations, {many} commits"
    return Row(name, "wrong <= 5", " / ".join(texts), 100 * wrong / TRIALS <= 5)


def run() -> list[Row]:
    """Simulate losses of all sizes among few and many commits, and losses that do not come back."""
    plain_names = [f"git bisect, {each} runs{where}" for each in STEPS for where in ("", ", other nodes")]
    heading = " / ".join(
        ["right, wrong, none, budget spent; runs", *plain_names, f"all, {STEPS[0]} runs each"]
    )
    rows = [Row("right of 100; runs", "-", heading, None)]
    rows += [_row(deviations, many) for deviations in LOSSES for many in CANDIDATES]
    for deviations in LOSSES:
        gone = [ours(Case(10**6 + seed, 8, deviations * PAIRED, None)) for seed in range(TRIALS)]
        named = sum(isinstance(got, int) for got, _ in gone)
        runs = statistics.fmean(runs for _, runs in gone)
        rows.append(
            Row(
                f"a loss of {deviations:g} that does not come back, 8 commits: one named wrongly; runs",
                "<= 5",
                f"{_share(named)}; {runs:.0f}",
                100 * named / TRIALS <= 5,
            )
        )
    return rows
