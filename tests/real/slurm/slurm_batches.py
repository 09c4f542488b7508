"""Submit a plan as the controller does, by a script of our own, and read what its batch left."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running_suites import LIMIT_S
from services import Slurm

from pytest_mlhpc.node.protocol.lines import Decoder, Fault, Message
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import to_json

ROOT = Path(__file__).parents[3]


def tiny(name: str = "run-1", **changes: Any) -> RunPlan:
    """Return a run of the tiny workload: by default four ranks on two nodes, by srun."""
    variables = {
        "MLHPC_WORKLOAD_MODULE": "tiny_workload",
        "PYTHONPATH": f"{ROOT / 'tests/node/worker'}:{Path(__file__).parent}",
        "OMP_NUM_THREADS": "1",
        # OpenMPI refuses root, whom containers and this cluster have, unless told twice.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **changes.pop("variables", {}),
    }
    fields: dict[str, Any] = {
        "run_id": name, "nonce": "nonce", "secret": "hidden", "attempt": 0, "workload": "tiny", "parameters": {"global_batch": 8}, "nodes": 2,
        "ranks": 4, "cores_per_rank": 1, "device_type": "cpu", "launcher": "srun", "time_limit_s": 900.0, "steps": 4,
        "warmup_steps": 1, "python": sys.executable,
    }  # fmt: skip
    return RunPlan(**{**fields, "variables": variables, **changes})


def broken(name: str, how: str, rank: int = 3, *, ignore_sigterm: bool = False, **changes: Any) -> RunPlan:
    """Return such a run with one rank that goes wrong."""
    parameters = {"global_batch": 8, "how": how, "rank": rank, "ignore_sigterm": ignore_sigterm}
    variables = {"MLHPC_WORKLOAD_MODULE": "broken_workload"}
    return tiny(name, parameters=parameters, variables=variables, **changes)


@dataclass(frozen=True)
class Batch:
    """A submitted plan."""

    slurm: Slurm
    folder: Path
    job: str
    plan: Plan

    def lines(self) -> list[Message]:
        """Return what the batch said so far, none of it damaged."""
        path = self.folder / "lines/alloc.jsonl"
        found = Decoder({run.run_id: run.nonce for run in self.plan.runs}).feed(
            path.read_bytes() if path.exists() else b""
        )
        faults = [one for one in found if isinstance(one, Fault)]
        assert not faults
        return [one for one in found if isinstance(one, Message)]

    def kinds(self, run: str) -> list[str]:
        """Return the kinds of one run's messages without progress."""
        return [one.kind for one in self.lines() if one.run_id == run and one.kind != "progress"]

    def body(self, run: str, kind: str) -> Any:
        """Return the body of a run's only message of one kind."""
        found = [one.body for one in self.lines() if (one.run_id, one.kind) == (run, kind)]
        assert len(found) == 1, (found, self.kinds(run), self.log(run))
        return found[0]

    def failure(self, run: str) -> tuple[str, str]:
        """Return outcome and text of a run's failure."""
        body = self.body(run, "failed")
        return body["outcome"], body["text"]

    def log(self, run: str) -> str:
        """Return what a run's launcher printed, and the batch itself."""
        logs = [self.folder / run / "launcher.log", self.folder / "slurm.out"]
        return "\n".join(path.read_text(errors="replace") for path in logs if path.exists())

    def await_line(self, run: str, kind: str) -> None:
        """Wait until a run has said something of one kind."""
        wait_until(lambda: kind in self.kinds(run), f"{kind} of {run}", self)

    def await_end(self) -> int | None:
        """Wait until the job has ended; return the batch's exit code, if it could tell."""
        wait_until(lambda: not self._live(), "the end of the job", self)
        over = self.folder / "lines/alloc.over"
        return json.loads(over.read_text())["exit"] if over.exists() else None

    def steps(self) -> list[str]:
        """Return the ids of the job's steps that Slurm still has."""
        return self.slurm.run("squeue", "-s", "-h", "-j", self.job, "-o", "%i").stdout.split()

    def _live(self) -> bool:
        said = self.slurm.run("squeue", "-h", "-t", "all", "-j", self.job, "-o", "%T").stdout.split()
        return bool(set(said) & {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"})


def wait_until(condition: Any, what: str, batch: Batch) -> Any:
    """Ask until *condition* holds; return its answer."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what}: {batch.log(batch.plan.runs[0].run_id)}"
        time.sleep(0.1)
    return found


def plan_of(folder: Path, *runs: RunPlan) -> Plan:
    """Return the plan of these runs in a folder."""
    return Plan("alloc", "", str(folder), max(run.nodes for run in runs), 3600.0, runs)


def submit(slurm: Slurm, folder: Path, *runs: RunPlan, options: tuple[str, ...] = ()) -> Batch:
    """Submit a plan of *runs* with two tasks a node."""
    (folder / "lines").mkdir(parents=True, exist_ok=True)
    plan = plan_of(folder, *runs)
    (folder / "plan.json").write_text(json.dumps(to_json(plan)))
    (folder / "job.sh").write_text(
        "#!/bin/bash\n"
        f"export PYTHONPATH={ROOT}:{Path(__file__).parent}\n"
        f"exec {sys.executable} -m pytest_mlhpc.node.batch.main --lines {folder}/lines {folder}/plan.json\n"
    )
    given = options or ("--exclusive",)
    done = slurm.run(
        "sbatch",
        "--parsable",
        "--time=60",
        f"--nodes={plan.nodes}",
        f"--output={folder}/slurm.out",
        *given,
        folder / "job.sh",
    )
    assert done.returncode == 0, done.stderr
    return Batch(slurm, folder, done.stdout.strip(), plan)
