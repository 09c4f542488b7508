"""A training lowered for Cerebras' wafer, without one: how long that takes, and how many operations come of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import run_to_end
from pytest_mlhpc.node.protocol.schema import Figure, TimedOperation, to_json
from pytest_mlhpc.node.worker import environment
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.workloads.characters import inner_batch, inner_parameters

#: How far equal runs differ: starting an interpreter and importing is part of no figure, but tracing runs on shared cores.
TOLERANCE = 0.25

_MODULE = "pytest_mlhpc.node.worker.accelerators.wse.lower"


class Lowering:
    """Each repetition is a process of its own (:mod:`pytest_mlhpc.node.worker.accelerators.wse.lower`)."""

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
        argv = [sys.executable, "-m", _MODULE]
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
