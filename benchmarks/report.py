"""What a benchmark script prints: rows of a table, and the machine that they were measured on."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure: what it is, what it should reach, what was measured, and whether that is enough (None: no bound)."""

    what: str
    reach: str
    measured: str
    ok: bool | None


def machine() -> str:
    """Return one line: date, commit, CPU model, cores, memory, Python, load."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    described = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, commit {described or 'unknown'}, "
        f"{model.group(1) if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{int(memory.group(1)) / 2**20 if memory else 0:.0f} GiB, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


#: The first lines of a table of rows.
HEAD = ("| what | reach | measured | reached |", "|---|---|---|---|")


def line(row: Row) -> str:
    """Return *row* as a line of a Markdown table."""
    words = {True: "yes", False: "**no**", None: "-"}
    return f"| {row.what} | {row.reach} | {row.measured} | {words[row.ok]} |"


def table(rows: list[Row]) -> str:
    """Return *rows* as a Markdown table."""
    return "\n".join([*HEAD, *map(line, rows)])
