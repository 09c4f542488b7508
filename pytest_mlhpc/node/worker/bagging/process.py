"""The processes of an ensemble: one for each rank of a base model, ``python -m pytest_mlhpc.node.worker.bagging.process FD``, and how ranks learn of each other's models.

It is a training like any other (``node/worker/rank.py``) on a group of its own, which has the base model's ranks and nobody else.
Afterwards it asks its model for its share of the samples that were held out. A training until a quality is reached
(``node/worker/quality/``) asks it at each evaluation for that set, and learns how good the ensemble is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import io
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NoReturn, Optional, Protocol, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import from_json, to_json
from pytest_mlhpc.node.worker import prepare, rank
from pytest_mlhpc.node.worker.accelerators.base import Accelerator, open_device
from pytest_mlhpc.node.worker.bagging import ensemble
from pytest_mlhpc.node.worker.bagging.ensemble import place_of
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.main import leave, name_failure
from pytest_mlhpc.node.worker.quality.measure import measure as measure_quality
from pytest_mlhpc.node.worker.quality.train import EnsembleMember
from pytest_mlhpc.node.worker.reporting import Progress

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


_CHILD = "pytest_mlhpc.node.worker.bagging.process"

#: Seconds between SIGTERM and SIGKILL of a child whose base model has failed elsewhere.
_GRACE_S = 2.0


@dataclass(frozen=True)
class ChildMessage:
    """One message of a child; ``tensors`` came behind it, if any did."""

    kind: str
    body: Any = None
    tensors: Any = None


class Messages:
    """Puts what comes out of a pipe together to messages. Damaged lines raise ValueError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Optional[Mapping[str, Any]] = None

    def feed(self, data: bytes) -> Iterator[ChildMessage]:
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
            yield ChildMessage(str(head["kind"]), head.get("body"), tensors)


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

    def answer(self, quality: float, *, over: bool) -> None:
        """Tell how good the ensemble is, and whether training is over."""
        self._tell(json.dumps([quality, over]))

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has died, which its exit code tells
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def receive(self, seconds: float) -> Optional[List[ChildMessage]]:
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


#: Exit code of a child whose rank went away: EX_UNAVAILABLE of sysexits.h (4.3BSD).
_RANK_GONE = 69


@dataclass(frozen=True)
class ChildJob:
    """What a child is to do: ``run`` is the base model's own, on its ranks alone."""

    run: RunPlan
    model: int
    place: int
    local_rank: int
    threads: int
    directory: str


