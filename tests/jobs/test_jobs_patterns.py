import pytest

from pytest_mlhpc.jobs.metrics import MANY, choices, wrong_pattern


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
        (r"((?:\d{1,3},?)+) items/s", "repeats a repeat"),
        (r"((?:x|\d{1,3}(?:,)?)+) items/s", "repeats a repeat"),
        ("((?:a|a)+)b", "repeats a repeat"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused_when_it_is_declared(pattern, says):
    assert says in wrong_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"rate: (\S+)",
        r"(?:a|b)+ (\d+)",
        r"([)(+*]+) x",
        r"\((\d+)\)+",
        "(x)?",
        r"((?:\d{1,3},)*\d{1,3}) items/s",
        r"(?i)(?:a b?)+(\d{3})",
    ],
)
def test_a_pattern_that_works_is_accepted(pattern):
    assert wrong_pattern(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"rate: (\S+)", 1),
        (r"(?i)rate\+: (\d{3})", 0),
        (r"(a|b+?)", 2),
        (r"a?a{0,9}a{,3}(b)", 3),
        (r"((?:aa?)+)", MANY),
        (r"(?:aa?){40}(b)", MANY),
    ],
)
def test_everything_that_a_search_may_try_again_is_counted(pattern, count):
    assert choices(pattern) == count
