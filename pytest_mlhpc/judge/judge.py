"""The judge: attempts of one run against baselines and history. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.judge.verdict import Judgement
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.schema import Measurement


def judge(
    attempts: Sequence[Measurement],
    spec: JobSpec,
    baselines: Mapping[str, Entry],
    history: Mapping[str, Sequence[float]],
    *,
    local: bool,
    update: bool,
    reruns_allowed: int,
    in_ci: bool,
    calibration_reference: float | None = None,
    last_good: Record | None = None,
    commit: str = "",
) -> Judgement:
    """Judge one run.

    Args:
        attempts: valid measurements, attempt 0 first, then the re-runs that ended well.
        spec: what the test declared; ``spec.judged`` are the metrics to judge.
        baselines: metric -> entry (:meth:`BaselineBook.for_spec`).
        history: metric -> values of earlier accepted records, oldest first (:meth:`Index.history`), tonight's not
            among them.
        local: whether the system is `local`: provisional baselines, wider tolerance, calibration.
        update: ``--update-baselines``: what lies outside is accepted, nothing is re-run.
        reruns_allowed: how many more re-runs can be had now; 0 = none (``--no-rerun``, or the session's are used up).
        in_ci: a missing baseline is a failure, on `local` too.
        calibration_reference: rate of the calibration kernel when the baseline was taken, where the entry has none.
        last_good: the last record of this benchmark that passed, for the explanation.
        commit: the commit under test, for the explanation.

    Returns:
        A judgement. While ``reruns_wanted`` is positive it is provisional: run that many more attempts and call again
        with all of them.
    """
    raise NotImplementedError


def failure_of(judgement: Judgement) -> Failure | None:
    """Return the failure that a final judgement means for its test, or None when the test may pass.

    regressed, drifted -> the same names; a judged metric without baseline -> ``no_baseline``; absent ->
    ``metric_missing``; not a number -> ``metric_invalid``; too few re-runs ended -> ``reruns_incomplete``
    (infrastructure). passed, improved, new and inconclusive (machine slower or busy) are no failures.
    """
    raise NotImplementedError


def entries_to_put(
    attempts: Sequence[Measurement],
    judgement: Judgement,
    baselines: Mapping[str, Entry],
    *,
    local: bool,
    accepted_by: str,
    reason: str,
    now_ns: int,
    environment: str = "",
) -> dict[str, Entry]:
    """Return metric -> entry to put in the book: for metrics that are ``new``, or that ``--update-baselines`` accepts.

    Entries that the result agrees with (inside the fence) are not touched, so that diffs show news only.
    """
    raise NotImplementedError
