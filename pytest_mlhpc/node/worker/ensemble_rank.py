"""One rank of an ensemble: M base models on P devices each, and their figures.

With ``until="quality"`` base models train in rounds. A round is ``evaluate_every`` training epochs of each base model, then
an evaluation of the ensemble: of the mean of the predictions that the base models alive make. The first round in which it
reaches the target ends all; ``time_to_train`` is that of the slowest base model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, RankReport, RunEvent, SchemaError, from_json, to_json
from pytest_mlhpc.node.worker import prepare, reporting
from pytest_mlhpc.node.worker.base import Accelerator, Task
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.ensemble import (
    LOOK_S,
    WATCH_S,
    BaseModelPlace,
    EnsembleStore,
    PredictionScore,
    Why,
    place_of,
    score_of,
    store_of,
)
from pytest_mlhpc.node.worker.ensemble_process import BaseProcess, ChildMessage, job_of
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.quality.rules import settings_of
from pytest_mlhpc.node.worker.reporting import Progress
from pytest_mlhpc.node.worker.workloads.fields.parallel import BAGGING_ROUNDS


@dataclass(frozen=True)
class HeldOutPredictions:
    """What one rank's base model predicts for its share of the samples held out or evaluated; ``distinct``: see ``BootstrapSampler``."""

    predictions: Tensor
    targets: Tensor
    distinct: float


class EnsembleGroups:
    """The groups in which ranks put their base models' predictions together. All ranks make it and call it in the same order."""

    def __init__(self, run: RunPlan, group: Group, models: int) -> None:
        each = group.world // models
        self.models, self.place = models, place_of(group.rank, each)
        self._every: Any = None
        self._same_place: Any = None
        if group.world == 1:
            return
        timeout = dt.timedelta(seconds=run.time_limit_s)
        members = [list(range(group.world))]
        members += [[model * each + place for model in range(models)] for place in range(each)]
        self._every, *made = (dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in members)
        self._same_place = made[self.place.place]

    def agree(self, *, alive: bool, last: bool) -> Tuple[List[int], bool]:
        """Return which base models are *alive* on all of their ranks, and whether any rank's is at its *last* round."""
        said = torch.ones(self.models + 1, dtype=torch.int64)
        said[self.place.model], said[self.models] = int(alive), int(not last)
        self._reduce(said, dist.ReduceOp.MIN, self._every)
        return [model for model in range(self.models) if said[model]], not said[self.models]

    def qualities(
        self, score: PredictionScore, answers: Optional[HeldOutPredictions], alive: Sequence[int]
    ) -> Tensor:
        """Return the sum of samples' qualities, their number, and the share of distinct samples: float64 (models + 1, 3).

        A row is a base model's; the last is that of the ensemble of those that are *alive*. *answers* of others are ignored.
        """
        if self.place.model not in alive:
            answers = None
        mean = self._sum(answers) / len(alive)
        table = torch.zeros(self.models + 1, 3, dtype=torch.float64)
        if answers is not None:
            table[self.place.model] = _row(score, answers.predictions, answers.targets)
            table[self.place.model, 2] = answers.distinct if self.place.place == 0 else 0.0
        if answers is not None and self.place.model == min(alive):
            table[self.models] = _row(score, mean, answers.targets)
        self._reduce(table, dist.ReduceOp.SUM, self._every)
        return table

    def _sum(self, answers: Optional[HeldOutPredictions]) -> Tensor:
        """Return the sum of the base models' predictions for this rank's share of the samples."""
        own = torch.zeros(0) if answers is None else answers.predictions
        # Who failed knows no shape, so it learns it here.
        shape = torch.zeros(9, dtype=torch.int64)
        if answers is not None:
            shape[: own.dim() + 1] = torch.tensor([own.dim(), *own.shape])
        self._reduce(shape, dist.ReduceOp.MAX, self._same_place)
        if answers is None:
            own = torch.zeros(shape[1 : int(shape[0]) + 1].tolist())
        summed = own.clone()
        self._reduce(summed, dist.ReduceOp.SUM, self._same_place)
        return summed

    def _reduce(self, values: Tensor, operation: Any, ranks: Any) -> None:
        if ranks is not None:
            dist.all_reduce(values, op=operation, group=ranks)


