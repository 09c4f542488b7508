"""What a short run costs beyond its own steps: ranks that a warm process forks against those that import torch themselves.

Both go the way of every run on `local`, in turns, so that whatever else the machine does meets both. A run is submitted when the
one before has ended. Its own steps are the warm-up and the timed window; what is left is processes, imports, calibration, making
model and data, and the way of the result. Beside other work its processor time says more than the clock. The same runs, on one thread, tell whether their figures agree: by the processor time of a step,
which other programs disturb least, and by the largest memory.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Row
from pytest_mlhpc.jobs.provisioner import AllocationEnded, LineArrived
from pytest_mlhpc.node.processes import descendants, stat_fields
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, from_json
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of
from pytest_mlhpc.provision import payload
from pytest_mlhpc.provision.local import LocalProvisioner

ROOT = Path(__file__).parents[1]

#: Pairs of runs of each workload, and the steps of a run: enough for a fastest tenth.
PAIRS = int(os.environ.get("MLHPC_BENCHMARK_PAIRS", "8"))
NAMES = ("cosmoflow", "deepcam", "language_model", "resnet50")
#: What is trained, and by how many ranks: several are started by torchrun where they are not forked.
TRAININGS = (*((name, 1) for name in NAMES), ("cosmoflow", 2))
STEPS, WARM_UP = 20, 2

#: How far the figures of the two may be apart: beyond that a workload's ranks are not forked.
EQUAL = 0.01


@dataclass
class Side:
    """What the runs of one side took beyond their steps by the clock and of processors (s), processor time of a step (s), largest memory (B)."""

    beyond: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def run() -> list[Row]:
    """Return what a run costs on either side, whether figures agree, and what `make bench` takes."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {one: _turns(Path(folder), *one) for one in TRAININGS}
    rows = []
    for (name, ranks), (warm, fresh) in sides.items():
        there, here = statistics.median(warm.beyond), statistics.median(fresh.beyond)
        what = f"{name}, smoke, {ranks} rank{'s' * (ranks > 1)}: a run beyond its own steps, fresh"
        rows.append(Row(what, "-", f"{here:.2f} s", None))
        rows.append(Row("... forked", "<= 0.5 s", f"{there:.2f} s", there <= 0.5))
        rows.append(Row("... ratio", "-", f"{there / here:.2f}", None))
        there, here = statistics.median(warm.computing), statistics.median(fresh.computing)
        rows.append(Row("... processor time of it, fresh; forked", "-", f"{here:.2f} s; {there:.2f} s", None))
        for what, one, other in (
            ("processor time of a step", warm.step, fresh.step),
            ("largest memory", warm.memory, fresh.memory),
        ):
            apart = statistics.median(one) / statistics.median(other) - 1.0
            rows.append(
                Row(f"... {what}, forked against fresh", "+-1 %", f"{apart:+.2%}", abs(apart) <= EQUAL)
            )
    return [*rows, _bench()]


def _turns(folder: Path, name: str, ranks: int) -> tuple[Side, Side]:
    """Run a workload *PAIRS* times on either side, and once before that nobody counts; return (forked, fresh)."""
    sides = (Side(), Side())
    state = folder / f"state-{name}-{ranks}"
    built = payload.build(state)
    local = LocalProvisioner(state_dir=state, session_id=uuid.uuid4().hex)
    try:
        _once(local, _plan(state, built.sha256, name, ranks, warm=True), Side())
        for turn, warm in itertools.product(range(PAIRS), (True, False)):
            is_warm = warm is (turn % 2 == 0)  # each side is as often the first of a pair
            plan = _plan(state, built.sha256, name, ranks, warm=is_warm)
            _once(local, plan, sides[0 if is_warm else 1])
    finally:
        local.close()
    return sides


def _once(local: LocalProvisioner, plan: Plan, side: Side) -> None:
    (run,) = plan.runs
    computed, began = _processor_s(), time.perf_counter()
    handle = local.submit(plan)
    measured, ended = None, False
    while not ended:
        for event in local.events([handle], 60.0):
            if isinstance(event, LineArrived) and event.message.kind == "measurement":
                measured = from_json(Measurement, event.message.body)
            if isinstance(event, LineArrived) and event.message.kind == "failed":
                raise RuntimeError(json.dumps(dict(event.message.body)))
            ended = ended or isinstance(event, AllocationEnded)
    if measured is None:
        raise RuntimeError(f"{run.workload} measured nothing")
    values = {one.name: one.value for one in measured.metrics}
    own = values["epoch_time"] + values["warmup_time"]
    if measured.environment["interpreter"] != ("warm" if run.warm else "fresh"):
        raise RuntimeError(f"the rank of {run.workload} was {measured.environment['interpreter']}")
    side.beyond.append(time.perf_counter() - began - own)
    step_s = measured.contention["own_cores"] * values["epoch_time"] / measured.steps
    side.computing.append(_processor_s() - computed - step_s * (STEPS + WARM_UP))
    side.step.append(step_s)
    side.memory.append(values["peak_memory"])


def _processor_s() -> float:
    """Return the processor time of this process and all that it has started, those that have ended among them (proc(5), stat)."""
    here = (os.getpid(), *descendants(os.getpid()))
    jiffies = [int(one) for pid in here for one in stat_fields(pid)[11:15]]
    return sum(jiffies) / os.sysconf("SC_CLK_TCK")


def _plan(state: Path, sha256: str, name: str, ranks: int, *, warm: bool) -> Plan:
    workload = next(one for one in WORKLOADS if one.name == name)
    run = RunPlan(
        run_id=uuid.uuid4().hex,
        nonce=secrets.token_hex(8),
        secret=secrets.token_hex(16),
        attempt=0,
        workload=name,
        parameters=parameters_of(workload, "smoke"),
        nodes=1,
        ranks=ranks,
        cores_per_rank=1,
        device_type="cpu",
        launcher="plain" if ranks == 1 else "torchrun",
        time_limit_s=600.0,
        steps=STEPS,
        warmup_steps=WARM_UP,
        python=sys.executable,
        calibrate=True,
        warm=warm,
    )
    allocation = uuid.uuid4().hex
    return Plan(allocation, sha256, str(state / "runs" / allocation), 1, 1200.0, (run,))


def _bench() -> Row:
    """Return the time of `make bench` once everything is installed."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "pytest", "suites/", "--system", "local", "-q", "-p", "no:cacheprovider"],
            cwd=ROOT,
            env={**os.environ, "MLHPC_STATE": f"{folder}/state"},
            check=True,
            capture_output=True,
        )
        took = time.monotonic() - began
    return Row("`make bench`, installed", "<= 40 s", f"{took:.0f} s", took <= 40.0)
