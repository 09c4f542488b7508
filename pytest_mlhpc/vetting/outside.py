"""`mlhpc vet --system NAME --nodes N`: vetting from outside of a job. Nodes are had as for any benchmark, vetted, and given back.

It is a session of pytest with one test, the one of this file, so that queue, ledger, time limits, leases and Ctrl-C are those of
every other run.
"""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_mlhpc.jobs.decorators import nodes
from pytest_mlhpc.node.vet.finding import Exit, VetVerdict

#: Quiet but for what is waited for; of the caller's own project only systems.yaml counts.
OPTIONS = (
    "-qq", "--no-header", "--no-summary", "-o", "console_output_style=classic", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:randomly",
    "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip


@dataclass(frozen=True)
class OutsideVetting:
    """What is wanted: ``target`` is ``system`` or ``system:partition``; ``need`` nodes of ``nodes`` must be fit, 0: all.

    ``unknown`` is fail, warn, or empty: as the partition says. ``require_comparison`` is that of ``node/protocol/plan.py``.
    ``options`` are further ones of pytest's.
    """

    target: str
    nodes: int = 1
    level: Literal["quick", "deep"] = "quick"
    need: int = 0
    unknown: Literal["", "fail", "warn"] = ""
    require_comparison: bool = False
    options: tuple[str, ...] = ()


def test_nodes(vetting: Any) -> None:
    """Have the verdict, at which :class:`Catcher` looks. It has marked this test with what is wanted."""


class Catcher:
    """A plug-in that marks the test with what is *wanted*, and keeps what it was given."""

    def __init__(self, wanted: OutsideVetting) -> None:
        self._wanted = wanted
        self.verdicts: list[VetVerdict] = []

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Mark the module, and so its test."""
        if isinstance(collector, pytest.Module):
            wanted = self._wanted
            mark = nodes(
                wanted.nodes,
                wanted.level,
                unknown=wanted.unknown,
                need=wanted.need,
                require_comparison=wanted.require_comparison,
            )
            collector.add_marker(mark)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show no dot: the verdict says how it went."""
        return ("", "", "") if report.passed else None

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Keep the verdict; a test whose nodes never came has none."""
        given = getattr(item, "funcargs", {}).get("vetting")
        if given is not None:
            self.verdicts.append(given.verdict)


def vet(wanted: OutsideVetting) -> tuple[list[VetVerdict], int]:
    """Return a verdict for each partition of the target, and the exit code: that of the worst.

    Where the target cannot be vetted, pytest has said why.
    """
    catcher = Catcher(wanted)
    argv = [__file__, f"--rootdir={Path.cwd()}", "--system", wanted.target, *OPTIONS, *wanted.options]
    code = int(pytest.main(argv, plugins=[catcher]))
    return catcher.verdicts, exit_of(catcher.verdicts, code)


def exit_of(verdicts: Sequence[VetVerdict], code: int) -> int:
    """Return the exit code of `mlhpc vet` for what pytest ended with."""
    if code == pytest.ExitCode.INTERRUPTED:
        return 128 + signal.SIGINT
    if code == pytest.ExitCode.USAGE_ERROR:
        return Exit.USAGE
    if not verdicts or code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Exit.UNKNOWN  # no nodes came, or none that could be vetted
    return worst(verdict.exit for verdict in verdicts)


def worst(exits: Iterable[Exit]) -> Exit:
    """Return the exit code that matters most: healthy nodes without comparison are better than too few, though 5 is more than 1."""
    return max(exits, key=lambda code: (code is not Exit.NOT_COMPARED, code) if code else (False, 0))


def show(verdicts: Sequence[VetVerdict], out: str, *, as_json: bool = False) -> int:
    """Print verdicts (for programs: all as one), and write the files of the only one; return 0, or exit code 4 where that failed."""
    from pytest_mlhpc.node.vet import output, verdict_files
    from pytest_mlhpc.node.vet.verdict_files import WrittenVerdict

    if as_json and verdicts:
        output.show_json(WrittenVerdict(uuid.uuid4().hex, time.time_ns(), merged(verdicts)), sys.stdout)
    for verdict in () if as_json else verdicts:
        output.show(verdict, sys.stdout)
    if not out or not verdicts:
        return 0
    try:
        folder = verdict_files.prepare(Path(out))
        folder.write(merged(verdicts))
    except verdict_files.FilesError as error:
        sys.stderr.write(f"mlhpc vet: error: {error}\n")
        return Exit.INTERNAL
    return 0


def merged(verdicts: Sequence[VetVerdict]) -> VetVerdict:
    """Return one verdict on the nodes of all partitions, whose names differ."""
    first, *rest = verdicts
    for other in rest:
        first = replace(
            first,
            exit=worst((first.exit, other.exit)),
            need=first.need + other.need,
            nodes=(*first.nodes, *other.nodes),
            good=(*first.good, *other.good),
            exclude=(*first.exclude, *other.exclude),
            links=(*first.links, *other.links),
            seconds=max(first.seconds, other.seconds),
            text="; ".join(filter(None, (first.text, other.text))),
        )
    return first
