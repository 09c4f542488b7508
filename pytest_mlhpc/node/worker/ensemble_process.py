"""The process that trains one rank of a base model of an ensemble: ``python -m pytest_mlhpc.node.worker.ensemble_process FD``.

It is a training like any other (``node/worker/rank.py``) on a group of its own, which has the base model's ranks and no others.
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
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NoReturn, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import from_json, to_json
from pytest_mlhpc.node.worker import ensemble, prepare, rank
from pytest_mlhpc.node.worker.base import Accelerator, open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.ensemble import BaseModelPlace, Why
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.main import leave, name_failure
from pytest_mlhpc.node.worker.quality.measure import measure as measure_quality
from pytest_mlhpc.node.worker.quality.train import EnsembleMember
from pytest_mlhpc.node.worker.reporting import Progress

_CHILD = "pytest_mlhpc.node.worker.ensemble_process"

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


def job_of(run: RunPlan, models: int, place: BaseModelPlace, local_rank: int, directory: Path) -> ChildJob:
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
