"""Each check and each bound matters: without it, or with it turned, at least one case of the corpus gets another verdict.

Driven by what there is: a new check or bound without a case that needs it fails here.
"""

import dataclasses
import math
from unittest.mock import Mock

import pytest
from corpus import Case, all_cases, group_of, judged, outcomes, rows

from pytest_mlhpc.node.vet.check import Check, LoadWatch
from pytest_mlhpc.node.vet.checks import all_checks, kernel_log
from pytest_mlhpc.node.vet.finding import Origin, Severity
from pytest_mlhpc.node.vet.machine import Unreadable
from pytest_mlhpc.node.vet.passive import attempt
from pytest_mlhpc.node.vet.policy import Bound, Policy, built_in

CASES = all_cases()
CHECKS, WATCHES = all_checks()
NAMES = sorted({one.name for one in (*CHECKS, *WATCHES)})

#: Bounds of these first words are asked by the judge, which compares nodes; its simulations turn them.
OF_THE_JUDGE = frozenset({"judge", "peers", "pairs", "vote", "history", "floor", "clocks"})

BOUNDS = [bound for bound in built_in().bounds.values() if bound.key.partition(".")[0] not in OF_THE_JUDGE]


def _breaks(case: Case, mutant: Policy) -> bool:
    """Return whether a case gets another verdict by *mutant*; a crash is one as well."""
    try:
        return rows(outcomes(case, mutant)) != case.expected
    except Exception:  # noqa: BLE001 - whatever a mutant raises, it is found
        return True


def _told_by(case: Case, word: str) -> bool:
    return any(word in (row[0], row[2]) for row in case.expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_check_that_is_left_out_is_missed(name: str) -> None:
    looks = [one for one in CHECKS if one.name != name]
    watches = [one for one in WATCHES if one.name != name]
    suspects = [case for case in CASES if _told_by(case, name)]
    assert any(rows(outcomes(case, None, looks, watches)) != case.expected for case in suspects), (
        f"no case of the corpus needs the check {name}"
    )


def _mutants(bound: Bound) -> list[object]:
    always = -math.inf if bound.better == "lower" else math.inf
    return [
        pytest.param(dataclasses.replace(bound, **{stage: value}), id=f"{bound.key}: {stage} is {what}")
        for stage in ("warn", "fail")
        if getattr(bound, stage) is not None
        for what, value in (("never reached", None), ("always reached", always))
    ]


@pytest.mark.parametrize("mutant", [mutant for bound in BOUNDS for mutant in _mutants(bound)])
def test_a_bound_that_is_turned_gives_some_case_another_verdict(mutant: Bound) -> None:
    asking = [case for case in CASES if mutant.key in judged(case)[1]]
    suspects = sorted(asking, key=lambda case: not _told_by(case, mutant.key))
    assert suspects, f"no case of the corpus asks for {mutant.key}"
    assert any(_breaks(case, built_in().changed([mutant])) for case in suspects), (
        f"none of {len(suspects)} cases that ask for {mutant.key} needs it as it is"
    )


@pytest.mark.parametrize("place", range(len(kernel_log._PLAIN)))
def test_a_pattern_of_the_kernel_log_that_is_left_out_is_missed(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, pattern, _ = kernel_log._PLAIN[place]
    left = kernel_log._PLAIN[:place] + kernel_log._PLAIN[place + 1 :]
    monkeypatch.setattr(kernel_log, "_PLAIN", left)
    suspects = [case for case in CASES if _told_by(case, rule)]
    assert any(_breaks(case, built_in()) for case in suspects), f"no case needs {pattern.pattern!r}"


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda one: one.key)
def test_every_bound_says_what_it_means_and_where_it_is_from(bound: Bound) -> None:
    assert all((bound.meaning, bound.source, bound.better in {"lower", "higher"}))
    assert (bound.warn, bound.fail) != (None, None)


def test_no_two_checks_have_one_name() -> None:
    assert len(NAMES) == len([*CHECKS, *WATCHES])


@pytest.mark.parametrize("check", [*CHECKS, *WATCHES], ids=lambda one: one.name)
def test_every_check_says_what_it_costs_and_reads(check: Check | LoadWatch) -> None:
    assert check.level in {"quick", "deep"}
    assert check.purpose in {"", "job"}
    assert check.cost_s >= 0
    assert all((check.reads, group_of(check)))


@pytest.mark.parametrize("one", [*CHECKS, *WATCHES], ids=lambda one: one.name)
def test_what_a_check_for_a_job_cannot_read_is_its_users_to_mend_and_else_the_nodes(
    one: Check | LoadWatch,
) -> None:
    (finding,) = attempt(one, Mock(side_effect=Unreadable("/proc/nothing cannot be read"))).findings
    assert (finding.check, finding.severity, finding.rule) == (one.name, Severity.UNKNOWN, "unreadable")
    assert finding.origin is (Origin.USER if one.name.startswith("job_") else Origin.NODE)
