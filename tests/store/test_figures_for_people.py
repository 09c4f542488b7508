"""Figures and counts as people read them."""

import pytest

from pytest_mlhpc.store.text import count, quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (5.561e9, "B/s", "5.561 GB/s"),
        (999.99e6, "B/s", "1 GB/s"),
        (999.9e6, "B/s", "999.9 MB/s"),
        (0.5, "B/s", "0.5 B/s"),
        (2.0e-6, "s", "2 us"),
        (0.0123456, "s", "12.35 ms"),
        (1234.5, "s", "1234 s"),
        (0.0, "s", "0 s"),
        (-3.0e-3, "s", "-3 ms"),
        (float("nan"), "s", "nan s"),
        (2.341e-9, "1", "2.341e-09"),
        (2.0, "1", "2"),
        (185_249.7, "samples/s", "185,200 samples/s"),
        (12.0, "MB/s", "12 MB/s"),
        (None, "s", "-"),
    ],
)
def test_a_figure_has_four_digits_a_prefix_where_its_unit_takes_one_and_no_unit_where_there_is_none(
    value, unit, text
):
    assert quantity(value, unit) == text


def test_one_is_no_plural():
    assert [count(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
