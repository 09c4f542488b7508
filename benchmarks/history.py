"""Change points over nights: the simulation of five worlds, labelled series, and the pass over ten thousand series."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks import history_tcpd
from benchmarks.history_alarms import LATE, MOST_FALSE, best_rival, false_alarms, found, together
from benchmarks.history_worlds import NIGHTS, QUIET, WORLDS, nights
from benchmarks.report import Row, table
from pytest_mlhpc.judge.changes import find_all

#: Series without a drop in each world, and with one of each size.
QUIET_SERIES, DROPPED_SERIES = 400, 200
SEED = 3
#: Worlds in which drops of 2 % must be found too.
SHARP = {"white", "outliers"}
#: Nights by which a change may be told too early or too late and is still the same.
MARGIN = 5
SERIES, YEAR, MOST_SECONDS = 10_000, 365, 60


def simulated(scale: float) -> Iterator[Row]:
    """Yield what quorum and nights together find in each world, and what they cost."""
    quiet_rows, dropped_rows = max(1, int(scale * QUIET_SERIES)), max(1, int(scale * DROPPED_SERIES))
    for world in WORLDS:
        quiet = nights(world, quiet_rows, 0.0, SEED)
        rate = false_alarms(together(quiet))
        again = 100 * float(quiet.reruns[:, QUIET:].mean())
        counted = (
            f"{rate:.2f} in {quiet_rows * (NIGHTS - QUIET):,} nights; {again:.0f} re-runs per 100 nights; "
        )
        yield Row(
            f"{world}: false alarms per 100 nights", f"<= {MOST_FALSE}",
            counted + f"the judge {false_alarms(quiet.regressed):.2f}", rate <= MOST_FALSE,
        )  # fmt: skip
        for size, share in ((0.05, 0.98), (0.02, 0.80)):
            dropped = nights(world, dropped_rows, size, SEED)
            mine = found(together(dropped), dropped.drops)
            bound = size == 0.05 or world in SHARP
            ok = mine.share >= share and (size < 0.05 or mine.delay <= LATE.get(world, 1)) if bound else None
            words = f"{mine.share:.1%}, median delay {mine.delay:g}"
            if not bound:
                name, theirs = best_rival(quiet, dropped, knows=False)
                best, its = best_rival(quiet, dropped, knows=True)
                words += f"; best rival at 0.4 false alarms: {name} {theirs.share:.1%}, told the true level: {best} {its.share:.1%}"
            reach = (
                f">= {share:.0%}" + (f" and <= {LATE.get(world, 1)} nights" if size == 0.05 else "")
                if bound
                else "-"
            )
            yield Row(f"{world}: drops of {size:.0%} found within 14 nights", reach, words, ok)


def looked_back(scale: float) -> Iterator[Row]:
    """Yield what the detector says of whole histories of 150 nights, of first attempts alone."""
    for world in WORLDS:
        draw = np.random.default_rng(SEED)
        quiet = find_all(_histories(world, int(scale * 150), draw, 0.0)[0])
        words = [
            f"{100 * sum(map(len, quiet)) / (len(quiet) * NIGHTS):.2f} changes told in 100 nights without one"
        ]
        for size in (0.02, 0.05):
            series, places = _histories(world, int(scale * 80), draw, size)
            told = list(zip(find_all(series), places, strict=True))
            near = [(c, at) for changes, at in told for c in changes if abs(c.index - at) <= MARGIN]
            inside = sum(c.first <= at <= c.last for c, at in near)
            width = np.median([c.last - c.first + 1 for c, _ in near])
            words.append(
                f"of {size:.0%} drops {len(near) / len(told):.0%} within {MARGIN} nights, {inside / len(near):.0%} of those "
                f"in their range of {width:g} nights"
            )
        yield Row(f"{world}: looked back", "-", "; ".join(words), None)


def _histories(
    world: str, rows: int, draw: np.random.Generator, size: float
) -> tuple[list[list[float]], list[int]]:
    common, own = WORLDS[world](rows, draw)
    places = draw.integers(40, NIGHTS - 40, rows)
    after = np.arange(NIGHTS) >= places[:, None]
    return ((1 + common + own[:, :, 0]) * np.where(after, 1 - size, 1.0)).tolist(), places.tolist()


def whole_pass(count: int = SERIES) -> Iterator[Row]:
    """Yield how long the detector takes for all series of a centre."""
    draw = np.random.default_rng(SEED)
    series = 100 * (1 + 0.01 * draw.standard_normal((count, YEAR)))
    series[::4, 200:] *= 0.95
    figures = series.tolist()
    begin, cpu = time.perf_counter(), time.process_time()
    changes = find_all(figures)
    wall, used = time.perf_counter() - begin, time.process_time() - cpu
    right = np.mean([any(abs(c.index - 200) <= 1 for c in changes[i]) for i in range(0, count, 4)])
    wrong = sum(len(found) for i, found in enumerate(changes) if i % 4)
    yield Row(
        f"{count:,} series of {YEAR} nights through the detector", f"<= {MOST_SECONDS} s",
        f"{wall:.1f} s ({used:.1f} s of one core's time)", wall <= MOST_SECONDS * count / SERIES,
    )  # fmt: skip
    words = f"{right:.1%}; {wrong} changes in the {count - len(range(0, count, 4)):,} others"
    yield Row("... drops of 5 % found to a night", "-", words, None)


def run(scale: float = 1.0) -> list[Row]:
    """Measure all; *scale* is the share of the full number of series."""
    return [*simulated(scale), *looked_back(scale), *history_tcpd.rows(), *whole_pass(int(scale * SERIES))]


def main(name: str = "", scale: float = 1.0) -> list[Row]:
    """Measure one part: nights, back, tcpd or pass; without a name all."""
    if name == "nights":
        return list(simulated(scale))
    if name == "back":
        return list(looked_back(scale))
    if name == "tcpd":
        return history_tcpd.rows()
    if name == "pass":
        return list(whole_pass(int(scale * SERIES)))
    return run(scale)


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    print(table(main(part, float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)))
