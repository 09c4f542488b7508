"""What commands that report from the records have in common: benchmarks by a part of their name or definition, and nothing recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_mlhpc.cli.commands import CommandReport
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.machines import MachineColumn, VerdictCount


def nothing_recorded(state_dir: Path, data: Mapping[str, Any]) -> CommandReport:
    """Return the report of a folder without records; what it says to run can be run in this folder."""
    command = "pytest suites/ --system local" if Path("suites").is_dir() else "mlhpc init"
    return CommandReport(f"nothing is recorded in {state_dir}; run: {command}\n", data)


def benchmarks_of(
    text: str, columns: Sequence[MachineColumn], everything: Sequence[VerdictCount]
) -> tuple[frozenset[keys.Benchmark], list[VerdictCount]]:
    """Return the benchmarks of these machines whose name or definition holds *text*, and all that was seen of the machines.

    Raises:
        UsageError: none holds it; names the nearest test or workload.
    """
    machines = frozenset().union(*(column.sources | column.also for column in columns))
    seen = [one for one in everything if one.machine in machines]
    known = {one.benchmark for one in seen}
    chosen = frozenset(one for one in known if one.holds(text))
    if known and not chosen:
        parsed = [key for one in sorted(known) if (key := keys.parse(one)) is not None]
        meant = did_you_mean(text, dict.fromkeys(word for key in parsed for word in (key.name, key.workload)))
        raise UsageError(f"no benchmark of these machines holds {text!r}{meant}")
    return chosen, seen
