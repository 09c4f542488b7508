"""docs/vetting-checks.md has every check and load once, as the code has them, and says of each check what to do."""

import re
from pathlib import Path

import pytest

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import built_in, floors
from pytest_mlhpc.node.vet.workers import WORKS
from pytest_mlhpc.vetting.manual import completed, main

PAGE = Path(__file__).parents[2] / "docs" / "vetting-checks.md"
AGAIN = f"run: python -m pytest_mlhpc.vetting.manual docs/{PAGE.name}"

CHECKS = sorted(one.name for group in all_checks() for one in group)
LOADS = sorted([*(work.name for work in WORKS), "pairs"])


def test_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert completed(page) == page, AGAIN


@pytest.mark.parametrize("name", [*CHECKS, *LOADS])
def test_the_page_says_what_a_check_means_and_what_to_do(name: str) -> None:
    (found,) = re.findall(rf"^- \*\*{name}\*\*: (.+?)(?=^- |^$)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    meaning, _, advice = found.partition(" Do: ")
    assert min(len(meaning.split()), len(advice.split())) >= 3


def test_checks_that_need_a_load_or_are_deep_are_named() -> None:
    (shown,) = re.findall(r"<!-- checks -->\n(.*)\n<!-- end -->", PAGE.read_text())
    special = [one.name for one in all_checks()[0] if one.level != "quick"] + [
        one.name for one in all_checks()[1]
    ]
    assert sorted(re.findall(r"`(\w+)`", shown)) == sorted(special)


def test_making_the_tables_anew_leaves_what_is_written_by_hand() -> None:
    page = "before\n<!-- loads -->\nold\n<!-- end -->\nafter\n"
    again = completed(page)
    assert again.startswith("before\n<!-- loads -->\nSeconds, quick/deep: `gemm` 3/120, ")
    assert again.endswith("<!-- end -->\nafter\n")
    assert "old" not in again
    assert completed(again) == again


def test_the_whole_tables_have_what_the_page_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    sources = {one.source for one in (*built_in().bounds.values(), *floors())}
    reads = {read for group in all_checks() for one in group for read in one.reads}
    keys = [f"`{key}`" for key in built_in().bounds]
    assert [text for text in {*sources, *reads, *keys} if text.replace("|", r"\|") not in printed] == []
