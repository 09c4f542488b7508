"""PAYLOAD. How the ranks of an ensemble learn of each other's base models without waiting for them in a collective.

All goes through the store that the ranks met at, which lives in a process that trains nothing and so does not die with a
base model. Rank 0 looks who is ready and who has ended, one after the other, and writes down when all may begin and what
became of all: so the others look at one key, however many they are.
"""

from __future__ import annotations

import json
import time
from typing import Any, Dict, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist

from pytest_mlhpc.node.worker.bagging.bootstrap import place_of
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure

#: Longest time between two looks, in seconds. Base models that start together start within so much of each other.
LOOK_S = 0.02
#: The same while trainings are timed, and nobody waits for an answer but to learn of failures: every look is a question to
#: the store, takes turns on the cores with the trainings, and with four base models on two cores cost a part of their time.
WATCH_S = 0.5

#: Why a base model failed: outcome (``store/record.py``) and text.
Why = Tuple[str, str]


class Store(Protocol):
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


def store_of(group: Group) -> Store:
    """Return the store that the ranks of this process group met at.

    Raises:
        WorkerFailure: ``not_supported``, this torch cannot ask it without waiting.
    """
    if group.world == 1:
        return _Alone()
    found: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the same from torch 1.13 to 2.13; no public name
    if not hasattr(found, "check"):
        text = f"bagging: stores of torch {torch.__version__} cannot tell whether a key is there; torch 2.4 has such"
        raise WorkerFailure("not_supported", text)
    store: Store = found
    return store


class Meeting:
    """What one rank tells the others, and what it learns of them. No call waits for others."""

    def __init__(self, store: Store, group: Group, each: int) -> None:
        self._store, self._group, self._each = store, group, each
        self.model = place_of(group.rank, each).model
        self._unready = self._unended = 0  # rank 0: the first rank of which it is not known

    def ready(self) -> None:
        """Say that this rank could begin."""
        self._say(f"ready/{self._group.rank}")

    def ended(self) -> None:
        """Say that this rank's process has ended, well or not; a failure must have been told before."""
        self._say(f"ended/{self._group.rank}")

    def fail(self, why: Why) -> None:
        """Say that this rank's base model has failed, unless another of its ranks has said so."""
        if self.failure(self.model) is None:
            self._say(f"failed/{self.model}", json.dumps(why))

    def failure(self, model: int) -> Optional[Why]:
        """Return why a base model failed, None if nobody says so."""
        if not self._said(f"failed/{model}"):
            return None
        outcome, text = json.loads(self._heard(f"failed/{model}"))
        return str(outcome), str(text)

    def may_begin(self) -> bool:
        """Return whether every rank is ready or of a base model that has failed."""
        if self._group.rank == 0:
            self._unready = self._passed(self._unready, "ready")
            if self._unready == self._group.world and not self._said("begin"):
                self._say("begin")
        return self._said("begin")

    def outcome(self) -> Optional[Dict[int, Why]]:
        """Return which base models failed, and why, once every rank has ended; None before."""
        if self._group.rank == 0:
            self._unended = self._passed(self._unended, "ended")
            if self._unended == self._group.world and not self._said("outcome"):
                every = range(self._group.world // self._each)
                found = {model: why for model in every for why in [self.failure(model)] if why is not None}
                self._say("outcome", json.dumps(found))
        if not self._said("outcome"):
            return None
        return {int(model): (why[0], why[1]) for model, why in json.loads(self._heard("outcome")).items()}

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
            self._said(f"{what}/{rank}")
            or (what == "ready" and self._said(f"failed/{place_of(rank, self._each).model}"))
        ):
            rank += 1
        return rank

    def _said(self, key: str) -> bool:
        return bool(self._store.check([f"bagging/{key}"]))

    def _say(self, key: str, value: str = "1") -> None:
        self._store.set(f"bagging/{key}", value)

    def _heard(self, key: str) -> str:
        return self._store.get(f"bagging/{key}").decode()
