"""Standard output and standard error in one log, line by line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.processes import LONGEST_WAIT, JoinedLines


def join(*pieces):
    """Return what a log gets of each piece: a text of standard output, or (in a list) of standard error."""
    lines = JoinedLines()
    found = [
        lines.feed(one[0].encode(), error=True)
        if isinstance(one, list)
        else lines.feed(one.encode(), error=False)
        for one in pieces
    ]
    return [*(one.decode() for one in found), lines.finish().decode()]


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (("a\n", ["b\n"], "c\n"), ["a\n", "b\n", "c\n", ""]),
        (("rate: ", "4\n"), ["rate: ", "4\n", ""]),
        (("rate: ", ["warning\n"], "4\n"), ["rate: ", "", "4\nwarning\n", ""]),
        (("rate: ", ["warn"], "4\nnext: ", ["ing\n"]), ["rate: ", "", "4\nwarn", "ing\nnext: ", ""]),
        (("rate: ", ["warning"]), ["rate: ", "", "warning"]),
        ((["50 %\r"], "done\n", ["100 %\n"]), ["50 %\r", "", "100 %\ndone\n", ""]),
    ],
)
def test_a_line_is_not_broken_by_the_other_stream(pieces, found):
    assert join(*pieces) == found


def test_a_line_that_waits_too_long_is_passed_on():
    long = "x" * (LONGEST_WAIT + 1)
    assert join("rate: ", [long], "4\n") == ["rate: ", long, "4\n", ""]


@given(st.lists(st.tuples(st.booleans(), st.text("ab\n", min_size=1, max_size=8)), max_size=20))
def test_nothing_is_lost_and_each_stream_keeps_its_order(pieces):
    lines = JoinedLines()
    marked = [(error, text.upper() if error else text) for error, text in pieces]
    joined = b"".join(lines.feed(text.encode(), error=error) for error, text in marked) + lines.finish()
    for wanted, letters in ((True, "AB"), (False, "ab")):
        printed = "".join(text for error, text in marked if error is wanted)
        assert [one for one in joined.decode() if one in letters] == [
            one for one in printed if one in letters
        ]
    assert joined.count(b"\n") == sum(text.count("\n") for _, text in marked)
