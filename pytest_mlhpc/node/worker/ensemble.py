"""Ensembles of independent base models, each on devices and a bootstrap sample of its own (HPC AI500).

What an ensemble predicts and how good that is, which samples each base model is trained on, and how ranks learn of each other's
base models.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Sampler

from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.base import Task
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Trainer, autocast

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


#: Longest time between two checks, in seconds. Base models that start together start within so much of each other.
LOOK_S = 0.02
#: The same while trainings are timed, and nobody waits for an answer but to learn of failures: every look is a question to
#: the store, takes turns on the cores with the trainings, and with four base models on two cores cost a part of their time.
WATCH_S = 0.5

#: Why a base model failed: outcome (``store/record.py``) and text.
Why = Tuple[str, str]


class TorchStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> Any:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: List[str]) -> bool:
        """Return whether all keys are there."""


class _Alone:
    """The store of a single rank."""

    def __init__(self) -> None:
        self._values: Dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: List[str]) -> bool:
        return all(key in self._values for key in keys)


def store_of(group: Group) -> TorchStore:
    """Return the store that the ranks of this process group met at.

    Raises:
        WorkerFailure: ``not_supported``, this torch cannot ask it without waiting.
    """
    if group.world == 1:
        return _Alone()
    found: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the same from torch 1.13 to 2.13; no public name
    if not hasattr(found, "check"):
        text = f"bagging: stores of torch {torch.__version__} cannot test for a key; torch 2.4 can"
        raise WorkerFailure("not_supported", text)
    store: TorchStore = found
    return store


class EnsembleStore:
    """What one rank tells the others, and what it learns of them. No call waits for others."""

    def __init__(self, store: TorchStore, group: Group, each: int) -> None:
        self._store, self._group, self._each = store, group, each
        self.model = place_of(group.rank, each).model
        self._unready = self._unended = 0  # rank 0: the first rank of which it is not known

    def ready(self) -> None:
        """Say that this rank could begin."""
        self._say(f"ready/{self._group.rank}")

    def ended(self) -> None:
        """Say that this rank's process has ended, well or not; a failure must have been reported before."""
        self._say(f"ended/{self._group.rank}")

    def fail(self, why: Why) -> None:
        """Say that this rank's base model has failed, unless another of its ranks has said so."""
        if self.failure(self.model) is None:
            self._say(f"failed/{self.model}", json.dumps(why))

    def failure(self, model: int) -> Optional[Why]:
        """Return why a base model failed, None if nobody says so."""
        if not self._sent_key(f"failed/{model}"):
            return None
        outcome, text = json.loads(self._received_key(f"failed/{model}"))
        return str(outcome), str(text)

    def may_begin(self) -> bool:
        """Return whether every rank is ready or of a base model that has failed."""
        if self._group.rank == 0:
            self._unready = self._passed(self._unready, "ready")
            if self._unready == self._group.world and not self._sent_key("begin"):
                self._say("begin")
        return self._sent_key("begin")

    def outcome(self) -> Optional[Dict[int, Why]]:
        """Return which base models failed, and why, once every rank has ended; None before."""
        if self._group.rank == 0:
            self._unended = self._passed(self._unended, "ended")
            if self._unended == self._group.world and not self._sent_key("outcome"):
                every = range(self._group.world // self._each)
                found = {model: why for model in every for why in [self.failure(model)] if why is not None}
                self._say("outcome", json.dumps(found))
        if not self._sent_key("outcome"):
            return None
        return {
            int(model): (why[0], why[1]) for model, why in json.loads(self._received_key("outcome")).items()
        }

    def await_outcome(self) -> Dict[int, Why]:
        """Wait for :meth:`outcome`; the run's time limit is the limit of this."""
        while True:
            self.may_begin()  # rank 0 says so to the others, also where its own base model failed before
            found = self.outcome()
            if found is not None:
                return found
            time.sleep(WATCH_S)  # others may still be timed

    def _passed(self, rank: int, what: str) -> int:
        """Return the first rank from *rank* on that has not said *what*, if its base model goes on."""
        while rank < self._group.world and (
            self._sent_key(f"{what}/{rank}")
            or (what == "ready" and self._sent_key(f"failed/{place_of(rank, self._each).model}"))
        ):
            rank += 1
        return rank

    def _sent_key(self, key: str) -> bool:
        return bool(self._store.check([f"bagging/{key}"]))

    def _say(self, key: str, value: str = "1") -> None:
        self._store.set(f"bagging/{key}", value)

    def _received_key(self, key: str) -> str:
        return self._store.get(f"bagging/{key}").decode()
