"""What an ensemble predicts and how good that is: its bootstrap samples, its base models' mean."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Sampler

from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Trainer, autocast
from pytest_mlhpc.node.worker.workloads.base import Task

#: Most samples that are held out, of all ranks of a base model; and bytes of one rank's predictions for them.
HELD_OUT, BUDGET = 256, 64 << 20

#: Most bytes of one rank's predictions in a training until a quality is reached, whose evaluation takes the whole set.
EVALUATION_BUDGET = 1 << 30

#: Least probability whose logarithm is taken: the smallest normal number of float32.
_LEAST = 2.0**-126


@dataclass(frozen=True)
class PredictionScore:
    """How predictions are made and judged.

    ``predict(outputs, targets)`` gives what is averaged over base models, (samples, ...) float32; ``quality(mean, targets)``
    one number for each sample, float64 (samples,), of which the mean is the quality. ``size`` is the numbers in one
    sample's prediction.
    """

    better: str
    predict: Callable[[Tensor, Tensor], Tensor]
    quality: Callable[[Tensor, Tensor], Tensor]
    size: int


def score_of(task: Task) -> PredictionScore:
    """Return how predictions for *task* are judged."""
    places = math.prod(task.target.shape)
    if task.name == "resnet50":
        return PredictionScore("higher", _probabilities, _top_1, task.classes)
    if task.name == "deepcam":
        return PredictionScore("higher", _probabilities, _intersection_over_union, places * task.classes)
    if task.name == "language_model":
        return PredictionScore("lower", _of_the_next_token, _log_perplexity, places)
    if task.name == "cosmoflow":
        return PredictionScore("lower", _as_they_are, _absolute_error, places)

    def own_loss(mean: Tensor, targets: Tensor) -> Tensor:
        places = [slice(place, place + 1) for place in range(len(mean))]
        return torch.stack([task.loss(mean[one], targets[one]).double() for one in places])

    return PredictionScore("lower", _as_they_are, own_loss, max(places, task.classes))


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


def held_out_of_a_rank(score: PredictionScore, ranks: int, samples: int) -> int:
    """Return how many samples each of *ranks* ranks asks its model for, where *samples* are trained on."""
    return max(1, min(HELD_OUT // ranks, BUDGET // (4 * max(1, score.size)), samples // (4 * ranks)))


def predictions(
    trainer: Trainer, score: PredictionScore, dataset: Any, indices: List[int], batch: int
) -> Tuple[Tensor, Tensor]:
    """Return predictions and targets of samples, on the host; the model is left in evaluation mode."""
    device = trainer.accelerator.device
    predicted, wanted = [], []
    trainer.model.eval()
    with torch.no_grad():
        for start in range(0, len(indices), batch):
            samples = [dataset[index] for index in indices[start : start + batch]]
            inputs, targets, _ = prepare.collate(samples)
            with autocast(device.type, trainer.precision):
                ready, expected = trainer.task.prepare(inputs.to(device), targets.to(device))
                outputs = trainer.model(ready)
            predicted.append(score.predict(outputs.float(), expected).cpu())
            wanted.append(expected.cpu())
    return torch.cat(predicted), torch.cat(wanted)


#: Share of the samples that a bootstrap sample holds at least once, for many samples.
DISTINCT = 1 - math.exp(-1)

#: Odd and large, so that seeds, base models and training epochs do not meet.
_STRIDE = 1_000_003

_SEEDS = 1 << 63


@dataclass(frozen=True)
class SampleSplit:
    """Indices of the samples that are drawn from, and of those that are held out."""

    drawn_from: Tensor
    held_out: Tensor


def seed_of(seed: int, model: int) -> int:
    """Return the seed of a base model, for weights, dropout and order; that of base model 0 is the run's own."""
    return (seed + model * _STRIDE) % _SEEDS


def part(length: int, held_out: int, seed: int) -> SampleSplit:
    """Hold *held_out* of *length* samples out, chosen by *seed*; both parts are in ascending order.

    Raises:
        WorkerFailure: ``data_exhausted``, that would be more than half of them.
    """
    if 2 * held_out > length:
        text = f"of {length} samples {held_out} cannot be held out to ask the ensemble: use more data or more steps"
        raise WorkerFailure("data_exhausted", text)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed % _SEEDS))
    return SampleSplit(order[held_out:].sort().values, order[:held_out].sort().values)


def multiplicities(samples: int, seed: int, model: int) -> Tensor:
    """Return how often base model *model* has each of *samples* samples: int64 (samples,), Poisson of mean 1."""
    generator = torch.Generator().manual_seed((seed * _STRIDE + 2 * model + 1) % _SEEDS)
    return torch.poisson(torch.ones(samples, dtype=torch.float64), generator=generator).long()


class BootstrapSampler(Sampler[int]):
    """Indices of one rank of one base model: its bootstrap sample, shuffled anew each time that it is through.

    *drawn_from* holds the indices that samples are drawn from. Rank r of *world* takes places r, r + world, ... of the
    common order, so shares differ by one at most. An iteration has *count* indices, None: no end. The next one begins
    with another order.

    Raises:
        WorkerFailure: ``data_exhausted``, the sample is too small to be shared.
    """

    def __init__(
        self, drawn_from: Tensor, rank: int, world: int, seed: int, model: int, *, count: Optional[int] = None
    ) -> None:
        counts = multiplicities(len(drawn_from), seed, model)
        self.sample = drawn_from.repeat_interleave(counts)
        self.distinct = float((counts > 0).double().mean())
        self.rank, self.world, self.count = rank, world, count
        self._shuffled = 0
        self.seed = seed_of(seed, model)
        if len(self.sample) < world:
            text = (
                f"the bootstrap sample of base model {model} has {len(self.sample)} samples for {world} ranks"
            )
            raise WorkerFailure("data_exhausted", f"{text}: use more data or more steps")

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the next iteration."""
        yield from itertools.islice(self._endless(), self.count)

    def _endless(self) -> Iterator[int]:
        while True:
            generator = torch.Generator().manual_seed((self.seed * _STRIDE + self._shuffled) % _SEEDS)
            self._shuffled += 1
            order = torch.randperm(len(self.sample), generator=generator)
            yield from self.sample[order[self.rank :: self.world]].tolist()


@dataclass(frozen=True)
class BaseModelPlace:
    """Where a rank belongs: its base model, and its number among that one's ranks."""

    model: int
    place: int


def place_of(rank: int, each: int) -> BaseModelPlace:
    """Return where a rank belongs, *each* being the ranks of a base model: neighbours train one."""
    return BaseModelPlace(*divmod(rank, each))
