"""A against B: how often a difference is found, and equal sides are called different; simulated, and on a real Slurm with a slowed environment."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import Row
from benchmarks.slurm_cluster import Cluster, NotHereError, started
from pytest_mlhpc.jobs.job import BLOCK, is_first_side
from pytest_mlhpc.judge.paired import ALPHA, MOST_RUNS, PairedResult, PairedVerdict, follow

TRIALS = 4000
#: Sessions on the real cluster: B slower by one paired standard deviation, and equal sides. Each has one allocation of up to
#: 30 runs.
REAL_DIFFERENT, REAL_EQUAL = 40, 60

#: Relative noise of a run in the simulation, and its share in the difference of a pair.
NOISE = 0.01
PAIRED = NOISE * math.sqrt(2)

#: One run's deviation by its number and what the block has in common.
World = Callable[[random.Random, int, list[float]], float]


def _white(rng: random.Random, number: int, state: list[float]) -> float:
    del number, state
    return rng.gauss(0, NOISE)


def _drifting(rng: random.Random, number: int, state: list[float]) -> float:
    del state
    return rng.gauss(0, NOISE) - 0.005 * number


def _wandering(rng: random.Random, number: int, state: list[float]) -> float:
    """Half of the variance is of the machine, whose state has a memory of some runs."""
    state[0] = rng.gauss(0, 1) if number == 1 else 0.8 * state[0] + 0.6 * rng.gauss(0, 1)
    return NOISE * (state[0] + rng.gauss(0, 1)) / math.sqrt(2)


def _outliers(rng: random.Random, number: int, state: list[float]) -> float:
    del number, state
    return rng.gauss(0, NOISE) - (rng.uniform(0.1, 0.4) if rng.random() < 0.05 else 0.0)


WORLDS: dict[str, World] = {
    "white noise": _white,
    "slower by 0.5 % a run": _drifting,
    "a machine that wanders": _wandering,
    "5 % of runs 10 to 40 % slower": _outliers,
}


def trial(seed: int, change: float, world: World, comparisons: int, precision: float) -> PairedResult:
    """Return the result of one comparison, whose A is *change* (natural logarithm) better."""
    rng, state = random.Random(seed), [0.0]  # noqa: S311 - noise
    values = [
        math.exp(world(rng, number, state) + (change if is_first_side(number) else 0.0))
        for number in range(1, MOST_RUNS + 1)
    ]
    return follow(_pairs(values), "higher", most=MOST_RUNS, precision=precision, alpha=ALPHA / comparisons)


def _pairs(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the figures of A and B of each pair of runs, in whose order *values* are."""
    couples = enumerate(zip(values[::2], values[1::2], strict=True))
    return [couple if (2 * at) % BLOCK == 0 else couple[::-1] for at, couple in couples]


def _simulated() -> list[Row]:
    rows = []
    for name, world in WORLDS.items():
        equal = [trial(seed, 0.0, world, 1, 1e-6) for seed in range(TRIALS)]
        wrong = sum(one.verdict in (PairedVerdict.WORSE, PairedVerdict.BETTER) for one in equal)
        share = 100 * wrong / TRIALS
        rows.append(
            Row(f"{name}: equal sides called different, of 100", "<= 5", f"{share:.1f}", share <= 5.5)
        )
    for comparisons, deviations, least in ((1, 1.0, 95), (1, 2.0, 99), (40, 1.0, None), (40, 2.0, 95)):
        found = [
            trial(10**6 + seed, deviations * PAIRED, _white, comparisons, 1e-6) for seed in range(TRIALS)
        ]
        right = 100 * sum(one.verdict is PairedVerdict.BETTER for one in found) / TRIALS
        runs = sum(one.runs for one in found) / TRIALS
        rows.append(
            Row(
                f"{comparisons} in a session, {deviations:g} paired standard deviations: found, of 100; runs",
                f">= {least}" if least else "-",
                f"{right:.1f}; {runs:.1f}",
                right >= least if least else None,
            )
        )
    quiet = [trial(2 * 10**6 + seed, 0.0, _white, 1, 0.015) for seed in range(TRIALS)]
    equal_share = 100 * sum(one.verdict is PairedVerdict.EQUAL for one in quiet) / TRIALS
    runs = sum(one.runs for one in quiet) / TRIALS
    rows.append(
        Row(
            "equal sides, precision 1.5 %: called equal, of 100; runs",
            "-",
            f"{equal_share:.1f}; {runs:.1f}",
            None,
        )
    )
    return rows


