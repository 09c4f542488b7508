"""A against B: how often a difference is found, and equal sides are called different; simulated, and on a real Slurm with a slowed environment."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row
from benchmarks.slurm_cluster import Cluster, NotHereError, started
from pytest_mlhpc.jobs.job import BLOCK, is_first_side
from pytest_mlhpc.judge.paired import ALPHA, MOST_RUNS, PairedResult, PairedVerdict, follow

TRIALS = 4000
#: Trials on the real cluster, of a difference and of none, each a session of up to 30 runs; and by how many so few may miss
#: a share of 95 or 5 of 100: chance alone does so once in sixty.
REAL_TRIALS, REAL_MISSED = 20, 3

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
    couples = enumerate(zip(values[::2], values[1::2], strict=True))
    pairs = [couple if (2 * at) % BLOCK == 0 else couple[::-1] for at, couple in couples]
    return follow(pairs, "higher", most=MOST_RUNS, precision=precision, alpha=ALPHA / comparisons)


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


SUITE = """
from pytest_mlhpc import Metric, program

RATE = Metric("rate", r"rate: (\\S+)", "items/s")
PROGRAM = "import os, random; print('rate:', float(os.environ['SPEED']) * random.gauss(1, {noise}))"

@program(["{python}", "-c", PROGRAM], RATE, nodes=1, time_limit=20, env={{"SPEED": "100"}})
def test_rate(run):
    pass
"""


def _real(one: Cluster) -> list[Row]:
    """Compare on a real Slurm: B is slower by one paired standard deviation, or not at all."""
    rows = []
    for name, speed in (
        ("slower by one paired standard deviation", 100 * math.exp(-PAIRED)),
        ("equal", 100.0),
    ):
        results = [_session(one, speed) for _ in range(REAL_TRIALS)]
        different = sum(verdict in ("worse", "better") for verdict, _ in results)
        runs = sum(runs for _, runs in results) / REAL_TRIALS
        least = REAL_TRIALS - REAL_MISSED
        good = different >= least if speed < 100 else different <= REAL_MISSED
        rows.append(
            Row(
                f"real Slurm, B {name}: called different; runs",
                f">= {least} of {REAL_TRIALS}" if speed < 100 else f"<= {REAL_MISSED} of {REAL_TRIALS}",
                f"{different} of {REAL_TRIALS}; {runs:.1f}",
                good,
            )
        )
    return rows


def _session(one: Cluster, speed: float) -> tuple[str, int]:
    suite = SUITE.format(noise=NOISE, python=sys.executable)
    ended = one.session(
        "quarter_plain", suite, "reports", "--mlhpc-against", f"variables.SPEED={speed + 1e-9}",
        "--mlhpc-against", "precision=0.001%", variables={"MLHPC_BENCH_REPORTS": "/dev/null"},
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
