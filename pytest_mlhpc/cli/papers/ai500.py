"""``mlhpc papers ai500``: FLOPS and VFLOPS of recorded ensembles, and how bagging scales beside plain data parallelism."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NearestChoice, nothing_recorded
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.papers.ai500 import OURS, THEIRS, ensembles, json_of, scaling, text_of
from pytest_mlhpc.report.compare import newest, summarise
from pytest_mlhpc.report.figures import ACCEPTED, RecordedRun
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.report.machines import choose
from pytest_mlhpc.store.files import page
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import minutes, tell

#: Accepted runs of one benchmark of which the median is taken.
_RUNS = 5


@click.command(
    cls=DataCommand,
    help="Show FLOPS and VFLOPS of ensembles that were trained by bagging, and how they scale.",
    example="mlhpc papers ai500 cirrus --rule hpc-ai500",
)
@click.argument("machines", nargs=-1, required=True, metavar="SYSTEM[:PARTITION]...")
@options.benchmark
@click.option(
    "--rule",
    type=NearestChoice([OURS, THEIRS]),
    default=OURS,
    show_default=True,
    help="Count two operations for a multiply-add and no other work, or as the paper's table.",
)
@click.option("--target", type=float, metavar="Q", help="Quality that counts as one.  [default: by workload]")
@click.option("--exponent", type=float, metavar="N", help="Of VFLOPS.  [default: by workload]")
@options.since("30d")
@options.state_dir
def command(
    *,
    machines: Sequence[str],
    benchmark: str,
    rule: str,
    target: float | None,
    exponent: float | None,
    since_ns: int,
    state_dir: Path,
) -> CommandReport:
    """Return a report of each machine."""
    for name, value in (("target", target), ("exponent", exponent)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} {value:g}: must be above 0")
    if not (state_dir / "records").is_dir():  # an index would be made there
        return nothing_recorded(state_dir, {"machines": []})
    with contextlib.closing(Index(state_dir, tell, patience_s=math.inf)) as index:
        recorded = _recorded(index, machines, benchmark, since_ns)
    found = [
        (name, rule, ensembles(runs, rule, target, exponent), scaling(runs))
        for name, runs in recorded.items()
    ]
    found = [report for report in found if report[2]]
    text = "\n".join(text_of(*report) for report in found)
    if not found:
        where = ", ".join(machines)
        text = (
            f"no accepted run with bagging=(M, P) since {minutes(since_ns)} on {where}; see {page('ai500')}\n"
        )
    return CommandReport(text, {"machines": [json_of(*report) for report in found]})


def _recorded(
    index: Index, machines: Sequence[str], benchmark: str, since_ns: int
) -> dict[str, dict[Benchmark, list[RecordedRun]]]:
    """Return machine -> benchmark -> its newest accepted runs, newest first."""
    everything = summarise(index, since_ns)
    if not everything:
        return {}
    columns = choose(machines, everything, ACCEPTED)
    benchmarks = {one.benchmark for one in everything if one.benchmark.holds(benchmark)}
    found: dict[str, dict[Benchmark, list[RecordedRun]]] = {column.name: {} for column in columns}
    for (place, key), runs in newest(index, columns, benchmarks, since_ns, _RUNS).items():
        found[columns[place].name][key] = runs
    return found
