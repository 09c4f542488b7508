"""``mlhpc papers roofline``: each workload against the measured peaks of its device, from what was recorded."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.papers.roofline.gather import RooflineQuery, gather
from pytest_mlhpc.papers.roofline.page import RooflinePage, data_of, text_of
from pytest_mlhpc.store.files import replace_file, suite
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import count, minutes, object_text, tell, write

_HOW = f"run: pytest {suite('characterisation')} --system NAME"


@click.command(
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
def command(
    *, output: str | None, as_json: bool, place: str, since_ns: int, title: str, state_dir: Path
) -> None:
    """Print the table and write the page; where nothing is recorded, write nothing."""
    if as_json and output == "-":
        raise UsageError("--json and --output - both write to standard output: give one of them")
    page = _gathered(place, since_ns, title, state_dir)
    if as_json:
        sys.stdout.write(object_text("papers roofline", data_of(page)))
    elif page is not None and output != "-":
        write(text_of(page))
    if output and page is not None:
        _page(output, page, quiet=as_json)


def _gathered(place: str, since_ns: int, title: str, state_dir: Path) -> RooflinePage | None:
    """Return what is recorded; None, and a sentence, where nothing is."""
    system, _, partition = place.partition(":")
    if not (state_dir / "records").is_dir():  # an index would be made there
        tell(f"nothing is recorded in {state_dir}; {_HOW}")
        return None
    with contextlib.closing(Index(state_dir, tell, patience_s=math.inf)) as index:
        page = gather(index, RooflineQuery(title, time.time_ns(), since_ns, system, partition))
    if page is None:
        where = f" of {place}" if place else ""
        tell(f"no peaks and no kernels{where} are recorded since {minutes(since_ns)}; {_HOW}")
    return page


def _page(name: str, page: RooflinePage, *, quiet: bool) -> None:
    from pytest_mlhpc.papers.roofline.page import html_of

    text = html_of(page)
    if name == "-":
        sys.stdout.write(text)
        return
    replace_file(Path(name), text)
    if not quiet:
        write(f"{name}: {count(len(page.devices), 'device')}; open it in a browser\n")
