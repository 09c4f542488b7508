"""Small runs that ranks share in every way, and what their reports say of all ranks together.

Four ranks measure all runs one after the other: starting ranks for each of them would cost more than they do.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from probe_ranks import run_ranks, sabotaged, smoke
from rank_helpers import run_plan
from rank_server import RankServer

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import from_json, to_json

if TYPE_CHECKING:
    from pytest_mlhpc.node.worker.base import Accelerator
    from pytest_mlhpc.node.worker.distributed import Group

RANKS = 4
LAYOUTS = {"replicated": (4, 1), "sharded": (1, 4), "hybrid": (2, 2)}

#: A hang guard for the ranks, in seconds.
LIMIT_S = 1500

#: Models with batch normalisation, at sizes that train in a second.
NORMALISED = {
    "resnet50": {"image_size": 32, "classes": 4, "learning_rate": 0.01},
    "deepcam": {"height": 32, "width": 48, "width_multiplier": 0.125, "middle_blocks": 1},
}

NORMALISED_RUNS = [
    *itertools.product(NORMALISED, ("replicated", "sharded")),
    ("deepcam", "hybrid"),  # which shares the code of the others
]

#: A model of volumes, of the same kind.
VOLUMES = {"dropout": 0.0, "input_size": 16, "layers": 2, "base_channels": 8}

#: name of a run -> the reports of its ranks, as JSON
Reports = dict[str, list[dict[str, Any]]]


def shared(workload: str, layout: str | None, steps: int = 4, **parameters: Any) -> RunPlan:
    """Return a run of four ranks of the smoke preset; one step of warm-up for each two that are timed."""
    if layout is not None:
        parameters["parallel"] = dict(zip(("replicate", "shard"), LAYOUTS[layout], strict=True))
    return run_plan(
        workload=workload,
        parameters=smoke(workload, global_batch=8, loader_workers=0, **parameters),
        ranks=RANKS,
        launcher="torchrun",
        steps=steps,
        warmup_steps=steps // 2,
        variables={},
    )


def tiny(layout: str | None, **changes: Any) -> RunPlan:
    """Return a run of a language model with blocks, and with weights that four ranks cannot share evenly."""
    shape = {"layers": 2, "hidden": 20, "heads": 2, "context": 8, "vocabulary": 257}
    return shared("language_model", layout, **{**shape, **changes})


def normalised(workload: str, layout: str | None, **changes: Any) -> RunPlan:
    """Return a run of a model of :data:`NORMALISED` in double precision."""
    run = shared(workload, layout, steps=2, **NORMALISED[workload], **changes)
    variables = {"MLHPC_WORKLOAD_MODULE": f"{workload}_double"}
    return dataclasses.replace(run, workload=f"{workload}_double", variables=variables)


def all_runs() -> dict[str, RunPlan]:
    runs = {"unset": tiny(None), "in-small-buckets": tiny("replicated", bucket_mb=0.01)}
    for compression in ("fp16", "powersgd", "bf16"):
        runs[f"sent-{compression}"] = tiny("replicated", gradient_compression=compression)
    for layout in LAYOUTS:
        runs[layout] = tiny(layout)
    for workload, layout in NORMALISED_RUNS:
        runs[f"{layout}-{workload}"] = normalised(workload, layout)
    for workload in NORMALISED:
        for ranks in (2, "all"):
            runs[f"together-{ranks}-{workload}"] = normalised(workload, "replicated", batch_norm_group=ranks)
    for layout in ("replicated", "sharded"):
        runs[f"{layout}-accumulating"] = tiny(layout, gradient_accumulation=2)
        runs[f"{layout}-cosmoflow"] = shared("cosmoflow", layout, **VOLUMES)
        runs[f"{layout}-bf16"] = tiny(layout, precision="bf16")
        for optimizer in ("adam", "adamw"):
            runs[f"{layout}-{optimizer}"] = tiny(
                layout, optimizer=optimizer, fused_optimizer=True, learning_rate=1e-3
            )
    return runs


def measure_all(server: RankServer, folder: Path) -> Reports:
    """Start the ranks and return the reports of all runs; a run that fails leaves ``failed``: outcome and text."""
    runs = all_runs()
    (folder / "runs.json").write_text(json.dumps({name: to_json(run) for name, run in runs.items()}))
    code = "import parallel_runs\nparallel_runs.be_a_rank()\n"
    ended = run_ranks(server, folder, runs["unset"], **sabotaged(folder, code)).ended
    assert [code for code, _ in ended] == [0] * RANKS, ended
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]
        for name in runs
    }


def be_a_rank() -> None:
    """Measure all runs, in a rank's process."""
    import torch

    from pytest_mlhpc.node.worker import distributed
    from pytest_mlhpc.node.worker.base import open_device

    torch.set_num_threads(1)
    group, accelerator = distributed.from_environment(os.environ), open_device("cpu", 0)
    distributed.join(group, accelerator, LIMIT_S)
    gc.freeze()  # else each run collects all of torch
    gc.unfreeze = lambda: None
    for name, body in json.loads(Path("runs.json").read_text()).items():
        report = measure(from_json(RunPlan, body), group, accelerator)
        Path(f"{name}.{group.rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # as a worker's rank: threads of gloo may abort a process that ends in the ordinary way


def measure(run: RunPlan, group: Group, accelerator: Accelerator) -> dict[str, Any]:
    from pytest_mlhpc.node.worker import distributed, rank, reporting
    from pytest_mlhpc.node.worker.environment import WorkerFailure

    # One pair of passes in place of the five that a median needs: nothing here depends on the time.
    diagnosis = {"communication": functools.partial(distributed.communication, pairs=1)}
    cost = reporting.cost
    if run.workload.endswith("_double"):  # of which only the losses are read
        diagnosis = {"communication": lambda *_: (None, None), "traffic": lambda *_: ()}
        cost = mock.Mock(return_value={})
    with mock.patch.multiple(distributed, **diagnosis), mock.patch.object(reporting, "cost", cost):
        try:
            return to_json(rank.measure(run, group, accelerator, Path.cwd(), lambda *_: None))
        except WorkerFailure as failure:
            return {"failed": [failure.outcome, failure.text]}


def losses(reports: Reports, name: str) -> list[float]:
    """Return the loss of each step, the mean over ranks."""
    return [sum(step) / RANKS for step in zip(*(report["losses"] for report in reports[name]), strict=True)]


def traffic(reports: Reports, name: str, unit: str = "bytes") -> dict[str, float]:
    """Return kind of collective -> bytes (or count) of a step, which are the same on all ranks."""
    (figures,) = {
        tuple((figure["name"], figure["value"]) for figure in report["figures"]) for report in reports[name]
    }
    return {key.removesuffix(f"_{unit}"): value for key, value in figures if key.endswith(unit)}


def gradients(reports: Reports, name: str = "unset") -> int:
    """Return the bytes of all gradients, in fp32."""
    return 4 * int(reports[name][0]["parameters"])
