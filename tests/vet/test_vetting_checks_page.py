"""docs/vetting-checks.md has every check, load, rule and floor once, as the code has them, and says of each check what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_mlhpc.vet.checks import all_checks
from pytest_mlhpc.vet.command.manual import completed, named
from pytest_mlhpc.vet.load import WORKS
from pytest_mlhpc.vet.policy import built_in

PAGE = Path(__file__).parents[2] / "docs" / "vetting-checks.md"
AGAIN = f"run: python -m pytest_mlhpc.vet.command.manual docs/{PAGE.name}"

CHECKS = sorted(one.name for group in all_checks() for one in group)
LOADS = sorted([*(work.name for work in WORKS), "pairs"])


def test_every_check_has_its_row_once() -> None:
    assert sorted(named(PAGE.read_text(), "checks")) == CHECKS


def test_every_rule_of_the_policy_has_its_row_once() -> None:
    prefixes = {key.partition(".")[0] for key in built_in().bounds}
    assert sorted(named(PAGE.read_text(), "rules")) == sorted(prefixes)


def test_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert completed(page) == page, AGAIN


@pytest.mark.parametrize("name", [*CHECKS, *LOADS])
def test_the_page_says_what_a_check_means_and_what_to_do(name: str) -> None:
    found = re.findall(rf"^- \*\*{name}\*\*: (.+?)(?=^- |^$)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    meaning, _, advice = found[0].partition("*To do*:")
    assert len(meaning.split()) >= 3
    assert len(advice.split()) >= 3


def test_making_the_tables_anew_leaves_what_is_written_by_hand() -> None:
    page = "before\n<!-- loads -->\nold\n<!-- end -->\nafter\n"
    again = completed(page)
    assert again.startswith("before\n<!-- loads -->\n| load |")
    assert again.endswith("<!-- end -->\nafter\n")
    assert "old" not in again
    assert completed(again) == again


def test_a_table_of_what_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError, match="telepathy"):
        completed("<!-- checks: telepathy -->\n<!-- end -->")
    with pytest.raises(ValueError, match="there are no rules telepathy"):
        completed("<!-- rules: telepathy -->\n<!-- end -->")
