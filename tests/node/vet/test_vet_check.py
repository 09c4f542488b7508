"""A check's row and its examination of one node: what becomes of values, and when a check says that it passed."""

import json
import math
from pathlib import Path

import pytest

from pytest_mlhpc.node.vet import check
from pytest_mlhpc.node.vet.check import Check, Examination, LoadWatch
from pytest_mlhpc.node.vet.checks import all_checks, job_environment
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Origin, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import Bound, Policy, built_in, tables

POLICY = Policy(
    [
        Bound("a.errors", "errors", "us", warn=1, fail=10, unit="errors"),
        Bound("a.free", "free memory", "us", warn=5, fail=2, better="higher"),
    ]
)


def examination() -> Examination:
    return Examination("a", Machine(), Context(POLICY))


@pytest.mark.parametrize(
    ("key", "value", "severity"),
    [
        ("a.errors", 0, None),
        ("a.errors", 1, Severity.WARNING),
        ("a.errors", 10, Severity.CRITICAL),
        ("a.errors", 10**400, Severity.CRITICAL),
        ("a.free", 6, None),
        ("a.free", 5, Severity.WARNING),
        ("a.free", 2, Severity.CRITICAL),
        ("a.free", math.inf, None),
    ],
)
def test_a_value_is_a_finding_from_its_bound_on(key: str, value: float, severity: Severity | None) -> None:
    exam = examination()
    assert exam.judge(key, value, "so much") is (severity is not None)
    assert [one.severity for one in exam.findings] == ([] if severity is None else [severity])


def test_a_finding_has_its_bounds_name_and_unit_and_a_figure_that_json_can_hold() -> None:
    exam = examination()
    exam.judge("a.errors", 3, "three", "GPU 1", Origin.USER)
    exam.judge("a.free", -math.inf, "none")
    assert exam.findings == [
        Finding("a", Severity.WARNING, "three", "GPU 1", "a.errors", Origin.USER, "errors", 3.0, "errors"),
        Finding("a", Severity.CRITICAL, "none", rule="a.free", metric="free", unit="1"),
    ]


@pytest.mark.parametrize(
    ("found", "severities"),
    [
        ([], [Severity.PASS]),
        ([Severity.INFO], [Severity.INFO, Severity.PASS]),
        ([Severity.WARNING], [Severity.WARNING]),
        ([Severity.UNKNOWN, Severity.INFO], [Severity.UNKNOWN, Severity.INFO]),
    ],
)
def test_a_check_passes_only_where_nothing_asks_for_anything(
    found: list[Severity], severities: list[Severity]
) -> None:
    def judge(exam: Examination) -> str:
        for severity in found:
            exam.add(severity, "something")
        return "all is well"

    outcome = Check("a", "Looks.", judge, ("/proc",), 0.1).examine(Machine(), Context(POLICY))
    assert [one.severity for one in outcome.findings] == severities


def test_what_a_check_for_a_job_finds_is_its_users_to_mend() -> None:
    def judge(exam: Examination) -> None:
        exam.judge("a.errors", 1, "one")
        exam.unknown("a.free", "nobody tells")
        exam.fact("version", "1")

    outcome = Check("a", "Looks.", judge, ("/proc",), 0.1, purpose="job").examine(Machine(), Context(POLICY))
    assert {one.origin for one in (*outcome.findings, *outcome.facts)} == {Origin.USER}


def test_a_watch_that_has_nothing_to_watch_is_not_asked_again() -> None:
    def never(*_: object) -> str:
        raise AssertionError("it is asked")

    watch = LoadWatch("a", "Watches.", lambda machine, context: None, never, never, ("/proc",), 0.1)
    state = watch.sample(Machine(), watch.start(Machine(), Context(POLICY)))
    assert watch.end(Machine(), Context(POLICY), state) == CheckOutcome()


def test_our_own_bounds_are_each_there_once_and_dated() -> None:
    bounds = built_in().bounds
    assert len(bounds) == len(tables()["bounds"])
    assert {bound.date for bound in bounds.values()} == {tables()["as_of"]}
    stages = [one for bound in bounds.values() for one in (bound.warn, bound.fail) if one is not None]
    assert all(isinstance(one, int | float) and math.isfinite(one) for one in stages)


def test_each_row_of_checks_json_is_a_check_and_names_all_that_its_code_lists() -> None:
    checks, watches = all_checks()
    described = json.loads((Path(check.__file__).with_name("checks.json")).read_text(encoding="utf-8"))
    assert sorted(one.name for one in (*checks, *watches)) == sorted(described)
    reads = {one.name: set(one.reads) for one in checks}
    assert reads["job_environment"] == {f"{prefix}*" for prefix in job_environment.PREFIXES}
    assert reads["job_software"] > {*job_environment.LIBRARIES, *job_environment.IMAGES}
