"""Change points in real noise with steps planted into it: the detector beside PELT and Apache Otava, where they are installed.

``pip install ruptures apache-otava`` adds them; the project itself needs neither.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.history_tcpd import Labelled, cover, f1
from benchmarks.report import Row
from benchmarks.verdict_noise import Noise, planted
from pytest_mlhpc.judge.changes import find

STEPS = ("step 2", "step 5", "step 10")
#: What is asked of the detector: F1 and cover of series with one step, changes in a series without one.
REACH_F1, REACH_COVER, REACH_FALSE = 0.86, 0.83, 0.15
#: Otava's p and smallest change, both stricter than its defaults (0.001 and 0).
OTAVA_P, OTAVA_SMALLEST = 1e-5, 0.015

Finder = Callable[[list[float]], list[int]]


def ours(values: list[float]) -> list[int]:
    """Return the first points of new levels that this project finds."""
    return [change.index for change in find(values)]


def pelt(values: list[float]) -> list[int]:
    """Return those of PELT on least squares, penalty 3 log(n) in the variance of neighbouring differences (ruptures)."""
    ruptures = importlib.import_module("ruptures")
    signal = np.array(values)
    variance = float(np.median(np.abs(np.diff(signal)))) ** 2 / (2 * 0.6745**2) or 1e-12
    found = ruptures.Pelt(model="l2", min_size=2, jump=1).fit(signal)
    return [int(at) for at in found.predict(pen=3 * np.log(len(signal)) * variance)[:-1]]


def otava(values: list[float]) -> list[int]:
    """Return those of Apache Otava's E-divisive with a t test."""
    analysis = importlib.import_module("otava.analysis")
    points, _weak = analysis.compute_change_points(
        values, window_len=50, max_pvalue=OTAVA_P, min_magnitude=OTAVA_SMALLEST
    )
    return [int(point.index) for point in points]


#: Rival -> the package that it comes from.
RIVALS: dict[str, tuple[str, Finder]] = {"PELT": ("ruptures", pelt), "Otava": ("otava", otava)}


def labelled(noise: Sequence[Noise], fault: str, seeds: Sequence[int]) -> list[Labelled]:
    """Return first attempts of all nights of each series with *fault*, and the night in which it begins."""
    found = []
    for seed in seeds:
        made = planted(noise, fault, seed)
        for row in range(len(noise)):
            truth = {int(made.begins[row])} if fault != "clean" else set()
            found.append(Labelled(made.runs[row, : made.nights[row], 0].tolist(), [truth]))
    return found


def scores(noise: Sequence[Noise], finder: Finder, seeds: Sequence[int]) -> tuple[float, float, float]:
    """Return mean F1 and cover of series with one step, and changes found in each series without one."""
    pairs = [(one, finder(one.values)) for fault in STEPS for one in labelled(noise, fault, seeds)]
    false = [len(finder(one.values)) for one in labelled(noise, "clean", seeds)]
    return (
        float(np.mean([f1(*pair) for pair in pairs])),
        float(np.mean([cover(*pair) for pair in pairs])),
        float(np.mean(false)),
    )


def rows(noise: Sequence[Noise], seeds: Sequence[int]) -> Iterator[Row]:
    """Yield what the detector and each installed rival find."""
    reach = f"{REACH_F1}, {REACH_COVER}, {REACH_FALSE}"
    what = "change points, steps of 2, 5 and 10 %: F1, cover, false in an unchanged series"
    good, covered, false = scores(noise, ours, seeds)
    enough = good >= REACH_F1 and covered >= REACH_COVER and round(false, 2) <= REACH_FALSE
    yield Row(what, reach, f"{good:.3f}, {covered:.3f}, {false:.2f}", enough)
    for name, (package, finder) in RIVALS.items():
        if importlib.util.find_spec(package) is None:
            yield Row(f"... {name}", "-", f"not measured: pip install {package}", None)
            continue
        values = ", ".join(f"{value:.3f}" for value in scores(noise, finder, seeds))
        yield Row(f"... {name}", "-", values, None)
