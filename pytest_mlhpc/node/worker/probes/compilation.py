"""A training compiled for Graphcore's IPUs, without one: how long that takes, and how large the program is.

poptorch compiles for IPUs that are not there (``Options.useOfflineIpuTarget``) and writes the program into a file
(``compileAndExport``). Nothing is trained, and whether the program is right or fast is not shown.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Mapping, Tuple

import torch

from pytest_mlhpc.node.protocol.schema import Figure, TimedOperation
from pytest_mlhpc.node.worker import environment, prepare
from pytest_mlhpc.node.worker.accelerators.ipu import (
    IpuSettings,
    load,
    make,
    place_blocks,
    shares,
    stored,
    with_loss,
)
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.workloads.characters import inner_batch, inner_parameters

#: How far equal runs differ: compilers on shared cores.
TOLERANCE = 0.25

#: What is compiled for: Mk2, as poptorch has it by default (``python/options.py``).
IPU_VERSION = 2


class Compilation:
    """Each repetition compiles a model that was made anew, and keeps no program."""

    kernel_works = False

    def __init__(self, place: ProbePlace) -> None:
        run = place.run
        parameters = inner_parameters(run.parameters)
        self._poptorch = load()
        self._settings = IpuSettings.of(parameters, "memory")
        self._batch = inner_batch(run.parameters)
        self._run = replace(
            run,
            workload=run.parameters["of"],
            parameters={**parameters, "global_batch": self._batch},
            steps=self._settings.device_iterations,
            warmup_steps=0,
            data_source="memory",
        )
        self._of_call = shares(self._run, self._settings, 1).micro
        self._bytes = 0
        own = environment.of_run(place.directory)
        self._folder = Path(tempfile.mkdtemp(prefix=f"compilation-{run.run_id}-", dir=str(own)))
        self.operations: Tuple[TimedOperation, ...] = (
            TimedOperation("compile", (), (), ("compile_time",), (), TOLERANCE),
        )

    def verify(self) -> None:
        """Have nothing to look at: a program that is not there fails its repetition."""

    def repeat(self) -> Mapping[str, float]:
        """Compile once."""
        settings = self._settings
        chosen = make(self._poptorch, settings, seed=0, world=1, cache=None)
        chosen.useOfflineIpuTarget(IPU_VERSION)
        torch.manual_seed(0)
        task = prepare.load_task(self._run)
        network = task.model().train()
        if settings.ipus_per_replica > 1:
            place_blocks(self._poptorch, network, task, settings.ipus_per_replica)
        optimizer = task.optimizer(network)
        model = with_loss(self._poptorch, network, task)
        executor = self._poptorch.trainingModel(model, options=chosen, optimizer=optimizer)
        batch = [
            torch.zeros((self._of_call, *one.shape), dtype=one.dtype) for one in (task.input, task.target)
        ]
        program = self._folder / "program"
        started = time.perf_counter()
        executor.compileAndExport(str(program), *stored((batch[0], batch[1], 0.0)), export_model=False)
        seconds = time.perf_counter() - started
        self._bytes = program.stat().st_size
        program.unlink()
        executor.destroy()
        return {"compile": seconds}

    def figures(self) -> Tuple[Figure, ...]:
        """Return how large the program was."""
        return (Figure("executable_bytes", float(self._bytes), "B", "none", "first"),)

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return what was compiled for, by what, and the samples of a step, which are part of the program."""
        return {
            "compiled_for": f"{self._settings.replicas * self._settings.ipus_per_replica} IPUs Mk{IPU_VERSION} that are not here",
            "poptorch": str(getattr(self._poptorch, "__version__", "")),
            "samples_of_a_step": str(self._batch),
        }

    def close(self) -> None:
        """Remove what is left of a program."""
        shutil.rmtree(self._folder, ignore_errors=True)


#: A rank's part, by its ProbePlace.
probe = Compilation
