"""``mlhpc mlperf``: logs of recorded runs, their check by the compliance checker, and the report of times to train."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.mlperf import checking, logs
from pytest_mlhpc.mlperf.entries import DIVISIONS, STATUSES, Submission
from pytest_mlhpc.mlperf.groups import Group, groups
from pytest_mlhpc.mlperf.limits import RULESET, USAGE
from pytest_mlhpc.mlperf.points import MOST_DEVICES
from pytest_mlhpc.mlperf.source import Found, find
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.saying import nothing, tell, write
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "MLPerf HPC: logs of recorded runs, their check, time to train and scaling"

REJECTED: Final = 1
_FORMATS: Final = ("text", "markdown", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``log``, ``check`` and ``report``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="log|check|report")
    log = actions.add_parser("log", help="write a log of each recorded run to a quality target")
    _which(log)
    log.add_argument("--last", type=int, metavar="N", help="only the newest N runs of the benchmark")
    log.add_argument("--org", required=True, metavar="NAME", help="who submits")
    log.add_argument("--platform", metavar="NAME", help="what is submitted (default: system:partition)")
    log.add_argument("--division", required=True, choices=DIVISIONS, help="which the logs are to name")
    log.add_argument("--status", choices=STATUSES, default="research", help="default: research")
    log.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for result_0.txt ...")
    log.add_argument("--replace", action="store_true", help="in place of the results that DIR holds")
    check = actions.add_parser(
        "check", help="check logs with the compliance checker of mlperf-logging; exit 1 if one is rejected"
    )
    check.add_argument("paths", nargs="+", type=Path, metavar="FILE|DIR", help="a log, or a folder of logs")
    check.add_argument("--usage", default=USAGE, dest="checker_usage", help=f"default: {USAGE}")
    check.add_argument("--ruleset", default=RULESET, help=f"default: {RULESET}")
    report = actions.add_parser(
        "report",
        help="time to train: results, breakdown, prediction at other scales, scaling, published results",
    )
    _which(report)
    report.add_argument(
        "--devices",
        type=_counts,
        default=(),
        metavar="N,N",
        help="predict for so many (default: measured ones, and more)",
    )
    report.add_argument("--format", choices=_FORMATS, default="text", help="default: text")


def _which(parser: argparse.ArgumentParser) -> None:
    """Add what chooses records."""
    parser.add_argument("--system", default="", metavar="NAME", help="only runs on this system")
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="TEXT",
        help="only benchmarks whose key holds TEXT (test, workload, k=v); may be given again, then all must hold",
    )
    parser.add_argument("--since", default="365d", metavar="TIME", help="90d, 12h or a date (default: 365d)")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 1 where a log was rejected, 5 where no run was recorded."""
    action = {"log": _log, "check": _check, "report": _report}[args.action]
    return action(args)


def _found(args: argparse.Namespace) -> tuple[Found, str]:
    """Return what is recorded, and a sentence for the case that there is nothing."""
    state_dir = args.state_dir or default_state_dir(os.environ)
    since_ns = since(args.since, time.time_ns())
    found = find(state_dir, since_ns, tell, system=args.system, holds=args.benchmark)
    for one in found.left_out:
        tell(f"left out: {one}")
    wanted = "".join(
        f" {option} {value}"
        for option, value in (("--system", args.system), *(("--benchmark", text) for text in args.benchmark))
        if value
    )
    why = f"no run to a quality target is recorded in {state_dir} since {minutes(since_ns)}"
    return found, f'{why}{f" with{wanted}" if wanted else ""}; a test makes one by until="quality"'


def _log(args: argparse.Namespace) -> int:
    if args.last is not None and args.last < 1:
        raise UsageError(f"--last {args.last}: must be at least 1")
    for option, name in (("--org", args.org), ("--platform", args.platform)):
        if name is not None and (not name.strip() or not name.isprintable()):
            raise UsageError(f"{option} {name!r}: must be a name, of letters that can be printed")
    found, why = _found(args)
    if not found.runs:
        return nothing(why)
    group = _one(groups(found.runs))
    runs = group.runs if args.last is None else group.runs[-args.last :]
    group = Group(runs[0].key, runs)
    submission = Submission(args.org, args.platform or group.machine, args.division, args.status)
    written, without = logs.write(args.output, group, submission, replace=args.replace)
    for one in without:
        tell(f"no log: {one}")
    if not written:
        return nothing(f"none of these {len(runs)} runs told what happened in it, so nothing was written")
    write(logs.text_of(group, written, args.division))
    return 0


def _one(found: Sequence[Group]) -> Group:
    if len(found) > 1:
        names = "".join(f"\n  {one.machine}  {one.key.benchmark}" for one in found)
        raise UsageError(
            "a set of logs is of one benchmark on one machine, and these were recorded; choose by --system and "
            f"--benchmark:{names}"
        )
    return found[0]


def _check(args: argparse.Namespace) -> int:
    rejected = 0
    given = (path for one in args.paths for path in logs.of(one))
    paths = list({path.absolute(): path for path in given}.values())  # each once
    for path in paths:
        checked = checking.check_file(path, usage=args.checker_usage, ruleset=args.ruleset)
        rejected += not checked.accepted
        write(f"{path}: {'accepted' if checked.accepted else 'rejected'}\n")
        write("".join(f"  {one}\n" for one in checked.complaints))
    rules = f"{args.checker_usage} {args.ruleset}"
    write(
        f"{len(paths)} logs by the rules of {rules}: {len(paths) - rejected} accepted, {rejected} rejected\n"
    )
    return REJECTED if rejected else 0


def _report(args: argparse.Namespace) -> int:
    found, why = _found(args)
    if not found.runs:
        return nothing(why)
    from pytest_mlhpc.mlperf import render
    from pytest_mlhpc.mlperf.sheets import sheets

    made = sheets(found, args.devices)
    if args.format == "json":
        about = {"since": args.since, "system": args.system, "benchmark": args.benchmark}
        write(render.json_of(made, {**about, "left_out": list(found.left_out)}))
    else:
        write(render.text_of(made) if args.format == "text" else render.markdown_of(made))
    return 0


def _counts(text: str) -> tuple[int, ...]:
    """Return whole numbers that are parted by commas; for argparse."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = (0,)
    if not 0 < min(found) <= max(found) < MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of devices such as 8,16,32")
    return found
