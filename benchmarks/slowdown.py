"""Slowing one of two workloads by 15 % fails exactly its test, and by 1 % does not; plain and slowed runs in turns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Row
from pytest_mlhpc.node.protocol.plan import SLOW_STEPS, PlantedFault
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.store import DRILL, Drill, json_line

WORKLOAD = "language_model"
TURNS = 3

SUITE = """
from pytest_mlhpc import train

@train("cosmoflow")
def test_cosmoflow(run, baseline):
    assert run >= baseline

@train("language_model")
def test_language_model(run, baseline):
    assert run >= baseline
"""


def _session(folder: Path, slow: str) -> tuple[set[str], str]:
    """Run the suite once; return the tests that failed and all that was printed."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    fault = PlantedFault(SLOW_STEPS, float(slow), WORKLOAD) if slow else None
    (state / DRILL).write_bytes(json_line(to_json(Drill("slowdown", fault))))
    environment = {**os.environ, "MLHPC_STATE": str(state)}
    environment.pop("CI", None)
    argv = [sys.executable, "-m", "pytest", "-ra", "--system", "local:cpu", "--mlhpc-preset", "smoke"]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return set(re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE)), done.stdout


def run() -> list[Row]:
    """Take the first session as baseline, then plain, 15 % and 1 % in turns."""
    wanted = {"": set(), "0.15": {f"test_{WORKLOAD}"}, "0.01": set()}
    right = dict.fromkeys(wanted, 0)
    blamed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_two.py").write_text(SUITE)
        _session(folder, "")
        for _ in range(TURNS):
            for slow, expected in wanted.items():
                failed, printed = _session(folder, slow)
                right[slow] += failed == expected
                blamed += slow == "0.15" and "compute is what grew" in printed
                if failed != expected:
                    print(
                        f"slowed by {slow or 'nothing'}: failed {failed or 'nothing'}\n{printed[-3000:]}",
                        flush=True,
                    )
    texts = {
        "": "plain: all pass",
        "0.15": "15 % slower: its test alone fails",
        "0.01": "1 % slower: all pass",
    }
    rows = [
        Row(texts[slow], f"{TURNS} of {TURNS}", f"{right[slow]} of {TURNS}", right[slow] == TURNS)
        for slow in wanted
    ]
    rows.append(
        Row("... and compute is blamed", f"{TURNS} of {TURNS}", f"{blamed} of {TURNS}", blamed == TURNS)
    )
    return rows