#: The noise of a run is that of its trial and its number in it: what a trial finds is known before.
SUITE = """
from pytest_mlhpc import Metric, program

RATE = Metric("rate", r"rate: (\\S+)", "items/s")
COUNT = "import os, random; runs = open({counter!r}, 'a'); print(file=runs, flush=True); number = runs.tell(); "
SPEED = "print('rate:', repr(float(os.environ['SPEED']) * random.Random({seed} + number).gauss(1, {noise})))"

@program(["{python}", "-c", COUNT + SPEED], RATE, nodes=1, time_limit=20, env={{"SPEED": "100"}})
def test_rate(run):
    pass
"""
#: Seeds of trials lie so far apart that no two runs share one.
SEED_STEP = 1000
NO_PRECISION = 1e-5


def _predicted(seed: int, speed: float) -> PairedResult:
    """Return what the runs of the trial *seed* say, whose B has *speed*, without any cluster."""
    values = [
        (100 if is_first_side(number) else speed) * random.Random(seed + number).gauss(1, NOISE)  # noqa: S311 - noise
        for number in range(1, MOST_RUNS + 1)
    ]
    return follow(_pairs(values), "higher", most=MOST_RUNS, precision=NO_PRECISION, alpha=ALPHA)


def _real(one: Cluster) -> list[Row]:
    """Compare on a real Slurm: B is slower by one paired standard deviation, or not at all."""
    slower = 100 * math.exp(-PAIRED)
    found = _trials(one, 0, REAL_DIFFERENT, slower)
    equal = _trials(one, REAL_DIFFERENT, REAL_EQUAL, 100 + 1e-9)
    rows = [
        _real_row("slower by one paired standard deviation", found, ">= 95", lambda share: share >= 95),
        _real_row("equal", equal, "<= 5", lambda share: share <= 5),
    ]
    agree = sum(real == predicted for real, predicted in (*found, *equal))
    reach = REAL_DIFFERENT + REAL_EQUAL
    rows.append(
        Row(
            "real Slurm: verdict and runs as predicted from the seeds", f"{reach}", f"{agree}", agree == reach
        )
    )
    return rows


Trial = tuple[tuple[str, int], tuple[str, int]]


def _trials(one: Cluster, first: int, many: int, speed: float) -> list[Trial]:
    """Return verdict and runs of each trial, as the cluster and as the seed has them."""
    trials = []
    for number in range(first, first + many):
        seed = SEED_STEP * (1 + number)
        predicted = _predicted(seed, speed)
        trials.append((_session(one, seed, speed), (predicted.verdict.value, predicted.runs)))
        print(f"trial {number}: real {trials[-1][0]}, predicted {trials[-1][1]}", file=sys.stderr, flush=True)
    return trials


def _real_row(name: str, trials: list[Trial], reach: str, good: Callable[[float], bool]) -> Row:
    different = sum(verdict in ("worse", "better") for (verdict, _), _ in trials)
    runs = sum(runs for (_, runs), _ in trials) / len(trials)
    return Row(
        f"real Slurm, B {name}: called different; runs",
        f"{reach} of 100",
        f"{different} of {len(trials)}; {runs:.1f}",
        good(100 * different / len(trials)),
    )


def _session(one: Cluster, seed: int, speed: float) -> tuple[str, int]:
    suite = SUITE.format(
        noise=NOISE, python=sys.executable, seed=seed, counter=str(one.folder / f"runs-{seed}")
    )
    ended = one.session(
        "quarter_plain", suite, "reports", "--mlhpc-against", f"variables.SPEED={speed!r}",
        "--mlhpc-against", f"precision={100 * NO_PRECISION:g}%", variables={"MLHPC_BENCH_REPORTS": "/dev/null"},
    )  # fmt: skip
    if ended.code not in (0, 1):
        raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[:5000]}")
    (path,) = [
        line.partition("programs: ")[2] for line in ended.printed.splitlines() if "for programs: " in line
    ]
    (test,) = json.loads(Path(path).read_text())["tests"]
    (result,) = test["results"]
    return result["verdict"], result["runs"]


def run() -> list[Row]:
    """Simulate, and compare on a real cluster where there can be one."""
    rows = _simulated()
    print("simulated: " + "; ".join(row.measured for row in rows), file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="mlhpc-bench-against-") as name:
            Path(name).chmod(0o755)
            with started(Path(name), "filetxt") as one:
                rows += _real(one)
    except NotHereError as error:
        rows.append(Row("real Slurm", "-", f"not on this machine: {' '.join(str(error).split())}", None))
    return rows
