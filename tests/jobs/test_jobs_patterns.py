from __future__ import annotations

import pytest

from pytest_mlhpc.jobs.patterns import wrong_pattern


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (7, "is no text"),
        ("(", "is no regular expression"),
        ("rate", "has 0 groups"),
        ("(a)(b)", "has 2 groups"),
        ("(a+)+", "repeats a repeat"),
        (r"((?:\d*)*x)", "repeats a repeat"),
        ("([a-z]{2,})*", "repeats a repeat"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused_when_it_is_declared(pattern, says):
    assert says in wrong_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"rate: (\S+)", r"(?:a|b)+ (\d+)", r"([)(+*]+) x", r"\((\d+)\)+", "(x)?"]
)
def test_a_pattern_that_works_is_accepted(pattern):
    assert wrong_pattern(pattern) == ""
