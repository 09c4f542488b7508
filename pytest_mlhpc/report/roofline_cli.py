"""``mlhpc roofline``: each workload against the measured peaks of its device, from what was recorded."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from pytest_mlhpc.history.choose import state_dir_of
from pytest_mlhpc.report.roofline.gather import Wanted, gather
from pytest_mlhpc.report.roofline.model import Page
from pytest_mlhpc.report.roofline.text import text_of
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.saying import nothing, tell, write
from pytest_mlhpc.wholefile import replace_file

SUMMARY = "a page of each workload against measured peaks of its device"

_HOW = "run: pytest suites/characterisation --system NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, and what of the records to show."""
    parser.add_argument(
        "--html", metavar="FILE", help="write the page too; - is standard output, and then there is no table"
    )
    parser.add_argument(
        "--system", default="", metavar="SYSTEM[:PARTITION]", help="only this one (default: all)"
    )
    parser.add_argument("--since", default="90d", metavar="TIME", help="30d, 12h or a date (default: 90d)")
    parser.add_argument("--title", default="Roofline", help="what stands above it (default: Roofline)")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Print the table and write the page. Returns 5 where nothing is recorded, and then writes nothing."""
    now_ns = time.time_ns()
    system, _, partition = args.system.partition(":")
    wanted = Wanted(args.title, now_ns, since(args.since, now_ns), system, partition)
    state_dir = state_dir_of(args)
    if not (state_dir / "records").is_dir():  # else an index would be made where perhaps nobody wants one
        return nothing(f"nothing is recorded in {state_dir}; {_HOW}")
    index = Index(state_dir, tell, patience_s=math.inf)
    try:
        page = gather(index, wanted)
    finally:
        index.close()
    if page is None:
        where = f" of {args.system}" if args.system else ""
        return nothing(
            f"no peaks and no kernels{where} are recorded since {minutes(wanted.since_ns)}; {_HOW}"
        )
    if args.html != "-":
        write(text_of(page))
    if args.html:
        _page(args.html, page)
    return 0


def _page(name: str, page: Page) -> None:
    from pytest_mlhpc.report.roofline.page import html_of

    text = html_of(page)
    if name == "-":
        sys.stdout.write(text)
        return
    replace_file(Path(name), text)
    write(f"{name}: {len(page.devices)} devices; open it in a browser\n")
