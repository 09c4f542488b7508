"""``mlhpc ai500``: FLOPS and VFLOPS of recorded ensembles, and how bagging scales beside plain data parallelism."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.report.ai500 import OURS, THEIRS, ensembles, scaling
from pytest_mlhpc.report.ai500_text import json_of, text_of
from pytest_mlhpc.report.compare_source import newest, summarise
from pytest_mlhpc.report.figures import ACCEPTED, Run
from pytest_mlhpc.report.machines import choose
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.saying import nothing, tell, write
from pytest_mlhpc.statedir import default_state_dir

#: Accepted runs of one benchmark of which the median is taken.
_RUNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the machines, what counts as quality, and how FLOPS are counted."""
    parser.add_argument("machines", nargs="+", metavar="SYSTEM[:PARTITION]", help="whose runs to report")
    parser.add_argument(
        "--benchmark",
        default="",
        metavar="TEXT",
        help="only benchmarks whose key holds TEXT (test, workload, k=v)",
    )
    parser.add_argument(
        "--rule",
        choices=(OURS, THEIRS),
        default=OURS,
        help="count two operations for a multiply-add and no other work (ours, the default), or as the paper's table",
    )
    parser.add_argument(
        "--target", type=float, metavar="Q", help="quality that counts as one (default: by workload)"
    )
    parser.add_argument("--exponent", type=float, metavar="N", help="of VFLOPS (default: by workload)")
    parser.add_argument("--since", default="30d", metavar="TIME", help="30d, 12h or a date (default: 30d)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 5 when no ensemble was recorded."""
    for name in ("target", "exponent"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} {value:g}: must be above 0")
    since_ns = since(args.since, time.time_ns())
    state_dir = args.state_dir or default_state_dir(os.environ)
    if not (state_dir / "records").is_dir():  # else an index would be made where perhaps nobody wants one
        return nothing(f"nothing is recorded in {state_dir}; run: pytest suites/ --system NAME")
    index = Index(state_dir, tell, patience_s=math.inf)
    try:
        machines = _recorded(index, args, since_ns)
    finally:
        index.close()
    reports = [
        (name, args.rule, ensembles(runs, args.rule, args.target, args.exponent), scaling(runs))
        for name, runs in machines.items()
    ]
    reports = [report for report in reports if report[2]]
    if not reports:
        return nothing(
            f"no accepted run with bagging=(M, P) since {minutes(since_ns)} on {', '.join(args.machines)}; see docs/ai500.md"
        )
    if args.format == "json":
        write(json.dumps([json_of(*report) for report in reports], indent=1) + "\n")
    else:
        write("\n".join(text_of(*report) for report in reports))
    return 0


def _recorded(index: Index, args: argparse.Namespace, since_ns: int) -> dict[str, dict[str, list[Run]]]:
    """Return machine -> benchmark -> its newest accepted runs, newest first."""
    everything = summarise(index, since_ns)
    if not everything:
        return {}
    columns = choose(args.machines, everything, ACCEPTED)
    benchmarks = {one.benchmark for one in everything if args.benchmark in one.benchmark}
    found: dict[str, dict[str, list[Run]]] = {column.name: {} for column in columns}
    for (place, benchmark), runs in newest(index, columns, benchmarks, since_ns, _RUNS).items():
        found[columns[place].name][benchmark] = runs
    return found
