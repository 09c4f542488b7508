"""Sizes, durations and budgets, as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.config.quantities import (
    canonical_budget,
    format_size,
    parse_budget,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("parse", "text", "figure"),
    [
        *(
            (parse_size, *row)
            for row in (
                ("768GiB", 768 * 2**30),
                ("1.5TB", 1_500_000_000_000),
                ("4096B", 4096),
                (512, 512),
                ("512", 512),
                ("2 MiB", 2**21),
                ("1kB", 1000),
            )
        ),
        *(
            (parse_duration, *row)
            for row in (
                ("1h", 3600),
                ("30m", 1800),
                ("1h30m", 5400),
                ("3600", 3600),
                (90, 90),
                ("2d", 172800),
                ("1.5h", 5400),
                ("1h 5s", 3605),
            )
        ),
    ],
)
def test_sizes_are_bytes_and_durations_seconds(parse, text, figure):
    assert parse(text) == figure


@pytest.mark.parametrize(
    ("parse", "text", "why"),
    [
        *(
            (parse_size, text, "is not a size")
            for text in (
                "",
                "GiB",
                "768G",
                "768 gib",
                "-1GiB",
                "0",
                0,
                -5,
                True,
                None,
                1.5,
                "1e3B",
                "inf",
                [],
                "9" * 19,
                "5000PiB",
                "1iB",
            )
        ),
        *(
            (parse_duration, text, "is not a duration")
            for text in (
                "",
                "1x",
                "h",
                "-1h",
                0,
                "0s",
                True,
                None,
                "1:30",
                "367d",
                10**400,
                float("nan"),
                float("inf"),
                "1h30",
                [],
            )
        ),
        *(
            (parse_rate, text, "is not a rate above 0; write it like '1 per month' or '4 per year'")
            for text in (1, "1", "0 per month", "-1 per month", "1 per century", "one per month", None)
        ),
        *(
            (parse_budget, text, "is not a budget")
            for text in ("20", 20, "20 hours", "node-hours", "-1 node-hours", None)
        ),
    ],
)
def test_what_is_none_is_refused(parse, text, why):
    with pytest.raises(ValueError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("text", "a_month"),
    [("1 per month", 1.0), ("3 per night", 90.0), ("7 per week", 30.0), ("365 per year", 30.0)],
)
def test_a_rate_is_counted_in_months_of_thirty_days(text, a_month):
    assert parse_rate(text) == pytest.approx(a_month)


def test_a_budget_has_an_amount_and_what_is_counted():
    assert parse_budget("20 node-hours") == (20.0, "node")
    assert canonical_budget("1.50 node-hour") == "1.5 node-hours"


@given(st.integers(1, 2**20 - 1), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_whole_sizes_come_back_from_their_own_text(amount, unit):
    size = parse_size(f"{amount}{unit}")
    assert parse_size(size) == size
    assert abs(parse_size(format_size(size)) - size) <= 0.05 * size


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99))
def test_a_duration_is_the_sum_of_its_parts(hours, minutes, seconds):
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


_ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text("0123456789.kKMGTPiBhmsd ")
)


@given(_ANYTHING)
def test_anything_gives_a_positive_figure_or_a_value_error(value):
    for parse in (parse_size, parse_duration):
        try:
            assert parse(value) > 0
        except ValueError as error:
            assert str(error)  # noqa: PT017 - either outcome is right
