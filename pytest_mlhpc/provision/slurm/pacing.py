"""When Slurm is queried next: intervals between polls, and the pause after calls without an answer. Pure but for a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

#: Seconds from a submission to the first query: what a job waits for is known by then.
FIRST_POLL_S = 3.0
#: Bounds of the time between queries while jobs wait; in between a tenth of the longest wait.
MIN_POLL_S, MAX_POLL_S = 10.0, 120.0
#: A batch whose heartbeat (every 5 s) is older than this is queried, in seconds: two missed beats and a slow file system.
#: A batch that was killed silently is reported within 15 s that way; a false alarm costs one query.
SILENT_BATCH_S = 12.0
#: A query that precedes the end of this tolerance by less counts as made for the silence, in seconds.
RECENT_POLL_S = 0.5
#: Least time between queries for a reason that a file gave.
URGENT_POLL_S = 2.0
#: Time between queries while Slurm does not answer, first and last.
MIN_RETRY_S, MAX_RETRY_S = 5.0, 60.0
#: Cancelled jobs may take so long to go, in seconds: KillWait is 30 s by default, and epilogs follow.
GONE_S = 90.0
#: Failures beyond which the pause grows no more: 2.0 to the power of 1024 is too much for a float.
MAX_DOUBLINGS = 10


@dataclass(frozen=True)
class PollState:
    """What the time of the next query depends on. Ages are in seconds; None: there is none."""

    youngest_wait: float | None  #: age of the youngest pending job that no query has seen yet
    longest_wait: float | None  #: age of the oldest pending job
    silence: float | None  #: longest time without heartbeat of a running batch
    urgent: bool  #: a file shows a fault
    failures: int  #: queries in a row that got no answer
    limit_in: float | None = None  #: time until a pending job has waited for its limit; negative: it has


def next_poll_in(now: PollState, since_last: float) -> float | None:
    """Return the seconds until the next query (0: now), *since_last* seconds after the last one; None: no query is needed."""
    if now.failures:
        return max(0.0, retry_pause_s(now.failures) - since_last)
    waits: list[float] = []
    if now.urgent:
        waits.append(URGENT_POLL_S - since_last)
    if now.silence is not None:
        waits.append(_silence_poll_in(now.silence, since_last))
    if now.youngest_wait is not None:
        waits.append(max(FIRST_POLL_S - now.youngest_wait, MIN_POLL_S - since_last))
    if now.longest_wait is not None:
        waits.append(min(max(now.longest_wait / 10, MIN_POLL_S), MAX_POLL_S) - since_last)
    if now.limit_in is not None:
        waits.append(max(now.limit_in, URGENT_POLL_S - since_last))
    return max(0.0, min(waits)) if waits else None


def retry_pause_s(failures: int) -> float:
    """Return the pause after *failures* (at least one) calls in a row without an answer, in seconds."""
    return float(min(MIN_RETRY_S * 2.0 ** min(failures - 1, MAX_DOUBLINGS), MAX_RETRY_S))


def _silence_poll_in(silence: float, since_last: float) -> float:
    """Return the seconds until a silent batch is queried: when the silence gets too long, then at the usual interval."""
    overdue = silence - SILENT_BATCH_S
    if since_last > overdue + RECENT_POLL_S:
        return -overdue
    return MIN_POLL_S - since_last


class Backoff:
    """The pause after calls without an answer. All kinds of calls of a client share it: each may take its whole time limit.

    Args:
        monotonic: the clock, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.trouble = ""  #: the error of the last call without an answer
        self._monotonic = monotonic
        self._failures: Counter[str] = Counter()  #: kind of call -> its calls in a row without an answer
        self._until = float("-inf")

    def waits(self) -> bool:
        """Return whether Slurm must not be called now."""
        return self._monotonic() < self._until

    def failed(self, kind: str, error: Exception) -> None:
        """Note that a call got no answer."""
        self._failures[kind] += 1
        self._until = self._monotonic() + retry_pause_s(self._failures[kind])
        self.trouble = str(error)

    def answered(self, kind: str) -> None:
        """Note that a call was answered. Other kinds stay paused: Slurm may serve queries and refuse submissions."""
        del self._failures[kind]
