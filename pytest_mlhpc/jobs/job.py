"""A declared job on its way: its state as the terminal shows it, its attempts, and its outcome once there is one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.outcome import Outcome


@dataclass(eq=False)
class Job:
    """Written by its driver's thread alone; others read single fields, and the outcome once ``done`` is set."""

    spec: JobSpec
    state: JobState = JobState.DECLARED
    reason: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)  #: body of the last progress line
    attempts: list[Attempt] = field(default_factory=list)
    lost: list[Attempt] = field(
        default_factory=list
    )  #: attempts that a node or the scheduler took, run again
    excluded: set[str] = field(default_factory=set)  #: nodes that failed under it
    refused: Failure | None = None  #: why a re-run could not be had
    pending: int = 0  #: attempts submitted or waiting to be
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)
    taken: bool = False  #: its test has had the outcome
    previous: Job | None = None  #: the one before it in test order

    @property
    def ready(self) -> bool:
        """Whether it may be submitted.

        Nodes that a test holds are asked for when nothing before them can run again. Otherwise they would wait idle for
        their test, that one for the tests before it, and those for re-runs that wait for the nodes.
        """
        before = self.previous if self.spec.held else None
        while before is not None and before.done.is_set():
            before = before.previous
        return before is None

    @property
    def lent(self) -> bool:
        """Whether its test was given nodes, which are its own until it is over."""
        return self.outcome is not None and self.outcome.held is not None

    def conclude(self, outcome: Outcome) -> None:
        """Publish the outcome; the first one counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.state = JobState.CANCELLED if _cancelled(outcome) else JobState.ENDED
            self.done.set()

    def fail(self, outcome: str, text: str) -> None:
        """End the job without a measurement."""
        directory = self.attempts[-1].directory if self.attempts else ""
        self.conclude(
            Outcome(
                node_id=self.spec.node_id,
                benchmark=self.spec.benchmark,
                failure=Failure(outcome, text, directory),
                attempts=len(self.attempts),
                directory=directory,
            )
        )


def _cancelled(outcome: Outcome) -> bool:
    return outcome.failure is not None and outcome.failure.outcome == "cancelled"
