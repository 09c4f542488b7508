"""Lines of a pod's stream: readable, short, and exactly what programs printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.batch.pod_text import RS, output_lines, pod_line, stream_name, tags
from pytest_mlhpc.provision.kubernetes.podoutput import unescape


def joined(lines: bytes) -> bytes:
    """Return what the texts of *lines* say, each at its offset."""
    found = bytearray()
    for line in lines.splitlines(keepends=True):
        head, text = line.split(b"] ", 1)
        offset = int(head.split(b" ")[2])
        data = unescape(text[:-1])
        assert data is not None
        assert offset == len(found)
        found += data
    return bytes(found)


def test_a_line_is_shown_as_it_is_with_its_place():
    assert output_lines("1234abcd", "0", 7, b"loss 2.5\tgood\n") == b"[1234abcd 0 7] loss 2.5\tgood\n"


def test_what_no_terminal_should_get_is_written_as_in_c():
    data = b"\x1b[31m \x1e \r \xff \xc2\x9b \\ \xc3\xa9\n"
    assert output_lines("t", "launcher", 0, data) == (
        rb"[t launcher 0] \x1b[31m \x1e \x0d \xff \xc2\x9b \\ ".replace(b"\n", b"") + b"\xc3\xa9\n"
    )


def test_a_line_that_goes_on_ends_with_one_backslash():
    assert output_lines("t", "0", 0, b"a\nhalf") == b"[t 0 0] a\n[t 0 2] half\\\n"
    assert output_lines("t", "0", 0, b"it ends so\\\n") == b"[t 0 0] it ends so\\\\\n"


@given(st.lists(st.binary(max_size=9000), max_size=4), st.binary(max_size=3))
def test_any_bytes_come_out_as_they_went_in(pieces, newline):
    data = (newline + b"\n").join(pieces)
    lines = output_lines("t", "0", 0, data)
    assert joined(lines) == data
    assert all(len(line) <= 4000 and RS not in line for line in lines.splitlines(keepends=True))


@pytest.mark.parametrize("data", [b"x" * 100_000, bytes(50_000), b"\xff" * 20_000 + b"\n", b"\n" * 5000])
def test_long_lines_are_split_and_joined_exactly(data):
    lines = output_lines("t", "0", 0, data)
    assert joined(lines) == data
    assert max(map(len, lines.splitlines(keepends=True))) <= 4000


def test_a_flood_of_short_lines_stays_short_and_is_joined_exactly():
    data = b"y\n" * 50_000
    lines = output_lines("t", "0", 0, data)
    assert len(lines) < 3 * len(data)
    assert joined(lines) == data


def test_a_run_is_named_by_the_end_of_its_id_and_by_more_where_that_is_not_enough():
    assert tags(["0190-12345678", "0190-12345679"]) == {
        "0190-12345678": "12345678",
        "0190-12345679": "12345679",
    }
    assert tags(["a-12345678", "b-12345678"]) == {"a-12345678": "a-12345678", "b-12345678": "b-12345678"}
    assert tags([]) == {}


def test_the_launcher_is_no_rank():
    assert [stream_name(number) for number in (-1, 0, 12)] == ["launcher", "0", "12"]


def test_a_line_about_the_pod_is_one_line_behind_a_record_separator():
    assert pod_line("over", {"exit": 0}) == b'\x1e{"pod":"over","exit":0}\n'
