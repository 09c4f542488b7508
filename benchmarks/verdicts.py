"""What fails in the morning: the judge on real noise with faults planted into it, beside rules that others use.

The noise is a folder with ``series.json``: ``{"series": [{"id", "kind", "sigma", "lag1", "values"}, ...]}``, one value a
night, higher is better. In series of the kind ``screened`` nothing changed, so that a test that fails there fails falsely; in
those of a ``fixed program`` the machine may have changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.history_worlds import RUNS, Floats, judged_nights
from benchmarks.report import Row
from pytest_mlhpc.judge.losses import LossLimits, limits_for
from pytest_mlhpc.judge.sensitivity import rerun_deviations

#: Nights of a series that are looked at, the first one that is judged, and the nights in which a fault may begin.
NIGHTS, JUDGED, FAULTS = 160, 30, (45, 75)
#: Nights within which a fault has to be found; a drift takes longer.
SOON, DRIFT_SOON = 14, 44
#: A bad node: so much slower, in so many nights. A drift: so much, over so many nights.
BAD_NODE, BAD_SHARE, DRIFT, DRIFT_NIGHTS = 0.06, 0.2, 0.05, 30
CLASSES = {"tight": 0.005, "medium": 0.015, "noisy": 0.06}
SITES = (50, 600, 2_000)

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Noise:
    """One series of the record."""

    kind: str
    sigma: float
    lag1: float
    values: Floats

    @property
    def size(self) -> str:
        """The class of its noise."""
        return next(name for name, most in CLASSES.items() if self.sigma < most or name == "noisy")


@dataclass(frozen=True)
class Planted:
    """Runs of many series (series x nights x attempts), and the night in which each one's fault begins."""

    noise: Sequence[Noise]
    runs: Floats
    begins: NDArray[np.int64]
    nights: NDArray[np.int64]


def read(folder: Path) -> list[Noise]:
    """Return the series of the record in *folder*."""
    found = json.loads((folder / "series.json").read_text(encoding="utf-8"))["series"]
    return [
        Noise(one["kind"], one["sigma"], one["lag1"], np.array(one["values"], dtype=np.float64))
        for one in found
    ]


def planted(noise: Sequence[Noise], fault: str, seed: int) -> Planted:
    """Return each series with *fault*: clean, step N, drift, bad node, outliers, noise.

    A re-run has the level of its night; of the night's own deviation, at most 3 sigma of it, as much as neighbouring nights
    share; and the rest drawn from the nights around it.
    """
    draw = np.random.default_rng(seed)
    runs = np.full((len(noise), NIGHTS, RUNS), np.nan)
    begins, lengths = np.zeros(len(noise), dtype=np.int64), np.zeros(len(noise), dtype=np.int64)
    for row, one in enumerate(noise):
        nights = min(len(one.values), NIGHTS)
        first = int(draw.integers(0, len(one.values) - nights + 1))
        values = one.values[first : first + nights]
        begin = int(draw.integers(FAULTS[0], min(FAULTS[1], nights - 20) + 1))
        runs[row, :nights] = planted_runs(replace(one, values=values), fault, begin, draw)
        begins[row], lengths[row] = begin, nights
    return Planted(noise, runs, begins, lengths)


def planted_runs(one: Noise, fault: str, begin: int, draw: np.random.Generator) -> Floats:
    """Return the runs (nights x attempts) of all nights of *one* with a *fault* that begins in the night *begin*."""
    values = one.values
    nights, after = len(values), np.arange(len(values)) >= begin
    level = np.array([np.median(values[max(0, at - 25) : at + 26]) for at in range(nights)])
    if one.kind == "screened":
        level[:] = np.median(values)
    own = np.log(values / level)
    sigma = max(1.4826 * float(np.median(np.abs(own - np.median(own)))), 1e-4)
    if fault == "noise":
        own = np.where(after, 2.5 * own, own)
    base: Floats = np.log(level)
    if fault.startswith("step"):
        base = base + np.where(after, np.log(1 - float(fault.split()[1]) / 100), 0.0)
    elif fault == "drift":
        base = base + np.log(
            1 - DRIFT * np.clip(np.arange(nights) - begin + 1, 0, DRIFT_NIGHTS) / DRIFT_NIGHTS
        )
    alike = max(one.lag1, 0.0)
    around = np.array([draw.choice(own[max(0, at - 25) : at + 26], RUNS - 1) for at in range(nights)])
    again = rerun_deviations(own, around, alike, sigma)
    logs: Floats = base[:, None] + np.column_stack([own, again])
    if fault == "bad node":
        logs += np.where((draw.random(logs.shape) < BAD_SHARE) & after[:, None], np.log(1 - BAD_NODE), 0.0)
    elif fault == "outliers":
        hit = draw.choice(np.arange(begin, nights), min(5, nights - begin), replace=False)
        logs[hit, 0] += np.log(1 - draw.uniform(0.08, 0.25, len(hit)))
    return np.exp(logs)


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


def run(noise: Path | None = None, seeds: int = 2) -> list[Row]:
    """Return the rows; without a folder of noise there is nothing to measure."""
    if noise is None:
        return [Row("the judge on real noise", "-", "needs --noise FOLDER", None)]
    every = read(noise)
    screened = [one for one in every if one.kind == "screened"][
        1::2
    ]  # the rules were chosen on the other half
    return list(_rows(screened, [one for one in every if one.kind != "screened"], range(seeds)))


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
