"""Bad series, benchmarks and nodes, and observations of them, for tests of alerts."""

from typing import Any

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.model import DAY_NS, Bad, Observation, Subject

#: 2027-01-01, 01:00 UTC.
FIRST_NS = 1_798_765_200_000_000_000


def night(number: float) -> int:
    """Return the moment of a night."""
    return FIRST_NS + int(number * DAY_NS)


def series(
    benchmark: str = "test_unet", metric: str = "effective_throughput", system: str = "cirrus"
) -> Subject:
    return Subject(Kind.REGRESSION, system, "standard", "default", "", benchmark, metric)


def bad(subject: Subject | None = None, since: float = 30, worse_by: float = 0.06, **changes: Any) -> Bad:
    """Return a series that is worse since a night."""
    fields: dict[str, Any] = {
        "subject": subject or series(), "first_ns": night(since - 1), "last_ns": night(since), "unit": "samples/s",
        "before": 100.0, "after": 100.0 * (1 - worse_by), "worse_by": worse_by,
    }  # fmt: skip
    return Bad(**{**fields, **changes})


def seen(at: float, *bads: Bad, known: tuple[Subject, ...] = (), **changes: Any) -> Observation:
    """Return what a night's look found; subjects of *bads* are known, too."""
    by_subject = {one.subject: one for one in bads}
    every = frozenset({*known, *by_subject})
    measured = {"cirrus": frozenset(f"standard:{name}" for name in "abcde")}
    return Observation(night(at), by_subject, every, **{"measured": measured, **changes})
