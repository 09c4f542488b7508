"""docs/time-to-train.md says what is: its tables name every field, figure and target."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_mlhpc.worker.quality.settings import TARGETS
from pytest_mlhpc.worker.workloads.fields.quality import FIELDS, expected

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/time-to-train.md").read_text(encoding="utf-8")


def named(heading: str) -> set[str]:
    """Return the words in code quotes of the first column of the table under *heading*."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {word for line in table.splitlines()[2:] for word in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_tables_name_every_field_figure_and_target():
    assert named("field") == set(FIELDS) - {"until"}
    assert set(expected({"until": "quality"})) <= named("figure")
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and " or " in line]
    for workload, (_key, better, target) in TARGETS.items():
        side = "less" if better == "lower" else "more"
        assert any(row.startswith(f"| {workload} |") and f"| {target:g} or {side} |" in row for row in rows)
