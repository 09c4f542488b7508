"""Runs whose rank writes down what it finds in its process, and then does what it is told (``node/batch/nosy_workload.py``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pods import run_plan

from pytest_mlhpc.node.processes import stat_fields
from pytest_mlhpc.node.protocol.plan import RunPlan

FOLDER = str(Path(__file__).parent / "node/batch")


def is_alive(pid: str | int) -> bool:
    """Return whether a process has not ended."""
    return stat_fields(int(pid))[:1] not in ([], ["Z"], ["X"])


def nosy(name: str, acts: tuple[str, ...] = (), *, may: bool = True, **variables: str) -> RunPlan:
    """Return a run whose rank looks about itself and then does *acts*; it *may* be forked."""
    return run_plan(
        name, workload="nosy", launcher="plain", ranks=1, data_source="none", steps=1, secret="s" * 32,
        parameters={"acts": list(acts)}, warm=may,
        variables={"MLHPC_WORKLOAD_MODULE": "nosy_workload", "PYTHONPATH": FOLDER, **variables},
    )  # fmt: skip


def pair(name: str, acts: tuple[str, ...] = (), *, may: bool = True) -> RunPlan:
    """Return such a run of two ranks."""
    return replace(nosy(name, acts, may=may), launcher="torchrun", ranks=2)
