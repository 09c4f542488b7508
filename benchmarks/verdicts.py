"""What fails in the morning and what the alert tells: the judge on real noise with faults planted into it, beside rules that others use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import verdict_changes, verdict_sites
from benchmarks.history_worlds import Floats, judged_nights
from benchmarks.report import Row
from benchmarks.verdict_noise import DRIFT_SOON, JUDGED, SOON, Noise, planted, planted_runs, read
from pytest_mlhpc.judge.losses import ALONE, FURTHER, LossLimits, limits_for

SITES = (50, 600, 2_000)
#: Nights by which one series of a clean site is begun later than the one before; nights of a month.
TURN, MONTH = 4, 30
#: A quick run looks at each third series.
QUICK = 3
#: Limits, in standard errors, that are tried beside that of 600 series.
LOWER = (3.5, 4.25)
#: Per cent of clean mornings with a red test that are asked for: one in 60, one in 30.
MOST_RED = (100 / 60, 100 / 30, 100 / 30)

Flags = NDArray[np.bool_]
Judge = Callable[[Floats], tuple[Flags, NDArray[np.int64]]]


def ours(limits: LossLimits) -> Judge:
    """Return the judge of the product with these limits."""
    return lambda runs: judged_nights(runs, limits)


def fixed_reference(share: float) -> Judge:
    """Return the rule that a figure fails this far below the median of the first nights (ReFrame's reference)."""

    def judge(runs: Floats) -> tuple[Flags, NDArray[np.int64]]:
        first = runs[:, :, 0]
        centre = np.nanmedian(first[:, :JUDGED], axis=1)[:, None]
        return first < (1 - share) * centre, np.zeros(first.shape, dtype=np.int64)

    return judge


def z_score(limit: float, nights: int = 30) -> Judge:
    """Return the rule that a figure fails so many standard deviations below the mean of the last nights (conbench)."""

    def judge(runs: Floats) -> tuple[Flags, NDArray[np.int64]]:
        first = runs[:, :, 0]
        failed = np.zeros(first.shape, dtype=np.bool_)
        for night in range(nights, first.shape[1]):
            past = first[:, night - nights : night]
            failed[:, night] = first[:, night] < past.mean(axis=1) - limit * past.std(axis=1, ddof=1)
        return failed, np.zeros(first.shape, dtype=np.int64)

    return judge


@dataclass(frozen=True)
class Counted:
    """Red nights and new red spells per 100 clean nights of screened series, the nights that were looked at, re-runs per 100."""

    red: float
    spells: float
    nights: int
    reruns: float


def false(judge: Judge, noise: Sequence[Noise], fault: str, seeds: Sequence[int]) -> Counted:
    """Return how often tests fail where no change was planted."""
    red = spells = nights = reruns = 0
    for seed in seeds:
        made = planted(noise, fault, seed)
        failed, again = judge(made.runs)
        for row in range(len(noise)):
            first = JUDGED if fault == "clean" else int(made.begins[row])
            part = failed[row, first : made.nights[row]]
            red += int(part.sum())
            spells += int((part & ~failed[row, first - 1 : made.nights[row] - 1]).sum())
            reruns += int(again[row, first : made.nights[row]].sum())
            nights += len(part)
    return Counted(100 * red / nights, 100 * spells / nights, nights, 100 * reruns / nights)


def found(
    judge: Judge, noise: Sequence[Noise], fault: str, seeds: Sequence[int]
) -> dict[str, tuple[float, float, float]]:
    """Return by class of noise the per cent of planted faults that fail the same night, within three, and within 14 (44)."""
    delays: dict[str, list[float]] = {}
    for seed in seeds:
        made = planted(noise, fault, seed)
        failed, _ = judge(made.runs)
        for row, one in enumerate(noise):
            begin, most = int(made.begins[row]), DRIFT_SOON if fault == "drift" else SOON
            hits = np.flatnonzero(failed[row, begin : begin + most])
            delays.setdefault(one.size, []).append(float(hits[0]) if hits.size else np.inf)
    return {
        size: tuple(round(100 * float(np.mean(np.array(late) < nights)), 0) for nights in (1, 3, np.inf))  # type: ignore[misc]
        for size, late in delays.items()
    }


def clean_mornings(noise: Sequence[Noise], judge: Judge, series: int) -> tuple[float, float]:
    """Return the per cent of mornings with a red test at a site of so many *series* without a fault, and new spells of red a month.

    Each series of the record is begun at every :data:`TURN`-th of its nights (round its end: nothing changed in it), and the
    site's are drawn from all of these, each by itself.
    """
    draw = np.random.default_rng(0)
    turned = [
        replace(one, values=np.roll(one.values, -first)[: verdict_sites.NIGHTS])
        for one in noise
        for first in range(0, len(one.values), TURN)
    ]
    failed, _ = judge(np.stack([planted_runs(one, "clean", verdict_sites.NIGHTS, draw) for one in turned]))
    before, watched = failed[:, verdict_sites.BEFORE - 1 : -1], failed[:, verdict_sites.BEFORE :]
    begun = float((watched & ~before).mean())
    return 100 * float(np.mean(1 - (1 - watched.mean(axis=0)) ** series)), begun * series * MONTH


def run(noise: Path | None = None, seeds: int = 2, *, quick: bool = False) -> Iterator[Row]:
    """Yield the rows; without a folder of noise there is nothing to measure. *quick* looks at a third of the series, and at small sites."""
    if noise is None:
        yield Row("the judge on real noise", "-", "needs --noise FOLDER", None)
        return
    every = read(noise)
    screened = [one for one in every if one.kind == "screened"]
    screened = screened[1::2]  # the rules were chosen on the other half
    fixed = [one for one in every if one.kind != "screened"]
    if quick:
        screened, fixed, seeds = screened[::QUICK], fixed[::QUICK], 1
    draws = range(seeds)
    yield from verdict_changes.rows(screened, draws)
    yield from _rows(screened, fixed, draws)
    yield from _mornings(screened)
    yield from _curve(screened, draws)
    yield from verdict_sites.rows(screened, quick=quick)


def _curve(screened: Sequence[Noise], seeds: Sequence[int]) -> Iterator[Row]:
    """Yield what limits below that of 600 series would find there, and how often they would be wrong."""
    for score in LOWER:
        judge = ours(LossLimits(0.05, score, score + ALONE, score - FURTHER))
        red, _spells = clean_mornings(screened, judge, 600)
        large, just = (found(judge, screened, fault, seeds) for fault in ("step 10", "step 5"))
        words = (
            f"{red:.1f} %; 10 % the same night: medium {large['medium'][0]:.0f}, noisy {large['noisy'][0]:.0f}; "
            f"5 % within 3: medium {just['medium'][1]:.0f}; within {SOON}: noisy {just['noisy'][2]:.0f}"
        )
        yield Row(
            f"600 series at {score:g} standard errors: clean mornings with a red test", "-", words, None
        )


def _mornings(screened: Sequence[Noise]) -> Iterator[Row]:
    for size, most in zip(SITES, MOST_RED, strict=True):
        red, spells = clean_mornings(screened, ours(limits_for(size, 0.05)), size)
        words = f"{red:.1f} %; {spells:.2f} new ones a month"
        what = f"site of {size:,} series: clean mornings with a red test"
        yield Row(what, f"<= {most:.1f} %", words, red <= most)


def _rows(screened: Sequence[Noise], fixed: Sequence[Noise], seeds: Sequence[int]) -> Iterator[Row]:
    rules: dict[str, Judge] = {f"site of {size:,} series": ours(limits_for(size, 0.05)) for size in SITES}
    rivals = {"fixed reference, -5 %": fixed_reference(0.05), "z-score of 5": z_score(5.0)}
    for name, judge in {**rules, **rivals}.items():
        clean = false(judge, screened, "clean", seeds)
        machines = false(judge, fixed, "clean", seeds)
        words = (
            f"{clean.red:.3f} red nights and {clean.spells:.3f} new ones in {clean.nights:,}; fixed programs {machines.red:.1f}"
            f" and {machines.spells:.2f}; {clean.reruns:.0f} re-runs"
        )
        yield Row(f"{name}: red per 100 clean nights", "-", words, None)
        for fault in ("bad node", "outliers", "noise"):
            worse = false(judge, screened, fault, seeds)
            yield Row(
                f"{name}: {fault}, red per 100 nights", "-", f"{worse.red:.2f}, new {worse.spells:.3f}", None
            )
        for fault in ("step 10", "step 5", "step 2", "drift"):
            shares = found(judge, screened, fault, seeds)
            words = "; ".join(
                f"{size} {same:.0f} / {three:.0f} / {late:.0f}"
                for size, (same, three, late) in sorted(shares.items())
            )
            yield Row(
                f"{name}: {fault} %, red the same night / within 3 / within {DRIFT_SOON if fault == 'drift' else SOON}",
                "-",
                words,
                None,
            )
