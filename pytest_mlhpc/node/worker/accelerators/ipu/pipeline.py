"""PAYLOAD. Which part of a model begins on which IPU, so that each IPU has about the same to compute.

:func:`begins` decides (pure), :func:`apply` tells poptorch. What is weighed is the forward pass's operations, counted as
everywhere (``node/worker/flops.py``); weights and activations are not, so that a plan may not fit into the memory of an IPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Mapping, Sequence, Tuple

from torch import nn

from pytest_mlhpc.node.worker import flops
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.workloads.base import Task

#: Workload -> parts of its model in the order in which they run. A block may begin at each module of a sequence or list.
ORDER: Mapping[str, Tuple[str, ...]] = {
    "cosmoflow": ("features", "head"),
    "deepcam": ("entry", "encoder", "pyramid", "upsample", "low_level", "decoder"),
    "resnet50": ("stem", "stages", "head"),
    "language_model": ("embedding", "positions", "blocks", "norm", "head"),
}


@dataclass(frozen=True)
class Begin:
    """From the module *name* on, in the order of running, the model is computed on this IPU of its replica."""

    name: str
    ipu: int


def units(model: nn.Module, workload: str) -> List[str]:
    """Return the names of modules at which a block may begin, in the order in which they run.

    Raises:
        WorkerFailure: ``not_supported``, it is not known in which order this workload's model runs.
    """
    if workload not in ORDER:
        text = f"ipus_per_replica: only {', '.join(ORDER)} can be spread over several IPUs, not {workload}"
        raise WorkerFailure("not_supported", text)
    found: List[str] = []
    for name in ORDER[workload]:
        part = getattr(model, name)
        if isinstance(part, (nn.Sequential, nn.ModuleList)):
            found += [f"{name}.{child}" for child, _ in part.named_children()]
        elif part is not None:
            found.append(name)
    return found


def tied(model: nn.Module) -> Tuple[str, str]:
    """Return the names of the two modules that share their weights, first and last of the model, or two empty names."""
    head, embedding = getattr(model, "head", None), getattr(model, "embedding", None)
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return "", ""
    return ("embedding", "head") if head.weight is embedding.weight else ("", "")


def begins(
    names: Sequence[str], operations: Mapping[str, int], ipus: int, shared: Tuple[str, str] = ("", "")
) -> Tuple[Begin, ...]:
    """Return where each IPU but the first begins; what comes before the first of them runs on IPU 0.

    Args:
        names: units in the order of running.
        operations: of layers, by their full names.
        ipus: over which the units are spread, each gets at least one.
        shared: first and last unit, where they have the same weights, which can lie on one IPU only: the last comes back
            to IPU 0.

    Raises:
        WorkerFailure: ``not_supported``, there are fewer units than IPUs.
    """
    costs = [_cost(name, operations) for name in names]
    kept = list(names)
    if shared[1] and ipus > 1:
        costs[kept.index(shared[0])] += costs.pop(kept.index(shared[1]))
        kept.remove(shared[1])
    if len(kept) < ipus:
        text = f"ipus_per_replica={ipus}: the model has {len(kept)} parts that can be on IPUs of their own"
        raise WorkerFailure("not_supported", text)
    found = [Begin(kept[first], ipu) for ipu, first in enumerate(balance(costs, ipus)) if ipu]
    if found and shared[1]:
        found.append(Begin(shared[1], 0))
    return tuple(found)


def _cost(unit: str, operations: Mapping[str, int]) -> int:
    return sum(done for name, done in operations.items() if name == unit or name.startswith(f"{unit}."))


def balance(costs: Sequence[int], parts: int) -> List[int]:
    """Cut *costs* into consecutive *parts*, none empty, of which the dearest is as cheap as can be; the first index of each.

    Needs at least as many costs as parts. The work is parts x len(costs) ** 2, for at most a hundred costs.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    # best[n] of k parts: the dearest part where the first n costs are shared best, and where the last part begins.
    best: List[Tuple[int, int]] = [(sums[end], 0) for end in range(count + 1)]
    history = [best]
    for part in range(1, parts):
        row: List[Tuple[int, int]] = [(0, 0)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[start][0], sums[end] - sums[start]), start) for start in range(part, end)
            )
        best = row
        history.append(row)
    firsts: List[int] = []
    end = count
    for row in reversed(history):
        firsts.append(row[end][1])
        end = row[end][1]
    return firsts[::-1]


def apply(poptorch: Any, model: nn.Module, plan: Sequence[Begin]) -> None:
    """Let blocks of *model* begin as *plan* says. poptorch may give back another module, which takes the old one's place."""
    for number, begin in enumerate(plan, 1):
        parent, _, child = begin.name.rpartition(".")
        owner = model.get_submodule(parent)
        block = poptorch.BeginBlock(
            model.get_submodule(begin.name), user_id=f"block{number}", ipu_id=begin.ipu
        )
        setattr(owner, child, block)


def spread(poptorch: Any, model: nn.Module, task: Task, ipus: int) -> None:
    """Spread the blocks of *model* over *ipus*, so that the one with the most operations has as few as can be.

    Raises:
        WorkerFailure: ``not_supported``, the model cannot be spread, or not over so many.
    """
    plan = begins(units(model, task.name), flops.by_layer(task), ipus, tied(model))
    apply(poptorch, model, plan)
