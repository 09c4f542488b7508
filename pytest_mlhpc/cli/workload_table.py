"""The table of ``mlhpc data workloads``: workloads, presets, variants, and what one sample of each costs.

Counting needs torch, which the controller never imports: :mod:`pytest_mlhpc.node.worker.workloads.describe` does it in a process of its
own, with the interpreter that ``--python`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_mlhpc.node.files import read_json

#: Importing torch from a cold network file system takes a minute; counting takes seconds.
TIME_LIMIT_S = 300.0

_COLUMNS = ("workload", "preset", "variant", "input", "parameters", "forward", "training")


def described(python: str, asked: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows with their sizes, or as they were, and why they could not be counted."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    try:
        ended = subprocess.run(
            [python, "-m", "pytest_mlhpc.node.worker.workloads.describe", "-"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        return asked, f"sizes unknown: cannot start {python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return asked, f"sizes unknown: {python} did not answer within {TIME_LIMIT_S:.0f} s"
    if ended.returncode == 0:
        try:
            return read_json(ended.stdout), ""
        except ValueError:
            return asked, f"sizes unknown: {python} printed something that is no JSON: {ended.stdout[:200]!r}"
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    if "No module named 'torch'" in last:
        return asked, (
            f"sizes unknown: {python} has no torch. Install pytest-mlhpc[torch], or name an interpreter that has it "
            "with --python"
        )
    return asked, f"sizes unknown: {python} ended with code {ended.returncode}: {last}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as aligned text; a size that is not known is ``-``."""
    lines = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    text = [
        "  ".join(
            cell.rjust(width) if column > 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*text, "", "forward, training: operations of one sample; a multiply-add is two"])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["workload"], row["preset"], row["variant"] or "-")
    if "model_parameters" not in row:
        return (*names, "-", "-", "-", "-")
    shape = "x".join(map(str, row["input_shape"])) + f" {row['input_type']}"
    return (
        *names,
        shape,
        f"{row['model_parameters']:,}",
        _flop(row["forward_flop"]),
        _flop(row["train_flop"]),
    )


def _flop(operations: float) -> str:
    for factor, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if operations >= factor:
            return f"{operations / factor:,.3f} {unit}"
    return f"{operations / 1e6:,.3f} MFLOP"
