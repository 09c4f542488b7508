"""docs/vetting-checks.md and its files have every check, load, rule and floor once, and say of each check what to do."""

import csv
import re
from pathlib import Path

import pytest
from checks_page import FILES, completed, main

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import built_in, floors
from pytest_mlhpc.node.vet.workers import WORKS

PAGE = Path(__file__).parents[2] / "docs" / "vetting-checks.md"
AGAIN = f"run: python tests/vetting/checks_page.py docs/{PAGE.name}"

CHECKS = sorted(one.name for group in all_checks() for one in group)
LOADS = sorted([*(work.name for work in WORKS), "pairs"])


def rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(PAGE.with_name(name).read_text().splitlines()))


def test_the_table_of_loads_is_that_of_the_code() -> None:
    page = PAGE.read_text()
    assert completed(page) == page, AGAIN


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_that_of_the_code_and_the_page_shows_it(name: str) -> None:
    assert PAGE.with_name(name).read_text() == FILES[name](), AGAIN
    assert f"```{{csv-table}}\n:file: {name}\n" in PAGE.read_text()


def test_every_check_has_its_row_once_with_all_that_it_reads() -> None:
    found = rows("vetting-checks.csv")
    assert [row["check"] for row in found] == CHECKS
    reads = {read for group in all_checks() for one in group for read in one.reads}
    printed = " ".join(row["what it reads"] for row in found)
    assert [text for text in reads if text not in printed] == []


def test_every_rule_has_its_row_once_with_its_meaning_and_source() -> None:
    found = rows("vetting-bounds.csv")
    assert [row["rule"] for row in found] == sorted(built_in().bounds)
    assert all(row["what is counted"] and row["source"] for row in found)


def test_every_floor_has_its_row_with_its_source() -> None:
    assert [row["source"] for row in rows("vetting-floors.csv")] == [one.source for one in floors()]


@pytest.mark.parametrize("name", [*CHECKS, *LOADS])
def test_the_page_says_what_a_check_means_and_what_to_do(name: str) -> None:
    (found,) = re.findall(rf"^- \*\*{name}\*\*: (.+?)(?=^- |^$)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    tables = {row["check"]: row["what it does"] for row in rows("vetting-checks.csv")}
    meaning, advice = (tables[name], found) if name in tables else found.split("*To do*:")
    assert min(len(meaning.split()), len(advice.split())) >= 3


def test_making_the_tables_anew_leaves_what_is_written_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- loads -->\nold\n<!-- end -->\nafter\n")
    main(page)
    again = page.read_text()
    assert again.startswith("before\n<!-- loads -->\n| load |")
    assert again.endswith("<!-- end -->\nafter\n")
    assert "old" not in again
    assert completed(again) == again
    assert {path.name for path in tmp_path.iterdir()} == {"page.md", *FILES}
