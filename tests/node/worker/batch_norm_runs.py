"""Layers that four ranks normalise in groups, and the same by one process with the joined batch.

Each case has inputs of its own for each rank, in float64, drawn from a seed. Ranks write what came out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe_ranks import run_ranks, sabotaged
from rank_helpers import run_plan
from rank_server import RankServer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pytest_mlhpc.node.worker.base import Accelerator
    from pytest_mlhpc.node.worker.distributed import Group

RANKS, CHANNELS, STEPS = 4, 5, 2
GROUPS = (2, 4)

#: Dimensions behind (N, C), samples of each rank, whether channels lie last, and what differs from torch's own options.
CASES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]] = {
    "vectors": ((), (3, 3, 3, 3), False, {}),
    "images": ((4, 3), (2, 2, 2, 2), False, {}),
    "images with channels last": ((4, 3), (2, 2, 2, 2), True, {}),
    "volumes": ((2, 3, 2), (2, 2, 2, 2), False, {}),
    "uneven": ((4,), (1, 5, 2, 3), False, {}),
    "no weights": ((4, 3), (2, 2, 2, 2), False, {"affine": False}),
    "mean of all steps": ((4, 3), (2, 2, 2, 2), False, {"momentum": None}),
    "no running statistics": ((4, 3), (2, 2, 2, 2), False, {"track_running_stats": False}),
}


def layer(case: str) -> nn.Module:
    """Return the case's layer within a model, with weights of its own."""
    import torch
    from torch import nn

    space, _, _, options = CASES[case]
    kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    found = nn.Sequential(kinds[len(space)](CHANNELS, **options)).double().train()
    torch.manual_seed(11)
    for weight in found.parameters():
        nn.init.uniform_(weight, 0.5, 2.0)
    return found


def batches(case: str, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return input and factors of the output of each rank. Means are far from 0, of another scale at each rank."""
    import torch

    space, samples, channels_last, _ = CASES[case]
    numbers = torch.Generator().manual_seed(1000 * step + len(case))
    found = []
    for rank, count in enumerate(samples):
        shape = (count, CHANNELS, *space)
        drawn = [torch.randn(shape, generator=numbers, dtype=torch.float64) for _ in range(2)]
        given = 100.0 + 10.0 * rank + (1.0 + rank) * drawn[0]
        found.append(
            (given.contiguous(memory_format=torch.channels_last) if channels_last else given, drawn[1])
        )
    return found


def passed(model: nn.Module, given: torch.Tensor, factors: torch.Tensor) -> dict[str, Any]:
    """Return output and gradients of one pass, and what the model keeps."""
    model.zero_grad()
    leaf = given.clone().requires_grad_()
    out = model(leaf)
    (out * factors).sum().backward()
    return {
        "out": out.detach(), "input": leaf.grad,
        **{f"gradient {name}": weight.grad.clone() for name, weight in model.named_parameters()},
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
    }  # fmt: skip


def measure_all(server: RankServer, folder: Path) -> dict[str, list[Any]]:
    """Return "GROUP CASE" -> for each rank what came out in each step."""
    import torch

    code = "import batch_norm_runs\nbatch_norm_runs.be_a_rank()\n"
    ended = run_ranks(server, folder, run_plan(ranks=RANKS), **sabotaged(folder, code)).ended
    assert [code for code, _ in ended] == [0] * RANKS, ended
    each = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    return {name: [found[name] for found in each] for name in each[0]}


def be_a_rank() -> None:
    """Do all cases with all groups, in a rank's process."""
    import torch

    from pytest_mlhpc.node.worker import distributed
    from pytest_mlhpc.node.worker.base import open_device

    torch.set_num_threads(1)
    group, accelerator = distributed.from_environment(os.environ), open_device("cpu", 0)
    distributed.join(group, accelerator, 600.0)
    found: dict[str, Any] = {}
    for ranks in GROUPS:
        for case in CASES:
            model = layer(case)
            distributed.share_statistics(model, group, accelerator, ranks)
            steps = [batches(case, step)[group.rank] for step in range(STEPS)]
            found[f"{ranks} {case}"] = [passed(model, *step) for step in steps]
            given, factors = steps[-1]
            model.eval()
            found[f"{ranks} {case}"].append(passed(model, given, factors))
    found["messages"] = _messages(layer("images"), batches("images", 0)[group.rank], group, accelerator)
    torch.save(found, f"{group.rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # as a worker's rank: threads of gloo may abort a process that ends in the ordinary way


def _messages(
    model: nn.Module, step: tuple[Any, Any], group: Group, accelerator: Accelerator
) -> list[list[str]]:
    """Return the kinds of collectives of a pass of replicas, and of one that exchanges nothing."""
    from pytest_mlhpc.node.worker import distributed

    wrapped = distributed.wrap(model, group, accelerator, {"batch_norm_group": "all"})
    passed(wrapped, *step)  # replicas send their buffers before later passes
    with distributed.noted() as usual:
        passed(wrapped, *step)
    with distributed.silent(wrapped), distributed.noted() as silent:
        passed(wrapped, *step)
    return [sorted(kind for kind, _ in found) for found in (usual, silent)]
