"""One rank of an ensemble, and the process that trains its base model: ``python -m pytest_mlhpc.node.worker.ensemble_process FD``.

M base models are trained on P devices each. The process trains as any other rank (``node/worker/rank.py``), on a group of its own,
which has the base model's ranks and no others. Afterwards it asks its model for its share of the samples that were held out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import io
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NoReturn, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, RankReport, RunEvent, SchemaError, from_json, to_json
from pytest_mlhpc.node.worker import prepare, rank, reporting
from pytest_mlhpc.node.worker.base import Accelerator, Task, open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.ensemble import (
    LOOK_S,
    WATCH_S,
    BaseModelPlace,
    BootstrapSampler,
    EnsembleStore,
    PredictionScore,
    Why,
    held_out_of_a_rank,
    part,
    place_of,
    predictions,
    score_of,
    seed_of,
    store_of,
)
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.main import leave, name_failure
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


class ChildOrders:
    """What the rank says after the job: ``go``. At its end, the rank has gone and this process ends."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self.go = threading.Event()
        threading.Thread(target=self._listen, name="mlhpc-bagging", daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            if line.strip() == b"go":
                self.go.set()
        os._exit(_RANK_GONE)


def job_of(run: RunPlan, models: int, place: BaseModelPlace, local_rank: int, directory: Path) -> ChildJob:
    """Return the job of one rank of one base model: its share of the batch, and a seed of its own."""
    seed, batch = int(run.parameters.get("seed") or 0), run.parameters.get("global_batch")
    own = {
        **{name: value for name, value in run.parameters.items() if name != "bagging"},
        "seed": seed_of(seed, place.model),
    }
    if batch:
        own["global_batch"] = int(batch) // models
    plan = dataclasses.replace(run, parameters=own, ranks=run.ranks // models)
    return ChildJob(plan, place.model, place.place, local_rank, torch.get_num_threads(), str(directory))


def main() -> NoReturn:
    """Train, tell, and end the process."""
    teller = ChildPipe(int(sys.argv[1]))
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(_RANK_GONE)
    orders = ChildOrders(sys.stdin.buffer)
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
    task = prepare.load_task(run)
    score = score_of(task)
    sizes = prepare.split_batch(run, group.world)
    steps = prepare.DEVICE_BATCHES if run.data_source == "device" else run.steps + run.warmup_steps
    share = held_out_of_a_rank(score, group.world, sizes.step_samples * steps)
    held_out = share * group.world
    used: Optional[BootstrapSampler] = None
    asked: Any = None

    def sampler(length: int, place: int, world: int) -> BootstrapSampler:
        nonlocal used, asked
        parted = part(length, held_out, data_seed)
        used = BootstrapSampler(parted.drawn_from, place, world, data_seed, job.model)
        asked = parted.held_out[place::world].tolist()
        return used

    def begin() -> None:
        teller.say("ready")
        orders.go.wait()

    trained = rank.train(
        run,
        group,
        accelerator,
        Path(job.directory),
        _teller_of_progress(teller),
        draw=prepare.Draw(data_seed, held_out, sampler),
        begin=begin,
    )
    predicted = predictions(trained.trainer, score, trained.data.source.dataset, asked, sizes.micro)
    if not bool(torch.isfinite(predicted[0]).all()):
        raise WorkerFailure(
            "loss_nan", "the trained model predicts NaN or infinity; look at precision and learning rate"
        )
    teller.say("predictions", {"distinct": used.distinct if used is not None else 0.0}, predicted)
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


@dataclass(frozen=True)
class HeldOutPredictions:
    """What one rank's base model predicts for its share of the samples held out; ``distinct``: see ``BootstrapSampler``."""

    predictions: Tensor
    targets: Tensor
    distinct: float


def figures_of(
    run: RunPlan, group: Group, models: int, answers: Optional[HeldOutPredictions], failed: Mapping[int, Why]
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


def _mean(group: Group, models: int, answers: Optional[HeldOutPredictions], alive: int) -> Tensor:
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


def _row(score: PredictionScore, predictions: Tensor, targets: Tensor) -> Tensor:
    qualities = score.quality(predictions, targets)
    return torch.tensor([float(qualities.sum()), float(len(qualities)), 0.0], dtype=torch.float64)


def _figures(score: PredictionScore, table: Tensor, failed: Mapping[int, Why], models: int) -> List[Figure]:
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
            Figure(
                "hpc_ai500_flop_per_sample", float(reporting.count_ai500(task)[1]), "FLOP", "none", "first"
            )
        ]
    except NotImplementedError:  # this torch cannot run the model without data
        return []


#: How long an error without a name waits for a better reason from another rank of the base model, in seconds: whose peer
#: was killed sees a broken connection, often before anybody knows of the killing.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class TrainedBaseModel:
    """What a base model's process left: its report, and its predictions for the samples that were held out."""

    report: RankReport
    answers: HeldOutPredictions


def measure(
    run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Progress
) -> RankReport:
    """Train this rank's part of its base model in a process of its own and return what was measured.

    Raises:
        WorkerFailure: ``worker_exit``, the ranks are not M x P; or all base models failed, by the name of the first.
    """
    models, each = (int(one) for one in run.parameters["bagging"])
    if models * each != group.world:
        text = f"bagging=({models}, {each}) is {models * each} ranks, {group.world} were started"
        raise WorkerFailure("worker_exit", text)
    place = place_of(group.rank, each)
    meeting = EnsembleStore(store_of(group), group, each)
    job = job_of(run, models, place, group.local_rank, directory)
    task = {"job": to_json(job), "seed": int(run.parameters.get("seed") or 0)}
    with contextlib.closing(BaseProcess(task, {"MLHPC_BASE_MODEL": str(place.model)})) as child:
        trained = _attend(child, meeting, progress)
    meeting.ended()
    failed = meeting.await_outcome()
    if len(failed) == models:
        outcome, text = failed[0]
        raise WorkerFailure(outcome, f"all {models} base models failed, the first: {text}")
    alive = trained if place.model not in failed else None
    figures = figures_of(run, group, models, None if alive is None else alive.answers, failed)
    if alive is None:
        return _failed(run, group, accelerator, place, failed[place.model])
    events = tuple(_event(model, why) for model, why in sorted(failed.items())) if figures else ()
    return dataclasses.replace(
        alive.report,
        rank=group.rank,
        local_rank=group.local_rank,
        figures=(*alive.report.figures, *figures),
        events=events,
    )


def _attend(child: BaseProcess, meeting: EnsembleStore, progress: Progress) -> Optional[TrainedBaseModel]:
    """Hear a child to its end; tell of its failure, and return what it left, None if its base model has failed."""
    left: Dict[str, ChildMessage] = {}
    began = False
    try:
        while meeting.failure(meeting.model) is None:
            heard = child.receive(WATCH_S if began else LOOK_S)
            if heard is None:
                break
            for said in heard:
                left[said.kind] = said
                if said.kind == "progress":
                    progress(*said.body)
                elif said.kind == "ready":
                    meeting.ready()
            meeting.outcome()  # rank 0 keeps the book for all, whatever its own child does
            if not began and meeting.may_begin() and "ready" in left:
                began = True
                child.go()
        else:
            return None
        return _left(left, meeting, child)
    except (ValueError, SchemaError) as error:
        meeting.fail(("truncated_result", f"what the process that trained it said cannot be read: {error}"))
        return None


def _left(
    left: Mapping[str, ChildMessage], meeting: EnsembleStore, child: BaseProcess
) -> Optional[TrainedBaseModel]:
    report, predictions = left.get("report"), left.get("predictions")
    if report is not None and predictions is not None:
        values, targets = predictions.tensors
        answers = HeldOutPredictions(values, targets, float(predictions.body["distinct"]))
        return TrainedBaseModel(from_json(RankReport, report.body, "a base model's report"), answers)
    named = left.get("failed")
    _tell(meeting, child.why() if named is None else (str(named.body[0]), str(named.body[1])))
    return None


def _tell(meeting: EnsembleStore, why: Why) -> None:
    """Tell of a failure; one without a name only if nobody has a better reason."""
    if why[0] == "worker_exit":
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and meeting.failure(meeting.model) is None:
            meeting.may_begin()
            time.sleep(LOOK_S)
    meeting.fail(why)


def _event(model: int, why: Why) -> RunEvent:
    return RunEvent("base_model_failed", time.time_ns(), why[1], {"base_model": model, "outcome": why[0]})


def _failed(
    run: RunPlan, group: Group, accelerator: Accelerator, place: BaseModelPlace, why: Why
) -> RankReport:
    """Return the report of a rank whose base model failed: where it was, and why."""
    text = f"base model {place.model} failed: {why[0]}: {why[1]}"
    sys.stderr.write(f"{text}\n")
    now = time.time_ns()
    return RankReport(
        **reporting.who(run, group, accelerator),
        steps=0,
        samples=0,
        started_ns=now,
        ended_ns=now,
        epoch_s=0.0,
        wait_s=0.0,
        copy_s=0.0,
        warmup_s=0.0,
        step_times_s=(),
        losses=(),
        data_kind=run.data_kind,
        failed=text,
    )


if __name__ == "__main__":
    main()
