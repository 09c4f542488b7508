"""What the judge says: one verdict for a run, one for each judged metric, each with its evidence."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """The verdicts, from best to worst news. ``NEW`` has no accepted baseline yet."""

    PASSED = "passed"
    IMPROVED = "improved"
    WRONG_BASELINE = "wrong_baseline"  #: a month without a change lies at another level than the accepted one
    NEW = "new"
    INCONCLUSIVE = "inconclusive"
    SUSPECT = "suspect"  #: it may be a loss; the next nights decide
    DRIFTED = "drifted"
    REGRESSED = "regressed"
    BELOW_REFERENCE = "below_reference"  #: worse than what the test promises for the system
    UNJUDGED = "unjudged"  #: judge=False, or nothing was measured


#: The figure is worse than it may be: the test fails.
WORSE = (Verdict.BELOW_REFERENCE, Verdict.REGRESSED, Verdict.DRIFTED)
#: The test passes, and the figure should be looked at.
NOTABLE = (Verdict.SUSPECT, Verdict.INCONCLUSIVE, Verdict.WRONG_BASELINE, Verdict.IMPROVED)
#: There is nothing to look at.
FINE = (Verdict.PASSED, Verdict.NEW, Verdict.UNJUDGED)
#: The figure may be compared with others as what the program usually does.
GOOD = (Verdict.PASSED, Verdict.IMPROVED, Verdict.WRONG_BASELINE, Verdict.NEW)


@dataclass(frozen=True)
class MetricVerdict:
    """One judged metric. ``change`` is relative and positive when better; ``width`` is the fence as a fraction."""

    name: str
    value: float
    unit: str
    better: str
    baseline: float | None
    change: float | None
    width: float
    verdict: Verdict
    reruns: tuple[float, ...] = ()
    reason: str = ""
    epoch: str = ""  #: what changed since its baseline was accepted, which it is not judged by for that
    fence: tuple[float, float] | None = None  #: accepted value and width, where a reference decided
    settling: int | None = None  #: nights, tonight among them, of those that settle the level of a new series


@dataclass(frozen=True)
class Judgement:
    """The verdict of a run. ``explanation`` is lines of text for people; ``accept_command`` takes the new value."""

    verdict: Verdict
    metrics: tuple[MetricVerdict, ...] = ()
    explanation: tuple[str, ...] = ()
    accept_command: str = ""
    epoch: str = ""  #: what changed since its baseline, or its newest record: a new epoch begins
    reruns_wanted: int = 0  #: more attempts are needed before this can be final
