"""The processes of an ensemble: one for each rank of a base model, and how ranks learn of each other's models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Protocol, Tuple

import torch
import torch.distributed as dist

from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.worker.bagging.ensemble import place_of
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure

#: Longest time between two looks, in seconds. Base models that start together start within so much of each other.
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
        text = f"bagging: stores of torch {torch.__version__} cannot tell whether a key is there; torch 2.4 has such"
        raise WorkerFailure("not_supported", text)
    store: TorchStore = found
    return store


class Meeting:
    """What one rank tells the others, and what it learns of them. No call waits for others."""

    def __init__(self, store: TorchStore, group: Group, each: int) -> None:
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


_CHILD = "pytest_mlhpc.node.worker.bagging.child"

#: Seconds between SIGTERM and SIGKILL of a child whose base model has failed elsewhere.
_GRACE_S = 2.0


@dataclass(frozen=True)
class Said:
    """One message of a child; ``tensors`` came behind it, if any did."""

    kind: str
    body: Any = None
    tensors: Any = None


class Messages:
    """Puts what comes out of a pipe together to messages. Damaged lines raise ValueError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Optional[Mapping[str, Any]] = None

    def feed(self, data: bytes) -> Iterator[Said]:
        """Take bytes, and yield the messages that are whole now."""
        self._buffer += data
        while True:
            if self._head is None:
                end = self._buffer.find(b"\n")
                if end < 0:
                    return
                self._head = json.loads(self._buffer[:end])
                del self._buffer[: end + 1]
            size = int(self._head.get("bytes") or 0)
            if len(self._buffer) < size:
                return
            head, self._head = self._head, None
            body = bytes(self._buffer[:size])
            del self._buffer[:size]
            tensors = torch.load(io.BytesIO(body), weights_only=True) if size else None
            yield Said(str(head["kind"]), head.get("body"), tensors)


class BaseProcess:
    """One child; to be closed."""

    def __init__(self, task: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.fd, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(theirs)],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                pass_fds=(theirs,),
            )
        except OSError:
            os.close(self.fd)
            raise
        finally:
            os.close(theirs)
        self._messages = Messages()
        self._tell(json.dumps(task))

    def close(self) -> None:
        """End the child and forget it."""
        self.end()
        os.close(self.fd)

    def go(self) -> None:
        """Let the child begin its timed window."""
        self._tell("go")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has died, which its exit code tells
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def hear(self, seconds: float) -> Optional[List[Said]]:
        """Return what was said within *seconds*, None at the end of all.

        Raises:
            ValueError: it was no message.
        """
        if not select.select([self.fd], [], [], seconds)[0]:
            return []
        data = os.read(self.fd, 1 << 20)
        return list(self._messages.feed(data)) if data else None

    def why(self) -> Why:
        """Wait for the child and return how it ended, as the failure of its base model."""
        code = self._process.wait()
        outcome = "worker_killed" if code < 0 else "worker_exit"
        return outcome, f"the process that trained it {describe_exit(code)} before it had reported"

    def end(self) -> None:
        """End the child, whatever it does. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