class Rounds:
    """The evaluations of an ensemble that is trained until a target is reached. Every rank takes part in each until ``over``."""

    def __init__(self, run: RunPlan, groups: EnsembleGroups) -> None:
        self._groups, self._target = groups, settings_of(run).target
        self._score = score_of(prepare.load_task(run))
        self.number, self.over = 0, False

    def evaluate(self, answers: Optional[HeldOutPredictions], *, last: bool) -> float:
        """Return the ensemble's quality in this round; NaN where all base models have failed.

        *answers* is None where this rank's base model has failed; *last* says that it trains no longer.
        """
        alive, last = self._groups.agree(alive=answers is not None, last=last)
        self.number += 1
        if not alive:
            self.over = True
            return math.nan
        summed, count, _ = self._groups.qualities(self._score, answers, alive)[-1].tolist()
        quality = float(summed / count)
        self.over = last or self._target.reached(quality)
        return quality

    def finish(self, meeting: EnsembleStore) -> None:
        """Take part without answers until the others are over: this rank's base model has ended."""
        while not meeting.may_begin():
            time.sleep(LOOK_S)
        while not self.over:
            self.evaluate(None, last=False)


def figures_of(
    run: RunPlan,
    groups: EnsembleGroups,
    answers: Optional[HeldOutPredictions],
    failed: Mapping[int, Why],
    rounds: Optional[Rounds] = None,
) -> Tuple[Figure, ...]:
    """Return the ensemble's figures on the first rank of the first base model that did not fail, nothing elsewhere.

    *answers* is None on ranks of a base model that failed. All ranks must call this.
    """
    models, place = groups.models, groups.place
    alive = [model for model in range(models) if model not in failed]
    task = prepare.load_task(run)
    score = score_of(task)
    table = groups.qualities(score, answers, alive)
    if place.model != alive[0] or place.place:
        return ()
    own = [] if rounds is None else [Figure(BAGGING_ROUNDS, float(rounds.number), "1", "lower", "first")]
    return (*_figures(score, table, failed, models), *own, *_operations(task))


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
    groups = EnsembleGroups(run, group, models)
    rounds = Rounds(run, groups) if run.parameters.get("until") == "quality" else None
    job = job_of(run, models, place, group.local_rank, directory)
    task = {"job": to_json(job), "seed": int(run.parameters.get("seed") or 0)}
    with contextlib.closing(BaseProcess(task, {"MLHPC_BASE_MODEL": str(place.model)})) as child:
        trained = _attend(child, meeting, progress, rounds)
    if rounds is not None:
        rounds.finish(meeting)
    meeting.ended()
    failed = meeting.await_outcome()
    if len(failed) == models:
        groups.agree(
            alive=False, last=True
        )  # others ask rank 0's store for the outcome, so all have it before it ends
        outcome, text = next((why for why in failed.values() if why[0] == "target_missed"), failed[0])
        said = "" if outcome == "target_missed" else f"all {models} base models failed, the first: "
        raise WorkerFailure(outcome, f"{said}{text}")
    alive = trained if place.model not in failed else None
    figures = figures_of(run, groups, None if alive is None else alive.answers, failed, rounds)
    if alive is None:
        return _failed(run, group, accelerator, place, failed[place.model])
    lost = tuple(_event(model, why) for model, why in sorted(failed.items()))
    return dataclasses.replace(
        alive.report,
        rank=group.rank,
        local_rank=group.local_rank,
        figures=(*alive.report.figures, *figures),
        events=(*alive.report.events, *lost) if figures else (),
    )


def _attend(
    child: BaseProcess, meeting: EnsembleStore, progress: Progress, rounds: Optional[Rounds]
) -> Optional[TrainedBaseModel]:
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
                elif said.kind == "predictions" and rounds is not None:
                    quality = rounds.evaluate(_answers(said), last=bool(said.body["last"]))
                    child.answer(quality, over=rounds.over)
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
        found = from_json(RankReport, report.body, "a base model's report")
        return TrainedBaseModel(found, _answers(predictions))
    named = left.get("failed")
    _tell(meeting, child.why() if named is None else (str(named.body[0]), str(named.body[1])))
    return None


def _answers(said: ChildMessage) -> HeldOutPredictions:
    values, targets = said.tensors
    return HeldOutPredictions(values, targets, float(said.body["distinct"]))


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
