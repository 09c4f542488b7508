"""``mlhpc papers mlperf``: logs of recorded runs, their check by the compliance checker, and times to train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command, CommandReport, DataCommand, NearestChoice, NounGroup
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.papers.mlperf import logs
from pytest_mlhpc.papers.mlperf.logs import DIVISIONS, STATUSES, Submission
from pytest_mlhpc.papers.mlperf.predict import MOST_DEVICES
from pytest_mlhpc.papers.mlperf.results import RunGroup as Runs
from pytest_mlhpc.papers.mlperf.results import groups
from pytest_mlhpc.papers.mlperf.trained import RULESET, USAGE, FoundRuns, find
from pytest_mlhpc.store.text import iso, minutes, tell, write

_Function = TypeVar("_Function", bound=Callable[..., Any])

REJECTED: Final = 1


def _which(function: _Function) -> _Function:
    """Add what chooses records."""
    benchmark = click.option(
        "--benchmark",
        "benchmarks",
        multiple=True,
        metavar="TEXT",
        help="Only benchmarks whose key holds TEXT (test, workload, k=v); may be given again, then all must hold.",
    )
    return options.system(benchmark(options.since("365d")(options.state_dir(function))))


class _Counts(click.ParamType[tuple[int, ...]]):
    """Whole numbers that are parted by commas."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return them, each once, the least first."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(sorted({int(part) for part in value.split(",")}))
        except ValueError:
            found = (0,)
        if not 0 < min(found) <= max(found) < MOST_DEVICES:
            self.fail(f"{value!r} is no list of numbers of devices such as 8,16,32", param, ctx)
        return found


@click.group(
    cls=NounGroup,
    help="MLPerf HPC: logs of recorded runs to a quality target, their check, and the report of times to train.",
    example="mlhpc papers mlperf report --system cirrus",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    cls=Command,
    help="Write a log of each recorded run to a quality target.",
    example="mlhpc papers mlperf log --org EPCC --division closed --system cirrus --benchmark cosmoflow --output results",
)
@_which
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the newest N runs of the benchmark.")
@click.option("--org", required=True, metavar="NAME", help="Who submits.")
@click.option("--platform", metavar="NAME", help="What is submitted.  [default: system:partition]")
@click.option("--division", required=True, type=NearestChoice(DIVISIONS), help="Which the logs are to name.")
@click.option("--status", type=NearestChoice(STATUSES), default="research", show_default=True)
@click.option("--output", required=True, type=Path, metavar="DIR", help="Folder for result_0.txt ...")
@click.option("--replace", is_flag=True, help="In place of the results that DIR holds.")
def log(
    *,
    system: str,
    benchmarks: Sequence[str],
    since_ns: int,
    state_dir: Path,
    last: int | None,
    org: str,
    platform: str | None,
    division: str,
    status: str,
    output: Path,
    replace: bool,
) -> None:
    """Write them; where nothing is recorded, write nothing."""
    for option, name in (("--org", org), ("--platform", platform)):
        if name is not None and (not name.strip() or not name.isprintable()):
            raise UsageError(f"{option} {name!r}: must be a name, of letters that can be printed")
    found, why = _found(state_dir, since_ns, system, benchmarks)
    if not found.runs:
        tell(why)
        return
    group = _one(groups(found.runs))
    runs = group.runs if last is None else group.runs[-last:]
    group = Runs(runs)
    submission = Submission(org, platform or group.machine, division, status)
    written, without = logs.write(output, group, submission, replace=replace)
    for one in without:
        tell(f"no log: {one}")
    if written:
        write(logs.text_of(group, written, division))
    else:
        tell(f"none of these {len(runs)} runs recorded its events, so nothing was written")


@command.command(
    cls=DataCommand,
    help="Check logs with the compliance checker of mlperf-logging; exit code 1 if one is rejected.",
    example="mlhpc papers mlperf check results",
)
@click.argument("paths", nargs=-1, required=True, type=Path, metavar="FILE|DIR...")
@click.option("--usage", default=USAGE, show_default=True, help="Of the checker.")
@click.option("--ruleset", default=RULESET, show_default=True, help="Of the checker.")
def check(paths: Sequence[Path], usage: str, ruleset: str) -> CommandReport:
    """Check each log once."""
    files = list({path.absolute(): path for one in paths for path in logs.of(one)}.values())
    found = [(path, logs.check_file(path, usage=usage, ruleset=ruleset)) for path in files]
    lines = []
    for path, checked in found:
        lines.append(f"{path}: {'accepted' if checked.accepted else 'rejected'}")
        lines += [f"  {one}" for one in checked.complaints]
    accepted = sum(checked.accepted for _path, checked in found)
    rejected = len(found) - accepted
    rules = f"{usage} {ruleset}"
    lines.append(f"{len(found)} logs by the rules of {rules}: {accepted} accepted, {rejected} rejected")
    data = [
        {"path": str(path), "accepted": checked.accepted, "complaints": list(checked.complaints)}
        for path, checked in found
    ]
    return CommandReport("".join(f"{line}\n" for line in lines), {"logs": data}, REJECTED if rejected else 0)


@command.command(
    cls=DataCommand,
    help="Show times to train: results, breakdown, prediction at other scales, scaling, published results.",
    example="mlhpc papers mlperf report --system cirrus --devices 8,16,32",
)
@_which
@click.option(
    "--devices",
    type=_Counts(),
    default=(),
    metavar="N,N",
    help="Predict for so many.  [default: measured ones, and more]",
)
@click.option("--format", "form", type=NearestChoice(["text", "markdown"]), default="text", show_default=True)
def report(
    *,
    system: str,
    benchmarks: Sequence[str],
    since_ns: int,
    state_dir: Path,
    devices: tuple[int, ...],
    form: str,
) -> CommandReport:
    """Return the sheets."""
    found, why = _found(state_dir, since_ns, system, benchmarks)
    about = {
        "since": iso(since_ns),
        "system": system,
        "benchmark": list(benchmarks),
        "left_out": list(found.left_out),
    }
    if not found.runs:
        return CommandReport(f"{why}\n", {**about, "sheets": {}})
    from pytest_mlhpc.papers.mlperf import sheets
    from pytest_mlhpc.papers.mlperf.sheets import make_sheets

    made = make_sheets(found, devices)
    text = sheets.text_of(made) if form == "text" else sheets.markdown_of(made)
    return CommandReport(text, sheets.data_of(made, about))


def _found(state_dir: Path, since_ns: int, system: str, benchmarks: Sequence[str]) -> tuple[FoundRuns, str]:
    """Return what is recorded, and a sentence for the case that there is nothing."""
    found = find(state_dir, since_ns, tell, system=system, holds=benchmarks)
    for one in found.left_out:
        tell(f"left out: {one}")
    wanted = "".join(
        f" {option} {value}"
        for option, value in (("--system", system), *(("--benchmark", text) for text in benchmarks))
        if value
    )
    why = f"no run to a quality target is recorded in {state_dir} since {minutes(since_ns)}"
    return found, f'{why}{f" with{wanted}" if wanted else ""}; a test makes one by until="quality"'


def _one(found: Sequence[Runs]) -> Runs:
    if len(found) > 1:
        names = "".join(
            f"\n  {one.machine}  {one.benchmark.name}: {one.benchmark.definition}" for one in found
        )
        raise UsageError(
            "a set of logs is of one benchmark on one machine, and these were recorded; choose by --system and "
            f"--benchmark:{names}"
        )
    return found[0]
