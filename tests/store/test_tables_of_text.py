"""Tables for a terminal, Markdown and CSV: aligned whatever letters they hold, and obeyed by nothing that opens them."""

import csv
import io

import pytest

from pytest_mlhpc.store.text import (
    aligned,
    chopped,
    csv_text,
    markdown_table,
    one_line,
    table,
    widest,
    wrapped,
)


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_without_blanks():
    assert table([("a", "bb", "c"), ("aaa", "b", "")]) == "a    bb  c\naaa  b\n"


def test_a_column_of_figures_ends_at_one_place():
    assert table([("name", "runs"), ("x", "12,340"), ("y", "7")], right={1}) == (
        "name    runs\nx     12,340\ny          7\n"
    )


def test_wide_letters_take_two_cells_of_the_terminal():
    lines = table([("系统", "x"), ("abcd", "y")]).splitlines()
    assert lines == ["系统  x", "abcd  y"]
    assert widest(lines) == 7


def test_cells_of_several_lines_stand_side_by_side():
    assert aligned([[["a", "b"], ["1"]], [["c"], ["2", "3"]]]) == ["a  1", "b", "c  2", "   3"]


def test_no_rows_are_no_lines():
    assert (table([]), aligned([]), widest([])) == ("", [], 0)


def test_a_cell_cannot_move_the_cursor_or_begin_a_line():
    assert table([("a\x1b[2Jb", "c\nd")]) == "a\N{REPLACEMENT CHARACTER}[2Jb  c\n"


@pytest.mark.parametrize("split", [chopped, lambda text, most: wrapped(text, "  ", most)])
def test_nothing_of_a_long_text_is_lost_and_no_line_is_too_wide(split):
    for text in ("one two three four five six", "x" * 50, "一二三四五六七八九十" * 3):
        lines = split(text, 12)
        assert widest(lines) <= 12
        assert "".join("".join(lines).split()) == "".join(text.split())


def test_later_lines_of_a_paragraph_are_indented_more_than_the_first():
    assert wrapped("  one two three", "  ", 10) == ["  one two", "    three"]


def test_markdown_shows_cells_as_they_are():
    assert markdown_table(["a|b", "n"], [["<b>*x*</b>", "1"]], right={1}) == [
        "| a\\|b | n |",
        "|---|---:|",
        "| &lt;b&gt;\\*x\\*&lt;/b&gt; | 1 |",
    ]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_spreadsheet_takes_no_text_for_a_formula(text):
    (row,) = csv.DictReader(io.StringIO(csv_text(["name", "value"], [{"name": text, "value": -1.5}])))
    assert row["name"].startswith("'")
    assert row["value"] == "-1.5"


def test_what_is_not_known_is_an_empty_field():
    assert csv_text(["a", "b", "c"], [{"a": None, "b": "", "c": 0}]) == "a,b,c\n,,0\n"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("it failed; its last lines:\nx\ny", "it failed"),
        ("it failed; its last lines:", "it failed; its last lines:"),
        ("\n a\nb", "a"),
        ("", ""),
    ],
)
def test_a_first_line_announces_no_lines_that_are_not_shown(text, first):
    assert one_line(text) == first
