"""PAYLOAD. What an ensemble predicts, and how good that is: the mean of its base models' predictions, judged sample by sample.

HPC AI500 averages what the base models predict. For classes that is the mean of their probabilities (of each pixel, of each
token), for numbers the mean of the numbers. Of a language model only the probability of the token that follows is kept,
as the vocabulary is large and no other one enters its quality.

Qualities: resnet50 top-1 accuracy; deepcam mean over classes of intersection over union, of each sample (a class that is
neither there nor predicted counts 1, as in mlcommons/hpc ``deepcam/utils/metric.py``); cosmoflow mean absolute error;
language_model log-perplexity; any other workload its own loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, List, Tuple

import torch
from torch import Tensor
from torch.nn import functional

from pytest_mlhpc.node.worker import loader
from pytest_mlhpc.node.worker.loop import Trainer, autocast
from pytest_mlhpc.node.worker.workloads.base import Task

#: Samples that are held out at most, of all ranks of a base model; and bytes of one rank's predictions for them.
HELD_OUT, BUDGET = 256, 64 << 20

#: Least probability whose logarithm is taken: the smallest normal number of float32.
_LEAST = 2.0**-126


@dataclass(frozen=True)
class Score:
    """How predictions are made and judged.

    ``predict(outputs, targets)`` gives what is averaged over base models, (samples, ...) float32; ``quality(mean, targets)``
    one number for each sample, float64 (samples,), of which the mean is the quality. ``size`` is the numbers in one
    sample's prediction.
    """

    better: str
    predict: Callable[[Tensor, Tensor], Tensor]
    quality: Callable[[Tensor, Tensor], Tensor]
    size: int


def score_of(task: Task) -> Score:
    """Return how predictions for *task* are judged."""
    places = math.prod(task.target.shape)
    if task.name == "resnet50":
        return Score("higher", _probabilities, _top_1, task.classes)
    if task.name == "deepcam":
        return Score("higher", _probabilities, _intersection_over_union, places * task.classes)
    if task.name == "language_model":
        return Score("lower", _of_the_next_token, _log_perplexity, places)
    if task.name == "cosmoflow":
        return Score("lower", _as_they_are, _absolute_error, places)

    def own_loss(mean: Tensor, targets: Tensor) -> Tensor:
        places = [slice(place, place + 1) for place in range(len(mean))]
        return torch.stack([task.loss(mean[one], targets[one]).double() for one in places])

    return Score("lower", _as_they_are, own_loss, max(places, task.classes))


def _probabilities(outputs: Tensor, _targets: Tensor) -> Tensor:
    return functional.softmax(outputs, dim=1)


def _as_they_are(outputs: Tensor, _targets: Tensor) -> Tensor:
    return outputs


def _of_the_next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.softmax(outputs, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _top_1(mean: Tensor, targets: Tensor) -> Tensor:
    return (mean.argmax(dim=1) == targets).double()


def _absolute_error(mean: Tensor, targets: Tensor) -> Tensor:
    return (mean - targets).abs().flatten(1).mean(dim=1).double()


def _log_perplexity(mean: Tensor, _targets: Tensor) -> Tensor:
    return -mean.clamp_min(_LEAST).log().flatten(1).mean(dim=1).double()


def _intersection_over_union(mean: Tensor, targets: Tensor) -> Tensor:
    chosen, classes = mean.argmax(dim=1).flatten(1), mean.shape[1]
    wanted = targets.flatten(1)
    shares = []
    for one in range(classes):
        found, there = chosen == one, wanted == one
        both, either = (found & there).sum(dim=1).double(), (found | there).sum(dim=1).double()
        shares.append(torch.where(either > 0, both / either.clamp_min(1), torch.ones_like(either)))
    return torch.stack(shares).mean(dim=0)


def held_out_of_a_rank(score: Score, ranks: int, samples: int) -> int:
    """Return how many samples each of *ranks* ranks asks its model for, where *samples* are trained on."""
    return max(1, min(HELD_OUT // ranks, BUDGET // (4 * max(1, score.size)), samples // (4 * ranks)))


def predictions(
    trainer: Trainer, score: Score, dataset: Any, indices: List[int], batch: int
) -> Tuple[Tensor, Tensor]:
    """Return predictions and targets of samples, on the host; the model is left in evaluation mode."""
    device = trainer.accelerator.device
    predicted, wanted = [], []
    trainer.model.eval()
    with torch.no_grad():
        for start in range(0, len(indices), batch):
            samples = [dataset[index] for index in indices[start : start + batch]]
            inputs, targets, _ = loader.collate(samples)
            with autocast(device.type, trainer.precision):
                ready, expected = trainer.task.prepare(inputs.to(device), targets.to(device))
                outputs = trainer.model(ready)
            predicted.append(score.predict(outputs.float(), expected).cpu())
            wanted.append(expected.cpu())
    return torch.cat(predicted), torch.cat(wanted)
