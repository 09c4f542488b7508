"""Whether `mlhpc history sensitivity` is right: what it predicts from the first nights of real series, tried on the later ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.history_worlds import ATTEMPTS, Floats, judged_nights
from benchmarks.report import Row
from benchmarks.verdict_noise import Noise, read
from pytest_mlhpc.judge.losses import limits_for
from pytest_mlhpc.judge.sensitivity import (
    SURE,
    WITHIN,
    correlation_of_neighbours,
    rerun_deviations,
    sensitivity,
)

#: Nights from which it is predicted; the nights in which losses begin that are seen.
KNOWN, BEGINS = 60, range(60, 87, 2)
#: How far what is found may be from what is predicted.
NEAR = 0.1
#: Series of the site.
SITE = 600


def run(noise: Path | None = None) -> list[Row]:
    """Return the rows; without a folder of noise there is nothing to measure."""
    if noise is None:
        return [Row("history sensitivity on real noise", "-", "needs --noise FOLDER", None)]
    return list(_rows([one for one in read(noise) if one.kind == "screened"]))


def _rows(every: Sequence[Noise]) -> Iterator[Row]:
    limits = limits_for(SITE, 0.05)
    seen: dict[tuple[str, int], list[float]] = {}
    sizes: dict[tuple[str, int], list[float]] = {}
    for number, one in enumerate(every):
        predicted = sensitivity(one.values[:KNOWN].tolist(), "higher", limits, seed=number)
        if predicted is None:
            continue
        for nights, size in zip(WITHIN, predicted.smallest, strict=True):
            if size is None:
                continue
            late = _delays(one.values, size, np.random.default_rng(number))
            seen.setdefault((one.size, nights), []).append(float(np.mean(late < nights)))
            sizes.setdefault((one.size, nights), []).append(size)
    for (name, nights), shares in sorted(seen.items()):
        words = (
            f"{np.mean(shares):.1%} found, {SURE:.0%} predicted; sizes {min(sizes[name, nights]):.1%} to"
            f" {max(sizes[name, nights]):.1%} of {len(shares)} series"
        )
        what = f"{name} series: losses of the predicted size within {nights} night{'s' * (nights > 1)}"
        yield Row(what, "within 10 points", words, abs(float(np.mean(shares)) - SURE) <= NEAR)
    whole = float(np.mean(list(itertools.chain.from_iterable(seen.values()))))
    yield Row(
        "all", "within 10 points", f"{whole:.1%} found, {SURE:.0%} predicted", abs(whole - SURE) <= NEAR
    )


def _delays(values: Floats, size: float, draw: np.random.Generator) -> Floats:
    """Return after how many nights each planted loss failed its test; infinite where none did."""
    own = np.log(values / np.median(values))
    sigma = max(1.4826 * float(np.median(np.abs(own))), 1e-5)
    runs = np.full((len(BEGINS), KNOWN + WITHIN[-1], ATTEMPTS), np.nan)
    for row, begin in enumerate(BEGINS):
        part = own[begin - KNOWN : begin + WITHIN[-1]]
        around = draw.choice(own, (len(part), ATTEMPTS - 1))
        logs = np.column_stack([part, rerun_deviations(part, around, correlation_of_neighbours(own), sigma)])
        logs[KNOWN:] += np.log(1 - size)
        runs[row, : len(part)] = np.exp(logs)
    failed, _ = judged_nights(runs, limits_for(SITE, 0.05))
    hits = failed[:, KNOWN:]
    return np.where(hits.any(axis=1), hits.argmax(axis=1), np.inf)
