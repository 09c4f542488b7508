"""JSON that others wrote is read, or refused by a ValueError; never by anything else."""

import pytest

from pytest_mlhpc.node.files import read_json


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("1e999", "1e999 is too large a number"),
        ("-1e999", "-1e999 is too large a number"),
        ("NaN", "NaN is no number of JSON"),
        ("[Infinity]", "Infinity is no number of JSON"),
        ("9" * 400, "is too large a number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "utf-8"),
    ],
)
def test_what_is_no_json_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        read_json(text)


@pytest.mark.parametrize("value", ["0", "-1", str(2**64), "9" * 300, "1.5e308", '"NaN"', "null", "[[{}]]"])
def test_json_is_read(value):
    assert read_json(value) == read_json(value.encode())


def test_every_whole_number_that_is_read_is_a_float_too():
    assert float(read_json("9" * 300)) == pytest.approx(1e300)
