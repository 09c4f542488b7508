"""A training lowered for Cerebras' wafer, without one: how long that takes, and how many operations come of it.

A process has one back-end, and a compiler may end it: each repetition is ``python -m pytest_mlhpc.node.worker.probes.lowering``.
Standard input is one JSON object: ``run`` (the inner training's plan), ``folder`` and ``precision``. The last line of standard
output is another: ``seconds`` and ``operations``, or ``reason``. Lowering ends at CIRH, Cerebras' first dialect: that kernels
match and that it fits a wafer is shown by a cluster alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn, Tuple

import torch

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import die_with_parent, run_to_end
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, TimedOperation, from_json, to_json
from pytest_mlhpc.node.worker import environment, prepare
from pytest_mlhpc.node.worker.accelerators.wse import load, open_backend, reason, step_of, stream
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.workloads.characters import inner_batch, inner_parameters

#: An operation of the dialect in MLIR's text form: ``%1 = "cirh.Conv"(...)`` or ``cirh.Conv ...``.
_OPERATION = re.compile(r'^\s*(?:%[\w:#, %]+= )?"?cirh\.\w+', re.MULTILINE)


def lower(run_json: str, folder: Path, precision: str) -> Dict[str, Any]:
    """Trace and lower a step of the run, and return how long that took and how many operations came of it.

    Raises:
        WorkerFailure: ``cannot_lower``, the compiler ended without a result.
    """
    run = from_json(RunPlan, json.loads(run_json), "the run")
    cstorch = load()
    torch.manual_seed(0)
    task = prepare.load_task(run)
    started = time.perf_counter()
    backend = open_backend(cstorch, "CSX", folder, precision, validate_only=True)
    step = step_of(cstorch, backend, task, task.model().train(), precision)
    loader = cstorch.utils.data.DataLoader(stream, run_json, str(folder))
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=1)
    for batch_inputs, batch_targets in executor:
        step(batch_inputs, batch_targets)
    seconds = time.perf_counter() - started
    found = sorted(folder.glob("executors/0*/cirh.mlir"))
    operations = len(_OPERATION.findall(found[-1].read_text(errors="replace"))) if found else 0
    if not operations:
        said = "; ".join(errors(folder)) or f"the compiler left no graph below {folder}, and no reason"
        raise WorkerFailure("cannot_lower", f"cerebras.pytorch cannot lower {run.workload}: {said}")
    return {"seconds": seconds, "operations": operations}


def errors(folder: Path) -> List[str]:
    """Return what the compiler calls an error in its diagnostics below *folder*, each once.

    With ``validate_only`` it raises nothing: it leaves an empty graph and a file ``traceback_*.json`` beside it (2.10).
    """
    paths = sorted(folder.glob("executors/0*/traceback_*.json"))
    return list(dict.fromkeys(text for path in paths for text in _errors_in(_read(path))))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):  # cut off: the process was ended while it wrote
        return None


def _errors_in(part: Any) -> List[str]:
    if isinstance(part, list):
        return [text for one in part for text in _errors_in(one)]
    if not isinstance(part, dict):
        return []
    about = part.get("compileMetadata")
    severe = isinstance(about, dict) and about.get("severityLevel") == "Error"
    own = [" ".join(str(part["message"]).split())[:300]] if severe and part.get("message") else []
    return own + [text for one in part.values() for text in _errors_in(one)]


def main() -> NoReturn:
    """Do what standard input says, and tell what came of it."""
    die_with_parent(os.getppid())
    asked = json.loads(sys.stdin.read())
    try:
        reply = lower(asked["run"], Path(asked["folder"]), asked["precision"])
    except WorkerFailure as failure:
        reply = {"outcome": failure.outcome, "reason": failure.text}
    # Whatever the compiler raises is a reason.
    except Exception as error:  # noqa: BLE001
        reply = {"outcome": "cannot_lower", "reason": reason(error)}
    sys.stdout.write(f"\n{json.dumps(reply)}\n")
    sys.stdout.flush()
    os._exit(0)  # all is reported: what libraries do on their way out can only spoil it


#: How far equal runs differ: starting an interpreter and importing is part of no figure, but tracing runs on shared cores.
TOLERANCE = 0.25


class Lowering:
    """Each repetition is a process of its own (:mod:`pytest_mlhpc.node.worker.probes.lowering`)."""

    kernel_works = True  # or rather, the process of each repetition works: its time is not another program's

    def __init__(self, place: ProbePlace) -> None:
        run = place.run
        self._limit_s = run.time_limit_s
        self._batch = inner_batch(run.parameters)
        self._precision = str(run.parameters.get("precision") or "fp32")
        own = environment.of_run(place.directory)
        self._folder = Path(tempfile.mkdtemp(prefix=f"lowering-{run.run_id}-", dir=str(own)))
        parameters = {**inner_parameters(run.parameters), "global_batch": self._batch}
        inner = replace(
            run,
            workload=run.parameters["of"],
            parameters=parameters,
            steps=1,
            warmup_steps=0,
            data_source="memory",
        )
        self._run = json.dumps(to_json(inner))
        self._operations: List[int] = []
        self.operations: Tuple[TimedOperation, ...] = (
            TimedOperation("lowering", (), (), ("lowering_time",), (), TOLERANCE),
        )

    def verify(self) -> None:
        """Have nothing to look at: a graph that is not there fails its repetition."""

    def repeat(self) -> Mapping[str, float]:
        """Lower once.

        Raises:
            WorkerFailure: ``cannot_lower``, with the compiler's message.
        """
        reply = self._lowered(self._folder / str(len(self._operations)))
        if "reason" in reply:
            raise WorkerFailure(str(reply.get("outcome", "cannot_lower")), str(reply["reason"]))
        self._operations.append(int(reply["operations"]))
        return {"lowering": float(reply["seconds"])}

    def _lowered(self, folder: Path) -> Dict[str, Any]:
        asked = json.dumps({"run": self._run, "folder": str(folder), "precision": self._precision})
        argv = [sys.executable, "-m", "pytest_mlhpc.node.worker.probes.lowering"]
        try:
            done = run_to_end(argv, self._limit_s, given=asked.encode())
        except subprocess.TimeoutExpired:
            text = f"lowering did not end within the run's limit of {self._limit_s:g} s; raise time_limit"
            raise WorkerFailure("time_limit", text) from None
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        if done.returncode or not lines:
            last = " ".join(done.stderr.decode("utf-8", "replace").split())[-600:]
            return {"reason": f"the compiler's process ended with code {done.returncode}: {last}"}
        found: Dict[str, Any] = read_json(lines[-1])
        return found

    def figures(self) -> Tuple[Figure, ...]:
        """Return the operations of the graph: it is the same each time, unless model or compiler changed."""
        return (Figure("lowered_operations", float(self._operations[-1]), "1", "none", "first"),)

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return the samples of a step, which are part of the graph."""
        return {"samples_of_a_step": str(self._batch)}

    def close(self) -> None:
        """Remove the graphs: they are hundreds of megabytes for large models."""
        shutil.rmtree(self._folder, ignore_errors=True)


#: A rank's part, by its ProbePlace.
probe = Lowering


if __name__ == "__main__":
    main()
