"""Batches as programs: a plan in a folder, and what came of it on standard output or in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pods import HANG_S

from pytest_mlhpc.node.protocol.lines import Decoder, Message
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import to_json


def write_plan(folder: Path, *runs: RunPlan, allocation: str = "alloc", **changes: object) -> Path:
    """Write the plan of an allocation of one node; *changes* are put into its JSON."""
    path = folder / "plan.json"
    path.write_text(json.dumps({**to_json(Plan(allocation, "", str(folder), 1, 1200.0, runs)), **changes}))
    return path


def start(
    folder: Path,
    *runs: RunPlan,
    lines: str = "",
    more: bool = False,
    allocation: str = "alloc",
    **environ: str,
) -> subprocess.Popen:
    """Start a batch. Without a folder for *lines* it has pipes, and standard input is its lifeline; *more* plans may come by it."""
    path = write_plan(folder, *runs, allocation=allocation)
    options = ["--lines", str(folder / lines)] if lines else ["--more"] if more else []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest_mlhpc.node.batch.main", *options, str(path)],
        stdin=subprocess.DEVNULL if lines else subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=folder, env={**clean, **environ}, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, bytes, str]:
    """Read to the end with the lifeline held; return exit code, output, and errors."""
    with process:
        output, errors = process.stdout.read(), process.stderr.read()
        return process.wait(HANG_S), output, errors.decode()


def messages(output: bytes, *runs: str) -> list[Message]:
    """Return what worker lines say of some runs."""
    return Decoder(dict.fromkeys(runs or ("run-0001",), "nonce")).feed(output)


def kinds(output: bytes, *runs: str) -> list[tuple[str, str]]:
    """Return (run, kind) of all messages."""
    return [(item.run_id, item.kind) for item in messages(output, *runs)]
