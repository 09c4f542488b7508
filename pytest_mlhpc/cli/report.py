"""``mlhpc report``: a page of all systems and nights, Grafana dashboards, OpenMetrics."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command, NounGroup
from pytest_mlhpc.cli.options import chosen, selection_of
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.influx.credentials import store_text
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import page, replace_file
from pytest_mlhpc.store.record import SeriesKey
from pytest_mlhpc.store.text import count, minutes, tell, write

if TYPE_CHECKING:
    from pytest_mlhpc.judge.baseline_files import Entry


@click.group(
    cls=NounGroup,
    help="Reports for others: a page, dashboards, metrics.",
    example="mlhpc report html --output report.html",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    "html",
    cls=Command,
    help="Write one self-contained page of all systems, benchmarks and nights.",
    example="mlhpc report html --output report.html --since 90d",
)
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    help="The file to write; -: standard output. It is replaced whole.",
)
@options.since("365d")
@options.benchmark
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Only this metric; may be given again."
)
@click.option(
    "--link",
    "links",
    multiple=True,
    metavar="NAME=URL",
    help="Where a commit, job or pipeline is shown, such as commit=https://git.example.org/hpc/-/commit/{commit}; may be "
    "given again.  [default: in GitLab CI and GitHub Actions, those of the project]",
)
@click.option("--title", default="Benchmarks", show_default=True, help="What stands above it.")
@options.baselines_dir
@options.system
@options.branch
@options.source
def html(
    *,
    output: str,
    since_ns: int,
    benchmark: str,
    metrics: Sequence[str],
    links: Sequence[str],
    title: str,
    baselines_dir: Path,
    system: str,
    branch: str,
    source: str,
    state_dir: Path,
) -> None:
    """Write the page; where nothing is recorded, write nothing."""
    from pytest_mlhpc.cli.status import read_morning
    from pytest_mlhpc.report.html.page import html_of
    from pytest_mlhpc.report.html.page_data import PageQuery, gather
    from pytest_mlhpc.report.night import MorningQuery

    wanted = PageQuery(
        now_ns=time.time_ns(),
        since_ns=since_ns,
        system=system,
        benchmark=benchmark,
        metrics=frozenset(metrics),
        default_branch=selection_of(system, branch, judged_only=False).default_branch,
        title=title,
        source=source,
        links=link_templates(links, os.environ),
    )
    entries = _entries(baselines_dir, state_dir, system)
    with chosen(source, state_dir) as opened:
        page = gather(opened, wanted, entries, options.site_events(state_dir, opened))
        if page and not (system or benchmark or metrics):
            asked = MorningQuery(wanted.now_ns, store_text(source, state_dir))
            morning = read_morning(opened, state_dir, asked)
            page = replace(page, morning=tuple(morning.page()) if morning else ())
    if page is None:
        tell(f"no record since {minutes(since_ns)} matches, so no page was written; see `mlhpc records list`")
        return
    text = html_of(page)
    if output == "-":
        sys.stdout.write(text)
        return
    replace_file(Path(output), text)
    for note in page.notes:
        tell(note)
    rows = sum(len(bench.rows) for bench in page.benches)
    write(
        f"{output}: {count(len(page.benches), 'benchmark')}, {count(rows, 'row')}, {len(text) / 1e6:.1f} MB; open it in a browser\n"
    )


#: What can be linked to; the report is one page, all else one for each.
_LINKED, REPORT = ("commit", "job", "pipeline"), "report"


def link_templates(
    given: Sequence[str], environ: Mapping[str, str], names: Sequence[str] = _LINKED
) -> dict[str, str]:
    """Return the addresses of *names*: of a commit, job and pipeline with ``{commit}``, ``{job}``, ``{pipeline}`` in them.

    Raises:
        UsageError: one is no such address.
    """
    found: dict[str, str] = {}
    if project := environ.get("CI_PROJECT_URL"):
        found = {
            "commit": f"{project}/-/commit/{{commit}}",
            "pipeline": f"{project}/-/pipelines/{{pipeline}}",
        }
    elif repository := environ.get("GITHUB_REPOSITORY"):
        project = f"{environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        found = {
            "commit": f"{project}/commit/{{commit}}",
            "pipeline": f"{project}/actions/runs/{{pipeline}}",
        }
    for text in given:
        name, _, url = text.partition("=")
        if name not in names:
            *first, last = (f"{one}=URL" for one in names)
            raise UsageError(f"--link {text!r:.200}: write {', '.join(first)} or {last}")
        found[name] = url
    for name, url in found.items():
        holds = "" if name == REPORT else f" that holds {{{name}}}"
        if not url.startswith(("https://", "http://")) or (holds and f"{{{name}}}" not in url):
            raise UsageError(f"--link {name}={url!r:.200}: should be an address{holds}")
    return found


def _entries(directory: Path, state_dir: Path, system: str) -> Mapping[SeriesKey, Entry]:
    """Return the accepted values of *system*, or of all; reviewed ones win."""
    from pytest_mlhpc.judge.baselines import BaselineBook

    book = BaselineBook(directory, state_dir)
    found: dict[SeriesKey, Entry] = {}
    for name in [system] if system else sorted({*book.systems(), *book.provisional_systems()}):
        found |= {**book.provisional_entries(name), **book.entries(name)}
    return found


@command.command(
    "grafana",
    cls=Command,
    help="Write Grafana dashboards for what lies in InfluxDB, as JSON files, and alert rules, as YAML files.",
    example="mlhpc report grafana --output dashboards",
)
@click.option(
    "--output",
    type=Path,
    required=True,
    metavar="DIR",
    help="Folder of the files; made if it is not there. Files of the same names are replaced.",
)
@click.option(
    "--link",
    "links",
    multiple=True,
    metavar="NAME=URL",
    help="Where a commit, job or pipeline is shown, as of `mlhpc report html`, and where that report is: report=URL; may be given "
    "again.",
)
def grafana(output: Path, links: Sequence[str]) -> None:
    """Write them, and say what to do with them."""
    from pytest_mlhpc.report.grafana import all_files

    templates = link_templates(links, os.environ, (*_LINKED, REPORT))
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in all_files(templates).items():
            path = output / name
            # Grafana may be reading the folder (provisioning): it never sees half a file.
            partial = path.with_name(f".{name}.{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
            sys.stdout.write(f"{clean(str(path))}\n")
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror or error}") from error
    sys.stderr.write(f"import them in Grafana, or let it read the folder: {page('grafana')}\n")


@command.command(
    "openmetrics",
    cls=Command,
    help="Write what was measured as OpenMetrics, for GitLab's metrics report or a scraper.",
    example="mlhpc report openmetrics --since 2d --output metrics.txt",
)
@options.pipeline
@click.option("--output", type=Path, metavar="FILE", help="[default: standard output]")
def openmetrics(
    *, system: str, since_ns: int, commit: str, changes: bool, state_dir: Path, output: Path | None
) -> None:
    """Write them."""
    from pytest_mlhpc.ci import comparison

    with contextlib.closing(Index(state_dir, patience_s=0)) as index:
        records = comparison.chosen(index, comparison.Selection(since_ns, system, commit, changes))
    text = comparison.openmetrics(records)
    if output is None:
        sys.stdout.write(text)
    else:
        replace_file(output, text)  # whole or not at all: a scraper may read it at any moment
    if not records:
        tell(f"no record in {state_dir} matches")
