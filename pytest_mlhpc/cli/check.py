"""``mlhpc check``: is all that tests declare valid on every system, before a night finds out that it is not?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.store.text import count

if TYPE_CHECKING:
    from pytest_mlhpc.session.check_suites import SuiteCheck


@click.command(
    cls=DataCommand,
    help="Check what tests declare against every system of the systems file. Nothing is submitted, and variables of a "
    "site need not be set. Exit code 1 if a test cannot run.",
    example="mlhpc check suites/",
)
@click.argument("paths", nargs=-1, metavar="[PATHS]...")
@options.systems_file
def command(paths: tuple[str, ...], systems_file: str | None) -> CommandReport:
    """Collect the tests once, for all systems together."""
    from pytest_mlhpc.session.check_suites import check

    checked = check(paths, systems_file)
    left_out = options.chosen_systems(systems_file).every_target()[1]
    data = {
        "tests": checked.tests,
        "targets": list(checked.targets),
        "problems": [
            {"where": one.problem.where, "message": one.problem.what, "targets": list(one.targets)}
            for one in checked.findings
        ],
        "nowhere": list(checked.nowhere),
        "unknown_places": list(checked.unknown_places),
        "left_out": dict(left_out),
    }
    text = "".join(f"{line}\n" for line in _lines(checked, left_out))
    return CommandReport(text, data, code=1 if checked.findings else 0)


def _lines(checked: SuiteCheck, left_out: Mapping[str, str]) -> Iterator[str]:
    for finding in checked.findings:
        yield str(finding)
    for test in checked.nowhere:
        yield f"note: {test} runs on none of the systems: no partition gives what it asks for"
    for text in checked.unknown_places:
        yield f"note: {text}"
    if not checked.tests and not checked.findings:
        yield "no test here declares a run; `mlhpc init` writes a first suite"
        return
    for name, reason in left_out.items():
        yield f"note: not checked on {name}: {reason}"
    found = count(len(checked.findings), "problem") if checked.findings else "no problem"
    yield f"{count(checked.tests, 'test')} checked on {count(len(checked.targets), 'target')}: {found}"
