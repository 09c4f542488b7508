"""docs/vetting-checks.md has every check, load and rule once, as the code has them, and says of each check what to do."""

import re
from pathlib import Path

import pytest
from checks_page import completed, main, named

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import built_in, floors
from pytest_mlhpc.node.vet.workers import WORKS

PAGE = Path(__file__).parents[2] / "docs" / "vetting-checks.md"
AGAIN = f"run: python tests/vetting/checks_page.py docs/{PAGE.name}"

CHECKS = sorted(one.name for group in all_checks() for one in group)
LOADS = sorted([*(work.name for work in WORKS), "pairs"])


@pytest.mark.parametrize(
    ("table", "there"),
    [("checks", CHECKS), ("rules", sorted({key.partition(".")[0] for key in built_in().bounds}))],
)
def test_every_check_and_every_rule_has_its_row_once(table: str, there: list[str]) -> None:
    assert sorted(named(PAGE.read_text(), table)) == there


def test_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert completed(page) == page, AGAIN


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


@pytest.mark.parametrize(
    ("table", "error", "why"),
    [("checks", KeyError, "telepathy"), ("rules", ValueError, "there are no rules telepathy")],
)
def test_a_table_of_what_does_not_exist_is_refused(table: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        completed(f"<!-- {table}: telepathy -->\n<!-- end -->")


def test_the_whole_tables_have_what_the_page_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    sources = {one.source for one in (*built_in().bounds.values(), *floors())}
    reads = {read for group in all_checks() for one in group for read in one.reads}
    assert [text for text in {*sources, *reads} if text.replace("|", r"\|") not in printed] == []
