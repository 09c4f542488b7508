"""PAYLOAD. One rank of an ensemble: M base models on P devices each, side by side and without a word between them.

The rank's own process trains nothing: it starts one that does (``process.py``), and is there when that one dies. A base
model whose ranks all reported counts; one that failed is named, and its ranks are in no figure. In the end, and only then,
the ranks add up what their base models predict.

All base models begin their timed windows together, so that samples of all over the slowest one's time are what the
devices do at once: the metric ``effective_throughput`` of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Mapping, Optional

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Event, RankReport, SchemaError, from_json, to_json
from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.bagging.bootstrap import Place, place_of
from pytest_mlhpc.node.worker.bagging.child import job_of
from pytest_mlhpc.node.worker.bagging.figures import Answers, figures_of
from pytest_mlhpc.node.worker.bagging.meeting import LOOK_S, WATCH_S, Meeting, Why, store_of
from pytest_mlhpc.node.worker.bagging.process import BaseProcess, Said
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.reporting import Progress

#: How long an error without a name waits for a better reason from another rank of the base model, in seconds: whose peer
#: was killed sees a broken connection, often before anybody knows of the killing.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Trained:
    """What a base model's process left: its report, and its predictions for the samples that were held out."""

    report: RankReport
    answers: Answers


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
    meeting = Meeting(store_of(group), group, each)
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
        alive.report, rank=group.rank, local_rank=group.local_rank, figures=figures, events=events
    )


def _attend(child: BaseProcess, meeting: Meeting, progress: Progress) -> Optional[Trained]:
    """Hear a child to its end; tell of its failure, and return what it left, None if its base model has failed."""
    left: Dict[str, Said] = {}
    began = False
    try:
        while meeting.failure(meeting.model) is None:
            heard = child.hear(WATCH_S if began else LOOK_S)
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


def _left(left: Mapping[str, Said], meeting: Meeting, child: BaseProcess) -> Optional[Trained]:
    report, predictions = left.get("report"), left.get("predictions")
    if report is not None and predictions is not None:
        values, targets = predictions.tensors
        answers = Answers(values, targets, float(predictions.body["distinct"]))
        return Trained(from_json(RankReport, report.body, "a base model's report"), answers)
    named = left.get("failed")
    _tell(meeting, child.why() if named is None else (str(named.body[0]), str(named.body[1])))
    return None


def _tell(meeting: Meeting, why: Why) -> None:
    """Tell of a failure; one without a name only if nobody has a better reason."""
    if why[0] == "worker_exit":
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and meeting.failure(meeting.model) is None:
            meeting.may_begin()
            time.sleep(LOOK_S)
    meeting.fail(why)


def _event(model: int, why: Why) -> Event:
    return Event("base_model_failed", time.time_ns(), why[1], {"base_model": model, "outcome": why[0]})


def _failed(run: RunPlan, group: Group, accelerator: Accelerator, place: Place, why: Why) -> RankReport:
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
