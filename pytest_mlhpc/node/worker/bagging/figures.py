"""PAYLOAD. The figures of an ensemble: ranks with the same samples average their base models' predictions, all add up.

Every rank takes part, also those of base models that failed, whose predictions count for nothing. The tensors are on the
host and go through gloo, whatever the base models were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.bagging import operations
from pytest_mlhpc.node.worker.bagging.bootstrap import place_of
from pytest_mlhpc.node.worker.bagging.ensemble import Score, score_of
from pytest_mlhpc.node.worker.bagging.meeting import Why
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.workloads.base import Task


@dataclass(frozen=True)
class Answers:
    """What one rank's base model predicts for its share of the samples held out; ``distinct``: of :mod:`bootstrap`."""

    predictions: Tensor
    targets: Tensor
    distinct: float


def figures_of(
    run: RunPlan, group: Group, models: int, answers: Optional[Answers], failed: Mapping[int, Why]
) -> Tuple[Figure, ...]:
    """Return the ensemble's figures on the first rank of the first base model that did not fail, nothing elsewhere.

    *answers* is None on ranks of a base model that failed. All ranks must call this.
    """
    each = group.world // models
    place = place_of(group.rank, each)
    first = min(set(range(models)) - set(failed))
    task = prepare.load_task(run)
    score = score_of(task)
    mean = _mean(group, models, answers, models - len(failed))
    # For each base model, and for the ensemble behind them: the sum of its samples' qualities and their number; and what
    # share of the samples the base models drew.
    table = torch.zeros(models + 1, 3, dtype=torch.float64)
    if answers is not None:
        table[place.model] = _row(score, answers.predictions, answers.targets)
        table[place.model, 2] = answers.distinct if place.place == 0 else 0.0
    if answers is not None and place.model == first:
        table[models] = _row(score, mean, answers.targets)
    if group.world > 1:
        dist.all_reduce(table, group=_gloo(list(range(group.world))))
    if place.model != first or place.place:
        return ()
    return (*_figures(score, table, failed, models), *_operations(task))


def _mean(group: Group, models: int, answers: Optional[Answers], alive: int) -> Tensor:
    """Return the mean of the base models' predictions for this rank's share of the samples."""
    each = group.world // models
    own = torch.zeros(0) if answers is None else answers.predictions
    if models == 1:
        return own
    groups = [_gloo([model * each + place for model in range(models)]) for place in range(each)]
    mine = groups[place_of(group.rank, each).place]
    # Who failed knows no shape, so it learns it here.
    shape = torch.zeros(9, dtype=torch.int64)
    if answers is not None:
        shape[: own.dim() + 1] = torch.tensor([own.dim(), *own.shape])
    dist.all_reduce(shape, op=dist.ReduceOp.MAX, group=mine)
    if answers is None:
        own = torch.zeros(shape[1 : int(shape[0]) + 1].tolist())
    summed = own.clone()
    dist.all_reduce(summed, group=mine)
    return summed / alive


def _gloo(ranks: List[int]) -> Any:
    return dist.new_group(ranks, backend="gloo")


def _row(score: Score, predictions: Tensor, targets: Tensor) -> Tensor:
    qualities = score.quality(predictions, targets)
    return torch.tensor([float(qualities.sum()), float(len(qualities)), 0.0], dtype=torch.float64)


def _figures(score: Score, table: Tensor, failed: Mapping[int, Why], models: int) -> List[Figure]:
    alive = [model for model in range(models) if model not in failed]
    qualities = [float(table[model, 0] / table[model, 1]) for model in alive]
    drawn = [float(table[model, 2]) for model in alive]
    whole = float(table[models, 0] / table[models, 1])
    return [
        Figure("base_models", float(len(alive)), "1", "none", "first"),
        Figure("base_models_failed", float(len(failed)), "1", "lower", "first"),
        Figure("ensemble_quality", whole, "1", score.better, "first"),
        Figure(
            "base_model_quality", sum(qualities) / len(alive), "1", score.better, "first", tuple(qualities)
        ),
        Figure("distinct_samples", sum(drawn) / len(alive), "1", "none", "first", tuple(drawn)),
    ]


def _operations(task: Task) -> List[Figure]:
    try:
        return [
            Figure("hpc_ai500_flop_per_sample", float(operations.count(task)[1]), "FLOP", "none", "first")
        ]
    except NotImplementedError:  # this torch cannot run the model without data
        return []
