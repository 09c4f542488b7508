"""``mlhpc check``: is all that tests declare valid on every system, before a night finds out that it is not?"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
import pytest

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.config.build import DERIVED
from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.config.systems_files import known_names
from pytest_mlhpc.errors import Problem, UsageError, did_you_mean, nearest
from pytest_mlhpc.jobs.decorators import declared_of
from pytest_mlhpc.jobs.programs import names_in
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.cores import ON_NODE
from pytest_mlhpc.session.bench import bench_of
from pytest_mlhpc.store.text import count


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
        "unknown_placeholders": list(checked.unknown_placeholders),
        "left_out": dict(left_out),
    }
    text = "".join(f"{line}\n" for line in _lines(checked, left_out))
    return CommandReport(text, data, code=1 if checked.findings else 0)


def _lines(checked: SuiteCheck, left_out: Mapping[str, str]) -> Iterator[str]:
    for finding in checked.findings:
        yield str(finding)
    for test in checked.nowhere:
        yield f"note: {test} runs on none of the systems: no partition gives what it asks for"
    for text in (*checked.unknown_places, *checked.unknown_placeholders):
        yield f"note: {text}"
    if not checked.tests and not checked.findings:
        yield "no test here declares a run; `mlhpc init` writes a first suite"
        return
    for name, reason in left_out.items():
        yield f"note: not checked on {name}: {reason}"
    found = count(len(checked.findings), "problem") if checked.findings else "no problem"
    yield f"{count(checked.tests, 'test')} checked on {count(len(checked.targets), 'target')}: {found}"


@dataclass(frozen=True)
class SuiteProblem:
    """One thing that is wrong, and the targets on which it is; ``targets`` is empty where it is on all."""

    problem: Problem
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line: ``file:line: field: message (on cirrus:gpu)``."""
        return f"{self.problem}" + (f" (on {', '.join(self.targets)})" if self.targets else "")


@dataclass(frozen=True)
class SuiteCheck:
    """What a check came to: how many test functions declare a run, on which targets, and what is wrong with them.

    ``nowhere`` are functions that no target gives what they ask for. ``unknown_places`` are references of a test for a system or
    device that no systems file and none of the known systems has: such a reference judges nothing.
    ``unknown_placeholders`` are words in braces that nothing is put in for, and that are nearly one for which something is.
    """

    tests: int
    targets: tuple[str, ...]
    findings: tuple[SuiteProblem, ...]
    nowhere: tuple[str, ...] = ()
    unknown_places: tuple[str, ...] = ()
    unknown_placeholders: tuple[str, ...] = ()


