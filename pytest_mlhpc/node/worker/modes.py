"""PAYLOAD. The modes of running: a window of steps, a probe, training to a quality target, an ensemble of base models."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Callable

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport
from pytest_mlhpc.node.worker import prepare, rank
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group

#: ``measure(run, group, accelerator, directory, progress) -> RankReport``, on every rank.
Measure = Callable[[RunPlan, Group, Accelerator, Path, Callable[[int, int, float], None]], RankReport]


#: Devices that take a training step as one program -> what trains on them.
_WHOLLY = {"ipu": "accelerators.ipu.measure", "wse": "accelerators.wse.measure"}


def measure_of(run: RunPlan) -> Measure:
    """Return what measures *run*: its parameters say in which mode. Only that mode's modules are imported."""
    if run.parameters.get("telemetry"):
        from pytest_mlhpc.node.telemetry.beside import watched

        return watched(_mode_of(run))
    return _mode_of(run)


def _mode_of(run: RunPlan) -> Measure:
    if hasattr(prepare.load_module(run), "probe"):
        return _measure("probes.measure")
    if run.device_type in _WHOLLY:
        return _measure(_WHOLLY[run.device_type])
    if run.parameters.get("bagging"):
        return _measure("bagging.measure")
    if run.parameters.get("until") == "quality":
        return _measure("quality.measure")
    return rank.measure


def _measure(module: str) -> Measure:
    found: Any = importlib.import_module(f"pytest_mlhpc.node.worker.{module}")
    measure: Measure = found.measure
    return measure
