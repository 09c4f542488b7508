"""docs/vetting-checks.md has every check and load once, and its file every rule, as the code has them, and says of each check what to do."""

import csv
import re
from pathlib import Path

import pytest
from checks_page import bounds, completed, main, named

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import built_in, floors
from pytest_mlhpc.node.vet.workers import WORKS

PAGE = Path(__file__).parents[2] / "docs" / "vetting-checks.md"
AGAIN = f"run: python tests/vetting/checks_page.py docs/{PAGE.name}"

CHECKS = sorted(one.name for group in all_checks() for one in group)
LOADS = sorted([*(work.name for work in WORKS), "pairs"])


def test_every_check_has_its_row_once() -> None:
    assert sorted(named(PAGE.read_text(), "checks")) == CHECKS


def test_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert completed(page) == page, AGAIN


def test_the_file_of_bounds_is_that_of_the_code_and_has_each_rule_once() -> None:
    text = PAGE.with_name("vetting-bounds.csv").read_text()
    assert text == bounds(), AGAIN
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["rule"] for row in rows] == sorted(built_in().bounds)
    assert all(row["what is counted"] and row["source"] for row in rows)


def test_the_page_shows_the_file_of_bounds() -> None:
    assert "```{csv-table}\n:file: vetting-bounds.csv\n" in PAGE.read_text()


@pytest.mark.parametrize("name", [*CHECKS, *LOADS])
def test_the_page_says_what_a_check_means_and_what_to_do(name: str) -> None:
    (found,) = re.findall(rf"^- \*\*{name}\*\*: (.+?)(?=^- |^$)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    meaning, _, advice = found.partition("*To do*:")
    assert min(len(meaning.split()), len(advice.split())) >= 3


def test_making_the_tables_anew_leaves_what_is_written_by_hand() -> None:
    page = "before\n<!-- loads -->\nold\n<!-- end -->\nafter\n"
    again = completed(page)
    assert again.startswith("before\n<!-- loads -->\n| load |")
    assert again.endswith("<!-- end -->\nafter\n")
    assert "old" not in again
    assert completed(again) == again


def test_a_list_of_what_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError, match="telepathy"):
        completed("<!-- checks: telepathy -->\n<!-- end -->")


def test_the_whole_tables_have_what_the_page_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    sources = {one.source for one in floors()}
    reads = {read for group in all_checks() for one in group for read in one.reads}
    assert [text for text in {*sources, *reads} if text.replace("|", r"\|") not in printed] == []
