"""What tests really ran, for docs/state.md: ``pytest --features FILE`` (``make features``).

Evidence is a run that came to an end with a measurement within a test that passed and has the marker ``servers``: a record in
its folder that is no older than the tests' session (others are made up), which says workload, device and scheduler, or
reports of real ranks that the test put together. What has
no such run, like a model that is lowered for a device that is not there, is told by the marker ``feature(system, workload,
mode)``. Results of tests that did not run this time stay in the file; those of tests that did are replaced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc.node.protocol import combine as combining
from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.store.store import read_records

ROOT = Path(__file__).resolve().parents[1]
#: (system, device, workload, mode)
Feature = tuple[str, str, str, str]

TRAININGS = ("cosmoflow", "deepcam", "resnet50", "language_model")
#: Workloads that look into a training, or compile it for a device that is not there, and the mode that they are of it.
_LOOKING = {
    **dict.fromkeys(("kernels", "gradients", "reading"), "characterised"),
    "lowering": "lowered",
    "compilation": "compiled",
}
_PROPERTY = "feature"
#: Tests bring workloads of their own, which nobody else has.
_OURS = frozenset(workload.name for workload in WORKLOADS)


def mode_of(workload: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Return (workload, mode); one that looks into a training is a mode of that training."""
    if workload in _LOOKING:
        return str(parameters.get("of")), _LOOKING[workload]
    if workload not in TRAININGS:
        return "other", workload
    reported = (
        ("CPU back-end", parameters.get("cerebras") == "cpu"),
        ("to quality", parameters.get("until") == "quality"),
        ("bagging", parameters.get("bagging")),
        ("sharded", parameters.get("parallel")),
        ("timed", True),
    )
    return workload, next(mode for mode, holds in reported if holds)


def system_of(job_id: str) -> str:
    """Return which scheduler gave this id: Slurm's are numbers, a run on this machine has none."""
    if not job_id:
        return "this machine"
    return "Slurm" if job_id.isdigit() else "Kubernetes"


def of_records(folder: Path, since_ns: int) -> set[Feature]:
    """Return what was measured since then, by the records anywhere below *folder*."""
    found: set[Feature] = set()
    for records in folder.glob("**/records"):
        if not records.is_dir():
            continue
        for record in read_records(records.parent):
            measured = record.measurement
            if measured is None or record.failure or not since_ns <= record.created_ns <= time.time_ns():
                continue
            workload = record.definition.partition(" ")[0]
            if workload in _OURS:
                reported = mode_of(workload, record.parameters)
                found.add((system_of(record.job_id), measured.device_type, *reported))
    return found


def is_there(test: str) -> bool:
    """Return whether a node id names a function of a test file that still has it, whatever its parameters."""
    path, _, rest = test.partition("::")
    file, name = ROOT / path, rest.rpartition("::")[2].partition("[")[0]
    return file.is_file() and f"def {name}(" in file.read_text(encoding="utf-8")


class Evidence:
    """The plugin: gathers in each process, writes in the one that has no workers above it."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path, self._writes, self._since_ns = path, writes, time.time_ns()
        self._of_ranks: set[Feature] = set()
        self._ran: set[str] = set()
        self._found: dict[str, set[Feature]] = {}
        self._combine = combining.combine
        combining.combine = self._combined  # before any test module takes it

    def _combined(self, run: Any, reports: Any) -> Measurement:
        measured = self._combine(run, reports)
        if run.workload in _OURS and measured.device_type != "ipu":  # for which poptorch is stood in
            reported = mode_of(run.workload, run.parameters)
            self._of_ranks.add(("this machine", measured.device_type, *reported))
        return measured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        if call.when == "call":
            runs = item.get_closest_marker("servers") is not None
            found = set(self._of_ranks) if runs else set()
            for mark in item.iter_markers("feature"):
                system, workload, mode = mark.args
                found.add((system, system, workload, mode))  # such a system is a kind of device
            for argument in getattr(item, "funcargs", {}).values() if runs else ():
                folder = getattr(argument, "state", argument)  # a suite that several tests read has its own
                if isinstance(folder, Path):
                    found |= of_records(folder, self._since_ns)
            report.user_properties.append((_PROPERTY, sorted(found)))
            self._of_ranks.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        self._ran.add(report.nodeid)
        if report.passed:
            found = dict(report.user_properties).get(_PROPERTY, [])
            self._found[report.nodeid] = {tuple(one) for one in found}

    def pytest_sessionfinish(self) -> None:
        combining.combine = self._combine
        if not self._writes:
            return
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        merged = {test: one for test, one in known.items() if test not in self._ran and is_there(test)}
        merged |= {test: sorted(map(list, one)) for test, one in self._found.items() if one}
        self._path.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")
