"""Each check and each bound matters: without it, or with it turned, at least one case of the corpus gets another verdict.

Driven by what there is: a new check or bound without a case that needs it fails here.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
from corpus import Case, all_cases, group_of, judged, outcomes, rows

from pytest_mlhpc.vet import kernel_events
from pytest_mlhpc.vet.checks import all_checks
from pytest_mlhpc.vet.policy import Bound, Policy, built_in

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


def _mutants(bound: Bound) -> list[tuple[str, Bound]]:
    always = -math.inf if bound.better == "lower" else math.inf
    return [
        (f"{bound.key}: {stage} is {what}", dataclasses.replace(bound, **{stage: value}))
        for stage in ("warn", "fail")
        if getattr(bound, stage) is not None
        for what, value in (("never reached", None), ("always reached", always))
    ]


MUTANTS = [mutant for bound in BOUNDS for mutant in _mutants(bound)]


@pytest.mark.parametrize("mutant", [pytest.param(bound, id=title) for title, bound in MUTANTS])
def test_a_bound_that_is_turned_gives_some_case_another_verdict(mutant: Bound) -> None:
    asking = [case for case in CASES if mutant.key in judged(case)[1]]
    suspects = sorted(asking, key=lambda case: not _told_by(case, mutant.key))
    assert suspects, f"no case of the corpus asks for {mutant.key}"
    assert any(_breaks(case, built_in().changed([mutant])) for case in suspects), (
        f"none of {len(suspects)} cases that ask for {mutant.key} needs it as it is"
    )


@pytest.mark.parametrize("place", range(len(kernel_events._PLAIN)))
def test_a_pattern_of_the_kernel_log_that_is_left_out_is_missed(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, pattern, _ = kernel_events._PLAIN[place]
    left = kernel_events._PLAIN[:place] + kernel_events._PLAIN[place + 1 :]
    monkeypatch.setattr(kernel_events, "_PLAIN", left)
    suspects = [case for case in CASES if _told_by(case, rule)]
    assert any(_breaks(case, built_in()) for case in suspects), f"no case needs {pattern.pattern!r}"


def test_every_bound_says_what_it_means_and_where_it_is_from() -> None:
    for bound in BOUNDS:
        assert bound.meaning, bound
        assert bound.source, bound
        assert bound.warn is not None or bound.fail is not None, bound
        assert bound.better in {"lower", "higher"}, bound


def test_every_check_says_what_it_costs_and_reads() -> None:
    checks = [*CHECKS, *WATCHES]
    assert len(NAMES) == len(checks), "two checks have one name"
    for check in checks:
        assert check.level in {"quick", "deep"}, check
        assert check.cost_s >= 0, check
        assert check.reads, check
        assert check.purpose in {"", "job"}, check
        assert group_of(check), check
