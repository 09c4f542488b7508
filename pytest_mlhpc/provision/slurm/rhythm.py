"""When to ask Slurm again: seldom, and at once only where a file has already said that something is wrong."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds from a submission to the first query: what a job waits for is known by then.
FIRST_S = 3.0
#: Bounds of the time between queries while jobs wait; in between a tenth of the longest wait.
LEAST_S, MOST_S = 10.0, 120.0
#: A batch whose heartbeat (every 5 s) was not seen for so long is asked about: two beats missed and a slow file system. One
#: that was killed without a word is named within 15 s that way; a false alarm costs one query.
SILENT_S = 12.0
#: A query that was made so shortly before a silence was too long counts as made for it, in seconds.
JUST_ASKED_S = 0.5
#: Least time between queries for a reason that a file gave.
URGENT_S = 2.0
#: Time between queries while Slurm does not answer, first and last.
AGAIN_FIRST_S, AGAIN_MOST_S = 5.0, 60.0
#: Failures beyond which the pause grows no more: 2.0 to the power of 1024 is too much for a float.
MOST_DOUBLED = 10


@dataclass(frozen=True)
class Situation:
    """What the rhythm depends on; ages in seconds, None: there is none."""

    youngest_wait: float | None  #: age of the youngest pending job that no query has seen yet
    longest_wait: float | None  #: age of the oldest pending job
    silence: float | None  #: longest time without heartbeat of a running batch
    urgent: bool  #: a file says that something is wrong
    failures: int  #: queries in a row that got no answer
    limit_in: float | None = None  #: time until a pending job has waited for its limit; negative: it has


def due_in(now: Situation, since_last: float) -> float | None:
    """Return in how many seconds to ask (0: now), *since_last* seconds after the last query; None: nothing to ask."""
    if now.failures:
        return max(0.0, pause_after(now.failures) - since_last)
    waits: list[float] = []
    if now.urgent:
        waits.append(URGENT_S - since_last)
    if now.silence is not None:
        waits.append(_silent(now.silence, since_last))
    if now.youngest_wait is not None:
        waits.append(max(FIRST_S - now.youngest_wait, LEAST_S - since_last))
    if now.longest_wait is not None:
        waits.append(min(max(now.longest_wait / 10, LEAST_S), MOST_S) - since_last)
    if now.limit_in is not None:
        waits.append(max(now.limit_in, URGENT_S - since_last))
    return max(0.0, min(waits)) if waits else None


def pause_after(failures: int) -> float:
    """Return how long to leave Slurm alone after so many calls in a row without answer (at least one), in seconds."""
    return float(min(AGAIN_FIRST_S * 2.0 ** min(failures - 1, MOST_DOUBLED), AGAIN_MOST_S))


def _silent(silence: float, since_last: float) -> float:
    """Ask when the silence gets too long, however lately that was done for another reason; then at the usual pace."""
    too_long_for = silence - SILENT_S
    if since_last > too_long_for + JUST_ASKED_S:
        return -too_long_for
    return LEAST_S - since_last
