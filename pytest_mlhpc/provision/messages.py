"""Messages of runs that the controller makes itself, as if they had come over a channel."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.results.schema import Measurement, to_json


def result_message(run: RunPlan, found: Measurement | Failure) -> Message:
    """Return the measurement or failed message that says what a run came to."""
    if isinstance(found, Failure):
        return run_message(run, "failed", {"outcome": found.outcome, "text": found.text, "log": found.log})
    return run_message(run, "measurement", to_json(found))


def run_message(run: RunPlan, kind: str, body: Mapping[str, object]) -> Message:
    """Return one message of *run*."""
    return Message(run.run_id, run.nonce, kind, body)
