"""Run a plan as a node does: the payload's zip on PYTHONPATH of some interpreter, and nothing of this package installed."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc.node.protocol.lines import Decoder, Fault, Message
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, from_json, to_json
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of
from pytest_mlhpc.provision import payload

ROOT = Path(__file__).parents[3]

#: A hang guard, in seconds.
LIMIT_S = 300

#: Bytes of a failed batch's log that a test shows.
SHOWN = 4000


def interpreter(variable: str, venv: str, command: str) -> str:
    """Return the interpreter that *variable* names, or else that of *venv* in the checkout, which *command* makes."""
    python = os.environ.get(variable) or str(ROOT / venv / "bin/python")
    if not Path(python).exists():
        text = f"there is no {python}: run `{command}`, or name an interpreter by {variable}"
        pytest.fail(text, pytrace=False)
    return python


def training(python: str, workload: str, **changes: Any) -> RunPlan:
    """Return a short run of *workload* at its smoke preset; ``parameters`` of *changes* are fields of the workload."""
    chosen = next(one for one in WORKLOADS if one.name == workload)
    fields = parameters_of(chosen, "smoke", **changes.pop("parameters", {}))
    values: dict[str, Any] = {
        "run_id": f"run-{workload}", "nonce": "nonce", "secret": "hidden", "attempt": 0, "workload": workload, "parameters": fields,
        "nodes": 1, "ranks": 1, "cores_per_rank": 1, "device_type": "cpu", "launcher": "plain", "time_limit_s": 240.0,
        "steps": 4, "warmup_steps": 2, "python": python, "variables": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    return RunPlan(**{**values, **changes})


def run_batch(
    python: Sequence[str], folder: Path, *runs: RunPlan, extra_modules: Sequence[str] = ()
) -> list[Message]:
    """Do *runs* by the batch in the zip, in *folder*; return all its messages, none of which is damaged."""
    archive, sha256 = payload.build(folder, tuple(extra_modules))
    plan = Plan("alloc", sha256, str(folder), 1, 600.0, tuple(runs))
    (folder / "plan.json").write_text(json.dumps(to_json(plan)))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))
    }
    with (folder / "batch.log").open("wb") as log:
        batch = subprocess.Popen(
            [*python, "-m", "pytest_mlhpc.node.batch.main", str(folder / "plan.json")],
            env={**environment, "PYTHONPATH": str(archive)}, cwd=folder,
            stdin=subprocess.PIPE,  # its lifeline: open until it has ended
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    with batch:
        try:
            output = batch.stdout.read()
            batch.wait(LIMIT_S)
        finally:
            batch.kill()
    assert batch.returncode == 0, (folder / "batch.log").read_text()[-SHOWN:]
    decoder = Decoder({run.run_id: run.nonce for run in runs})
    messages = [*decoder.feed(output), *decoder.finish()]
    assert not [message for message in messages if isinstance(message, Fault)]
    return [message for message in messages if isinstance(message, Message)]


def bodies(messages: Sequence[Message], run: RunPlan, kind: str) -> list[Any]:
    """Return the bodies of one run's messages of one kind; a failure is shown whole."""
    own = [message for message in messages if message.run_id == run.run_id]
    if kind != "failed":
        failures = [message.body for message in own if message.kind == "failed"]
        assert not failures, f"{failures[0]['outcome']}: {failures[0]['text']}"
    return [message.body for message in own if message.kind == kind]


def measured(python: str, folder: Path, *runs: RunPlan) -> list[Measurement]:
    """Do *runs* by the batch and return their measurements."""
    messages = run_batch([python], folder, *runs)
    found = [body for run in runs for body in bodies(messages, run, "measurement")]
    assert len(found) == len(runs)
    return [from_json(Measurement, body) for body in found]


def failed(python: str, folder: Path, run: RunPlan) -> tuple[str, str]:
    """Do a run by the batch that fails; return the outcome and the text of its failure."""
    (failure,) = bodies(run_batch([python], folder, run), run, "failed")
    return failure["outcome"], failure["text"]