class _Collector:
    """A plug-in of pytest that takes what the collection came to."""

    def __init__(self) -> None:
        self.targets: tuple[str, ...] = ()
        self.tests: frozenset[str] = frozenset()
        self.faults: dict[str, Sequence[Problem]] = {}
        self.broken: list[Problem] = []
        self.deselected: set[str] = set()
        self.unknown_places: set[str] = set()
        self.unknown_placeholders: set[str] = set()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Take what no target gives, or the user left out."""
        self.deselected.update(_function(item.nodeid) for item in items if declared_of(item) is not None)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take what is declared, and what is wrong with it."""
        if (bench := bench_of(session.config)) is not None:
            self.targets = tuple(target.id for target in bench.targets)
            self.faults = dict(bench.faults)
            places = known_places([target.partition for target in bench.targets])
            for item in session.items:
                declared = declared_of(item)
                given = declared.fields.get("reference") if declared is not None else None
                self.unknown_places.update(
                    f"{_function(item.nodeid)}: {text}" for text in unknown_places(given, places)
                )
            for node_id, spec in bench.specs.items():
                self.unknown_placeholders.update(
                    f"{_function(node_id)}: {text}" for text in unknown_placeholders(spec)
                )
            self.tests = frozenset(_function(node_id) for node_id in (*bench.specs, *bench.faults))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take the last line of why a file cannot be collected."""
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            self.broken.append(
                Problem(report.nodeid, "", lines[-1].removeprefix("E").strip() if lines else "")
            )


def check(paths: Sequence[str], systems_file: str | None) -> SuiteCheck:
    """Collect the tests of *paths*, or those that pytest finds by itself, and check them against every system.

    Raises:
        UsageError: a path does not exist, or the systems file is wrong; the text is pytest's.
    """
    collector, output, errors = _Collector(), io.StringIO(), io.StringIO()
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "mlhpc_check=true"]
    # pytest begins after this package was imported
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if systems_file is not None:
        options += ["-o", f"mlhpc_systems_file={systems_file}"]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = pytest.main([*options, *paths], plugins=[collector])
    if code in {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR}:
        raise UsageError((errors.getvalue() or output.getvalue()).strip().removeprefix("ERROR: "))
    found = findings(collector.faults, collector.targets)
    broken = (SuiteProblem(problem) for problem in collector.broken)
    nowhere = tuple(sorted(collector.deselected - collector.tests))
    unknown = (tuple(sorted(one)) for one in (collector.unknown_places, collector.unknown_placeholders))
    return SuiteCheck(len(collector.tests), collector.targets, (*broken, *found), nowhere, *unknown)


def known_places(partitions: Iterable[Partition]) -> frozenset[str]:
    """Return all that a reference may be for: systems, partitions and device models of the file, and systems that are known."""
    found = set(known_names())
    for partition in partitions:
        found |= {partition.system, partition.id, partition.nodes.device_model}
    return frozenset(found - {""})


def unknown_places(reference: object, places: Collection[str]) -> Iterator[str]:
    """Yield a text for each place of a test's *reference* that is none of *places*, nor part of a device model there."""
    if not isinstance(reference, Mapping):
        return
    nested = all(isinstance(value, Mapping) for value in reference.values())
    for values in reference.values() if nested else [reference]:
        for place in map(str, values):
            part = any(place.lower() in one.lower() for one in places)
            if place.partition(":")[0] not in places and not part:
                meant = did_you_mean(place.partition(":")[0], places)
                yield f"no system or device is called {place!r}{meant}; its reference judges nothing"


def unknown_placeholders(spec: JobSpec) -> Iterator[str]:
    """Yield a text for each word in braces that nothing is put in for, and that is nearly a known one: others are the program's own."""
    known = {*DERIVED, *ON_NODE, *(build.name for build in spec.builds), *spec.needs}
    of_builds = (text for build in spec.builds for text in (*build.argv, *build.variables.values()))
    for name in sorted(names_in((*spec.argv, *spec.env.values(), *of_builds)) - known):
        if near := nearest(name, known):
            yield f"{{{name}}} is handed on as it stands (did you mean {{{near}}}?)"


def findings(faults: Mapping[str, Iterable[Problem]], targets: Sequence[str]) -> tuple[SuiteProblem, ...]:
    """Return each problem of *faults* (node id -> problems) once, with its targets where it is not on all of *targets*."""
    where: dict[Problem, set[str]] = {}
    for node_id, problems in faults.items():
        for problem in problems:
            where.setdefault(problem, set()).update(one for one in targets if _is_on(node_id, one))
    return tuple(
        SuiteProblem(problem, () if len(found) == len(targets) else tuple(sorted(found)))
        for problem, found in sorted(where.items(), key=lambda one: _line(one[0]))
    )


def _line(problem: Problem) -> tuple[str, int]:
    """Return file and line of a problem, for its place among others."""
    file, _, line = problem.where.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (problem.where, 0)


def _is_on(node_id: str, target: str) -> bool:
    """Whether the parameters of a node id, of which the target is the first, begin with *target*."""
    parameters = node_id.partition("[")[2].removesuffix("]")
    return parameters == target or parameters.startswith(f"{target}-")


def _function(node_id: str) -> str:
    return node_id.partition("[")[0]
