"""What real ranks of a probe, processes with gloo on loopback, are to do, and what they reported together."""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rank_helpers import HERE, ROOT, Batch, prepare_rank, run_plan
from rank_server import RankServer

from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

if TYPE_CHECKING:
    from pytest_mlhpc.node.worker.base import Task
    from pytest_mlhpc.node.worker.probes.measure import ProbePlace

NAMED = {workload.name: workload for workload in WORKLOADS}


def smoke(name: str, **changes: Any) -> dict[str, Any]:
    """Return the parameters of a workload's preset smoke, with these changes."""
    return parameters_of(NAMED[name], "smoke", **changes)


def task_of(name: str, preset: str = "smoke", **changes: Any) -> Task:
    """Return the task of a workload at a preset, with these changes of its parameters."""
    return importlib.import_module(NAMED[name].module).task(parameters_of(NAMED[name], preset, **changes))


def contradictions(name: str, **changes: Any) -> dict[str, str]:
    """Return what does not go together in a test of a workload, by field."""
    return dict(NAMED[name].contradictions({**smoke(name), "devices": 1, "nodes": 1, **changes}))


def alone(measure: Any, run: RunPlan, folder: Path, progress: Any = lambda *_: None) -> Any:
    """Do a run as its only rank, on the cores of this process; return its report."""
    from pytest_mlhpc.node.worker.base import open_device
    from pytest_mlhpc.node.worker.distributed import Group

    return measure(run, Group(), open_device(run.device_type, 0), folder, progress)


def plan(workload: str, *, parameters: dict[str, Any] | None = None, **changes: Any) -> RunPlan:
    """Return a run of a few short repetitions; *parameters* differ from the preset smoke."""
    values: dict[str, Any] = {
        "workload": workload,
        "parameters": smoke(workload, **(parameters or {})),
        "steps": 3,
        "warmup_steps": 1,
        "variables": {},
        "data_source": "none",
        "data_kind": "none",
        "cache": "cold" if workload == "storage" else "unknown",
    }
    return run_plan(**{**values, **changes})


def place_of(
    workload: str, folder: Path, group: tuple[int, int, int] = (0, 0, 1), **parameters: Any
) -> ProbePlace:
    """Return where a probe runs in this process: rank, local rank and number of ranks are those of *group*."""
    from pytest_mlhpc.node.worker.base import open_device
    from pytest_mlhpc.node.worker.distributed import Group
    from pytest_mlhpc.node.worker.probes.measure import ProbePlace

    return ProbePlace(plan(workload, parameters=parameters), Group(*group), open_device("cpu", 0), folder)


@dataclass
class Ranks:
    """What the ranks of one run sent, and how they ended: exit code and output of each."""

    run: RunPlan
    batch: Batch
    ended: list[tuple[int, str]]

    @property
    def measurement(self) -> Measurement:
        assert [code for code, _ in self.ended] == [0] * self.run.ranks, [text for _, text in self.ended]
        found = combine(self.run, self.batch.reports())
        workload = NAMED.get(self.run.workload)  # None for one that a test makes up
        known = workload and workload.may_report({**self.run.parameters, "devices": self.run.ranks})
        assert [metric.name for metric in found.metrics if known and metric.name not in known] == []
        return found

    @property
    def failures(self) -> list[str]:
        """What ranks failed of, those first that know why: a peer that lost them fails too."""
        assert not self.batch.of("report")
        failed = sorted(self.batch.of("failed"), key=lambda body: body["outcome"] == "worker_exit")
        return [f"{body['outcome']}: {body['text']}" for body in failed]


def run_ranks(server: RankServer, folder: Path, run: RunPlan, **variables: str) -> Ranks:
    """Do *run* with all its ranks in *folder*, and wait for their end."""
    channel, meeting = folder / "channel", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(nodes.free_port())}
    channel.unlink(missing_ok=True)  # of another run in this folder
    with Batch(str(channel)) as batch, contextlib.ExitStack() as started:
        ranks = []
        for rank in map(str, range(run.ranks)):
            launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(run.ranks), **meeting}
            environment = prepare_rank(batch, run, folder, **{**launched, **variables})
            ranks.append(started.enter_context(server.start(environment, folder)))
        return Ranks(run, batch, [rank.finish() for rank in ranks])


def sabotaged(folder: Path, code: str) -> dict[str, str]:
    """Return variables by which ranks run *code* before anything else."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, folder)))}