class ChildPipe:
    """The child's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, kind: str, body: Any = None, tensors: Any = None) -> None:
        """Send one message, with tensors behind it. A rank that has gone is nobody to tell."""
        file = io.BytesIO()
        if tensors is not None:
            torch.save(tensors, file)
        head = json.dumps({"kind": kind, "body": body, "bytes": file.tell()}).encode() + b"\n"
        left = memoryview(head + file.getvalue())
        while left:
            left = left[os.write(self._fd, left) :]


def _lines_of(fd: int) -> Iterator[bytes]:
    """Yield lines as they come. The lock of ``sys.stdin`` stays free: loader processes, which are forked, close that first."""
    left = b""
    while data := os.read(fd, 1 << 16):
        *lines, left = (left + data).split(b"\n")
        yield from lines


class ChildOrders:
    """What the rank says after the job: ``go``, and answers. At its end, the rank has gone and this process ends."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self.go = threading.Event()
        self.answers: queue.SimpleQueue[Tuple[float, bool]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="mlhpc-bagging", daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            if line == b"go":
                self.go.set()
            else:
                quality, over = json.loads(line)
                self.answers.put((float(quality), bool(over)))
        os._exit(_RANK_GONE)


def job_of(
    run: RunPlan, models: int, place: ensemble.BaseModelPlace, local_rank: int, directory: Path
) -> ChildJob:
    """Return the job of one rank of one base model: its share of the batch, and a seed of its own."""
    seed, batch = int(run.parameters.get("seed") or 0), run.parameters.get("global_batch")
    own = {
        **{name: value for name, value in run.parameters.items() if name != "bagging"},
        "seed": ensemble.seed_of(seed, place.model),
    }
    if batch:
        own["global_batch"] = int(batch) // models
    plan = dataclasses.replace(run, parameters=own, ranks=run.ranks // models)
    return ChildJob(plan, place.model, place.place, local_rank, torch.get_num_threads(), str(directory))


def main() -> NoReturn:
    """Train, tell, and end the process."""
    teller = ChildPipe(int(sys.argv[1]))
    lines = _lines_of(sys.stdin.fileno())
    line = next(lines, b"")
    if not line:
        os._exit(_RANK_GONE)
    orders = ChildOrders(lines)
    code = 0
    try:
        said = json.loads(line)
        _train(from_json(ChildJob, said["job"]), int(said["seed"]), teller, orders)
    # Whatever it is, the rank must learn of it, by name.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        teller.say("failed", name_failure(error))
        code = 1
    leave(code)


def _train(job: ChildJob, data_seed: int, teller: ChildPipe, orders: ChildOrders) -> None:
    run = job.run
    torch.set_num_threads(job.threads)
    accelerator = open_device(run.device_type, job.local_rank)
    group = Group(job.place, job.local_rank, run.ranks)
    join(job, group, accelerator, os.environ)
    if run.parameters.get("until") == "quality":
        _train_to_quality(job, group, accelerator, data_seed, teller=teller, orders=orders)
    else:
        _train_steps(job, group, accelerator, data_seed, teller=teller, orders=orders)


def _train_to_quality(
    job: ChildJob,
    group: Group,
    accelerator: Accelerator,
    data_seed: int,
    *,
    teller: ChildPipe,
    orders: ChildOrders,
) -> None:
    score = ensemble.score_of(prepare.load_task(job.run))
    used: List[ensemble.BootstrapSampler] = []
    predicted: List[Tuple[Tensor, Tensor]] = []

    def sampler(length: int, place: int, world: int, count: int) -> ensemble.BootstrapSampler:
        used.append(
            ensemble.BootstrapSampler(torch.arange(length), place, world, data_seed, job.model, count=count)
        )
        return used[-1]

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        found = score.predict(outputs.float(), targets)
        predicted.append((found.cpu(), targets.cpu()))
        return score.quality(found, targets)

    def ask(own: int, last: bool) -> Tuple[float, bool]:
        predictions, targets = (torch.cat(one)[:own] for one in zip(*predicted))
        predicted.clear()
        _send_predictions(teller, used[0], (predictions, targets), last=last)
        return orders.answers.get()

    most = ensemble.EVALUATION_BUDGET // (4 * max(1, score.size))
    member = EnsembleMember(data_seed, sampler, lambda: _begin(teller, orders), metric, most, ask)
    progress = _teller_of_progress(teller)
    report = measure_quality(job.run, group, accelerator, Path(job.directory), progress, member=member)
    teller.say("report", to_json(report))


def _begin(teller: ChildPipe, orders: ChildOrders) -> None:
    teller.say("ready")
    orders.go.wait()


def _send_predictions(
    teller: ChildPipe,
    used: Optional[ensemble.BootstrapSampler],
    predictions: Tuple[Tensor, Tensor],
    *,
    last: bool,
) -> None:
    """Send predictions and their targets.

    Raises:
        WorkerFailure: ``loss_nan``, the predictions are no numbers.
    """
    if not bool(torch.isfinite(predictions[0]).all()):
        raise WorkerFailure(
            "loss_nan", "the trained model predicts NaN or infinity; look at precision and learning rate"
        )
    distinct = used.distinct if used is not None else 0.0
    teller.say("predictions", {"distinct": distinct, "last": last}, predictions)


def _train_steps(
    job: ChildJob,
    group: Group,
    accelerator: Accelerator,
    data_seed: int,
    *,
    teller: ChildPipe,
    orders: ChildOrders,
) -> None:
    run = job.run
    task = prepare.load_task(run)
    score = ensemble.score_of(task)
    sizes = prepare.split_batch(run, group.world)
    steps = prepare.DEVICE_BATCHES if run.data_source == "device" else run.steps + run.warmup_steps
    share = ensemble.held_out_of_a_rank(score, group.world, sizes.step_samples * steps)
    held_out = share * group.world
    used: Optional[ensemble.BootstrapSampler] = None
    asked: Any = None

    def sampler(length: int, place: int, world: int) -> ensemble.BootstrapSampler:
        nonlocal used, asked
        parted = ensemble.part(length, held_out, data_seed)
        used = ensemble.BootstrapSampler(parted.drawn_from, place, world, data_seed, job.model)
        asked = parted.held_out[place::world].tolist()
        return used

    trained = rank.train(
        run,
        group,
        accelerator,
        Path(job.directory),
        _teller_of_progress(teller),
        draw=prepare.Draw(data_seed, held_out, sampler),
        begin=lambda: _begin(teller, orders),
    )
    predictions = ensemble.predictions(
        trained.trainer, score, trained.data.source.dataset, asked, sizes.micro
    )
    _send_predictions(teller, used, predictions, last=True)
    teller.say("report", to_json(trained.report))


def _teller_of_progress(teller: ChildPipe) -> Progress:
    """Return what passes progress on to the rank, with why this process is late where it is."""
    return lambda *said: teller.say("progress", said)


def join(job: ChildJob, group: Group, accelerator: Accelerator, environ: Mapping[str, str]) -> None:
    """Join the base model's own process group; nothing to do for a single rank.

    The ranks meet at the store of the run, which lives in a process that trains nothing.
    """
    if group.world == 1:
        return
    timeout = dt.timedelta(seconds=job.run.time_limit_s)
    place = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    torch_distributed: Any = dist  # whose stores have no types
    store = torch_distributed.TCPStore(*place, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        accelerator.backend,
        store=torch_distributed.PrefixStore(f"bagging/{job.model}", store),
        rank=group.rank,
        world_size=group.world,
        timeout=timeout,
    )


if __name__ == "__main__":
    main()
