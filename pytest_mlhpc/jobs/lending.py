"""Nodes that a test holds: lent to it as soon as their batch is up, taken back when it is over."""

from __future__ import annotations

from pathlib import Path

from pytest_mlhpc.batch.mail import REQUESTS, append
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.judge.verdict import Judgement, Verdict
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.results.outcome import Held, Outcome


def lend(job: Job, attempt: Attempt, started: Message) -> None:
    """Give *job* its outcome, with which its test begins, although its allocation goes on."""
    if job.done.is_set():
        return
    named = started.body.get("nodes")
    nodes = tuple(map(str, named)) if isinstance(named, list) else attempt.nodes
    attempt.nodes = nodes or attempt.nodes
    held = Held(
        id=attempt.job_id or attempt.run.run_id,
        nodes=nodes,
        partition=job.spec.target.partition.name,
        cores_per_node=job.spec.target.partition.nodes.cores,
        directory=str(folder_of(attempt)),
    )
    job.conclude(
        Outcome(
            node_id=job.spec.node_id,
            benchmark=job.spec.benchmark,
            judgement=Judgement(Verdict.UNJUDGED),
            attempts=len(job.attempts),
            record_id=attempt.run.run_id,
            directory=attempt.directory,
            held=held,
        )
    )
    job.state, job.reason = JobState.RUNNING, ""


def ask_back(attempt: Attempt) -> bool:
    """Tell the batch that its nodes are no longer wanted; return whether that could be told."""
    try:
        append(folder_of(attempt) / REQUESTS, {"kind": "release"})
    except OSError:
        return False
    return True


def folder_of(attempt: Attempt) -> Path:
    """Return the folder of requests and answers; a held run never shares its allocation."""
    return Path(attempt.directory) / attempt.run.run_id
