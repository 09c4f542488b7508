"""Lines of a pod's stream: readable, short, and exactly what programs printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.batch.pod_stream import RS, output_lines, pod_line, stream_name, tags
from pytest_mlhpc.provision.kubernetes.log_parser import unescape


def joined(lines):
    """Return what the texts of *lines* say, each at its offset."""
    found = bytearray()
    for line in lines.splitlines(keepends=True):
        head, text = line.split(b"] ", 1)
        assert int(head.split(b" ")[2]) == len(found)
        found += unescape(text[:-1])
    return bytes(found)


@pytest.mark.parametrize(
    ("stream", "data", "shown"),
    [
        pytest.param("0", b"loss 2.5\tgood\n", b"[t 0 0] loss 2.5\tgood\n", id="as it is with its place"),
        pytest.param(
            "launcher",
            b"\x1b[31m \x1e \r \xff \xc2\x9b \\ \xc3\xa9\n",
            rb"[t launcher 0] \x1b[31m \x1e \x0d \xff \xc2\x9b \\ " + b"\xc3\xa9\n",
            id="as in C what no terminal should get",
        ),
        pytest.param("0", b"a\nhalf", b"[t 0 0] a\n[t 0 2] half\\\n", id="with a backslash if it goes on"),
        pytest.param("0", b"it ends so\\\n", b"[t 0 0] it ends so\\\\\n", id="with two if it ends in one"),
    ],
)
def test_a_line_is_shown(stream, data, shown):
    assert output_lines("t", stream, 0, data) == shown


def test_a_line_that_does_not_begin_the_output_says_where_it_is():
    assert output_lines("1234abcd", "0", 7, b"more\n") == b"[1234abcd 0 7] more\n"


@given(st.lists(st.binary(max_size=9000), max_size=4), st.binary(max_size=3))
def test_any_bytes_come_out_as_they_went_in(pieces, newline):
    data = (newline + b"\n").join(pieces)
    lines = output_lines("t", "0", 0, data)
    assert joined(lines) == data
    assert all(len(line) <= 4000 and RS not in line for line in lines.splitlines(keepends=True))


@pytest.mark.parametrize(
    "data", [b"x" * 100_000, bytes(50_000), b"\xff" * 20_000 + b"\n", b"\n" * 5000, b"y\n" * 50_000]
)
def test_long_lines_are_split_and_floods_of_short_ones_stay_short(data):
    lines = output_lines("t", "0", 0, data)
    assert joined(lines) == data
    assert max(map(len, lines.splitlines(keepends=True))) <= 4000
    assert data[:1] != b"y" or len(lines) < 3 * len(data)


@pytest.mark.parametrize(
    ("runs", "short"),
    [
        (["0190-12345678", "0190-12345679"], ["12345678", "12345679"]),
        (["a-12345678", "b-12345678"], ["a-12345678", "b-12345678"]),
        ([], []),
    ],
)
def test_a_run_is_named_by_the_end_of_its_id_and_by_more_where_that_is_not_enough(runs, short):
    assert tags(runs) == dict(zip(runs, short, strict=True))


def test_the_launcher_is_no_rank():
    assert [stream_name(number) for number in (-1, 0, 12)] == ["launcher", "0", "12"]


def test_a_line_about_the_pod_is_one_line_behind_a_record_separator():
    assert pod_line("over", {"exit": 0}) == b'\x1e{"pod":"over","exit":0}\n'
