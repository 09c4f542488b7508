"""``mlhpc papers``: what published papers report, from what was recorded."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import (
    Command,
    CommandReport,
    DataCommand,
    NearestChoice,
    NounGroup,
    nothing_recorded,
)
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.papers import ai500 as papers_ai500
from pytest_mlhpc.papers import sheets as files
from pytest_mlhpc.papers.ai500 import OURS, THEIRS
from pytest_mlhpc.papers.mlperf import logs
from pytest_mlhpc.papers.mlperf import package as packages
from pytest_mlhpc.papers.mlperf.logs import DIVISIONS, STATUSES, Submission
from pytest_mlhpc.papers.mlperf.predict import MOST_DEVICES
from pytest_mlhpc.papers.mlperf.results import RunGroup as Runs
from pytest_mlhpc.papers.mlperf.results import groups
from pytest_mlhpc.papers.mlperf.trained import CLOSED, RULESET, USAGE, FoundRuns, find
from pytest_mlhpc.papers.roofline.page import RooflinePage, data_of, text_of
from pytest_mlhpc.papers.roofline.recorded_runs import RooflineQuery, gather
from pytest_mlhpc.papers.throughput import PARITIES, PUBLISHED, SAME, Tables, tables_of
from pytest_mlhpc.report.compare import newest, summarise
from pytest_mlhpc.report.figures import ACCEPTED, RecordedRun, benchmarks_of, choose
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import page, replace_file, suite
from pytest_mlhpc.store.text import count, iso, minutes, object_text, tell, write


@click.group(
    cls=NounGroup,
    help="Reports as published papers have them, from what was recorded.",
    example="mlhpc papers tables archer2 cirrus --format latex",
)
def command() -> None:
    """Hold the verbs."""


#: Six are the fewest that give an interval of 95 %; of twelve it leaves out the two lowest and the two highest.
_TABLE_RUNS: Final = 12


@command.command(
    "tables",
    cls=DataCommand,
    help="Show compute throughput, compute fraction and effective throughput of several machines, beside published figures.",
    example="mlhpc papers tables archer2 cirrus --format latex",
)
@click.argument("machines", nargs=-1, required=True, metavar="SYSTEM[:PARTITION]...")
@options.benchmark
@options.since("30d")
@options.runs(_TABLE_RUNS)
@click.option(
    "--parity",
    type=NearestChoice([*PARITIES]),
    default=SAME,
    show_default=True,
    help="Same parameters everywhere, or each machine at its best.",
)
@click.option("--no-published", is_flag=True, help="Only figures that were recorded here.")
@click.option(
    "--format",
    "form",
    type=NearestChoice(["text", "csv", "markdown", "latex"]),
    default="text",
    show_default=True,
)
@options.state_dir
def tables(
    *,
    machines: Sequence[str],
    benchmark: str,
    since_ns: int,
    runs: int,
    parity: str,
    no_published: bool,
    form: str,
    state_dir: Path,
) -> CommandReport:
    """Return the tables."""
    about = {"since": iso(since_ns), "runs": runs}
    if not (state_dir / "records").is_dir():  # an index would be made there
        return nothing_recorded(state_dir, {**about, "parity": parity, "tables": {}, "refused": []})
    with contextlib.closing(Index(state_dir, tell, patience_s=math.inf)) as index:
        everything = summarise(index, since_ns)
        if not everything:
            return nothing_recorded(state_dir, {**about, "parity": parity, "tables": {}, "refused": []})
        columns = choose(machines, everything, ACCEPTED)
        chosen, counts = benchmarks_of(benchmark, columns, everything)
        newest_runs = newest(index, columns, chosen, since_ns, runs)
    found = tables_of(
        columns,
        newest_runs,
        [one for one in counts if one.benchmark in chosen],
        parity=parity,
        published=() if no_published else PUBLISHED,
    )
    if not any(section.compares for section in found.sections):
        tell(f"nothing to compare: no benchmark has figures in two systems since {minutes(since_ns)}")
    head = [f"median of the last {runs} accepted runs since {minutes(since_ns)}; {PARITIES[parity]}."]
    if not found.sections:
        head.append(
            "No training with these figures was accepted here in that time; `mlhpc records list` shows what there was."
        )
    return CommandReport(_tables_text(found, head, form), files.data_of(found, about))


def _tables_text(found: Tables, head: Sequence[str], form: str) -> str:
    if form == "text":
        return files.text_of(found, head)
    if form == "csv":
        return files.csv_of(found)
    return (files.latex_of if form == "latex" else files.markdown_of)(found, head)


#: Accepted runs of one benchmark of which the median is taken.
_ENSEMBLE_RUNS = 5


@command.command(
    "ai500",
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
def ensembles(
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
        (name, rule, papers_ai500.ensembles(runs, rule, target, exponent), papers_ai500.scaling(runs))
        for name, runs in recorded.items()
    ]
    found = [report for report in found if report[2]]
    text = "\n".join(papers_ai500.text_of(*report) for report in found)
    if not found:
        where = ", ".join(machines)
        text = (
            f"no accepted run with bagging=(M, P) since {minutes(since_ns)} on {where}; see {page('ai500')}\n"
        )
    return CommandReport(text, {"machines": [papers_ai500.json_of(*report) for report in found]})


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
    for (place, key), runs in newest(index, columns, benchmarks, since_ns, _ENSEMBLE_RUNS).items():
        found[columns[place].name][key] = runs
    return found


_CHARACTERISE = f"run: pytest {suite('characterisation')} --system NAME"


@command.command(
    "roofline",
    cls=Command,
    help="Show each workload below the measured peaks of its device, as a table and as a page.",
    example="mlhpc papers roofline --system cirrus --output roofline.html",
)
@click.option(
    "--output", metavar="FILE", help="Write the page there, too; -: to standard output, without the table."
)
@options.as_json
@click.option("--system", "place", default="", metavar="SYSTEM[:PARTITION]", help="Only this one.")
@options.since("90d")
@click.option("--title", default="Roofline", show_default=True, help="What stands above it.")
@options.state_dir
def roofline(
    *, output: str | None, as_json: bool, place: str, since_ns: int, title: str, state_dir: Path
) -> None:
    """Print the table and write the page; where nothing is recorded, write nothing."""
    if as_json and output == "-":
        raise UsageError("--json and --output - both write to standard output: give one of them")
    page = _roofline(place, since_ns, title, state_dir)
    if as_json:
        sys.stdout.write(object_text("papers roofline", data_of(page)))
    elif page is not None and output != "-":
        write(text_of(page))
    if output and page is not None:
        _write_page(output, page, quiet=as_json)


def _roofline(place: str, since_ns: int, title: str, state_dir: Path) -> RooflinePage | None:
    """Return what is recorded; None, and a sentence, where nothing is."""
    system, _, partition = place.partition(":")
    if not (state_dir / "records").is_dir():  # an index would be made there
        tell(f"nothing is recorded in {state_dir}; {_CHARACTERISE}")
        return None
    with contextlib.closing(Index(state_dir, tell, patience_s=math.inf)) as index:
        page = gather(index, RooflineQuery(title, time.time_ns(), since_ns, system, partition))
    if page is None:
        where = f" of {place}" if place else ""
        tell(f"no peaks and no kernels{where} are recorded since {minutes(since_ns)}; {_CHARACTERISE}")
    return page


def _write_page(name: str, page: RooflinePage, *, quiet: bool) -> None:
    from pytest_mlhpc.papers.roofline.page import html_of

    text = html_of(page)
    if name == "-":
        sys.stdout.write(text)
        return
    replace_file(Path(name), text)
    if not quiet:
        write(f"{name}: {count(len(page.devices), 'device')}; open it in a browser\n")


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


def _who(function: _Function) -> _Function:
    """Add what no run knows."""
    for option in (
        click.option("--status", type=NearestChoice(STATUSES), default="research", show_default=True),
        click.option(
            "--division", required=True, type=NearestChoice(DIVISIONS), help="Which the logs are to name."
        ),
        click.option("--platform", metavar="NAME", help="What is submitted.  [default: system:partition]"),
        click.option("--org", required=True, metavar="NAME", help="Who submits."),
    ):
        function = option(function)
    return function


def _check_names(org: str, platform: str | None) -> None:
    for option, name in (("--org", org), ("--platform", platform)):
        if name is not None and (not name.strip() or not name.isprintable()):
            raise UsageError(f"{option} {name!r}: must be a name, of letters that can be printed")


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


@command.group(
    "mlperf",
    cls=NounGroup,
    help="MLPerf HPC: logs of recorded runs to a quality target, their check, and the report of times to train.",
    example="mlhpc papers mlperf report --system cirrus",
)
def mlperf() -> None:
    """Hold the verbs."""


@mlperf.command(
    cls=Command,
    help="Write a log of each recorded run to a quality target.",
    example="mlhpc papers mlperf log --org EPCC --division closed --system cirrus --benchmark cosmoflow --output results",
)
@_which
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the newest N runs of the benchmark.")
@_who
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
    _check_names(org, platform)
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


@mlperf.command(
    cls=DataCommand,
    help="Write a submission package of recorded runs, and check it; exit code 1 if it is rejected.",
    example="mlhpc papers mlperf package --org EPCC --division closed --system cirrus --description cirrus.yaml --output EPCC",
)
@_which
@_who
@click.option(
    "--description",
    type=Path,
    metavar="FILE",
    help="Fields of the system that no record knows, as YAML or JSON.",
)
@click.option(
    "--output", required=True, type=Path, metavar="DIR", help="The package: a folder that is not there yet."
)
def package(
    *,
    system: str,
    benchmarks: Sequence[str],
    since_ns: int,
    state_dir: Path,
    org: str,
    platform: str | None,
    division: str,
    status: str,
    description: Path | None,
    output: Path,
) -> CommandReport:
    """Write and check it; where nothing is recorded, write nothing."""
    _check_names(org, platform)
    described = packages.read_description(description)
    found, why = _found(state_dir, since_ns, system, benchmarks)
    some = groups(run for run in found.runs if run.workload in CLOSED)
    if not some:
        return CommandReport(f"{why}\n", {"packages": []})
    submission = Submission(org, platform or some[0].machine, division, status)
    runs = packages.packaged(some, submission)
    packages.write_package(output, packages.files_of(runs, submission, described))
    checked = _checked([output], USAGE, RULESET)
    text = "".join(logs.text_of(one.group, one.logs(output), division) for one in runs)
    return CommandReport(f"{text}{checked.text}", {"packages": checked.data["packages"]}, checked.code)


@mlperf.command(
    cls=DataCommand,
    help="Check logs, or submission packages, with the checkers of mlperf-logging; exit code 1 if one is rejected.",
    example="mlhpc papers mlperf check results",
)
@click.argument("paths", nargs=-1, required=True, type=Path, metavar="FILE|DIR...")
@click.option("--usage", default=USAGE, show_default=True, help="Of the checker.")
@click.option("--ruleset", default=RULESET, show_default=True, help="Of the checker.")
def check(paths: Sequence[Path], usage: str, ruleset: str) -> CommandReport:
    """Check each log, or package, once."""
    return _checked(paths, usage, ruleset)


def _checked(paths: Sequence[Path], usage: str, ruleset: str) -> CommandReport:
    whole = {path.absolute(): path for path in paths if packages.is_package(path)}
    others = [one for one in paths if one.absolute() not in whole]
    files = {path.absolute(): path for one in others for path in logs.of(one)}
    rules = f"{usage} {ruleset}"
    lines: list[str] = []
    data: dict[str, Any] = {}
    rejected = 0
    for noun, some, checker in (
        ("package", whole, packages.check_package),
        ("log", files, logs.check_file),
    ):
        found = [checker(path, usage=usage, ruleset=ruleset) for path in some.values()]
        for one in found:
            lines.append(f"{one.path}: {'accepted' if one.accepted else 'rejected'}")
            lines += [f"  {text}" for text in one.complaints]
        accepted = sum(one.accepted for one in found)
        rejected += len(found) - accepted
        if found:
            lines.append(
                f"{count(len(found), noun)} by the rules of {rules}: {accepted} accepted, {len(found) - accepted} rejected"
            )
        data[f"{noun}s"] = [
            {"path": str(one.path), "accepted": one.accepted, "complaints": list(one.complaints)}
            for one in found
        ]
    return CommandReport("".join(f"{line}\n" for line in lines), data, REJECTED if rejected else 0)


@mlperf.command(
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
@click.option(
    "--format", "form", type=NearestChoice(["text", "markdown", "html"]), default="text", show_default=True
)
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
    from pytest_mlhpc.papers.mlperf import sheets

    found, why = _found(state_dir, since_ns, system, benchmarks)
    about = {
        "since": iso(since_ns),
        "system": system,
        "benchmark": list(benchmarks),
        "left_out": list(found.left_out),
    }
    made = sheets.make_sheets(found, devices)
    if not made:
        return CommandReport(f"{why}\n", {**about, "sheets": {}})
    if not found.runs:
        tell(why)
    if form == "html":
        text = sheets.page_of(made, found, devices)
    else:
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
