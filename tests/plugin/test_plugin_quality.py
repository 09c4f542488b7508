"""docs/time-to-train.md says what is: its test runs to its target as it stands there, and its tables name every field and figure."""

import re
from pathlib import Path

import pytest

from pytest_mlhpc.node.worker.quality.rules import TARGETS
from pytest_mlhpc.node.worker.workloads.fields.quality import FIELDS, expected

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/time-to-train.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def named(word: str) -> set[str]:
    """Return the words in code quotes before the colons of the list that has *word*."""
    lists = [re.findall(r"^- (`.*?`):\s", block, re.MULTILINE) for block in PAGE.split("\n\n")]
    (found,) = [names for heads in lists if word in (names := set(re.findall(r"`(\w+)`", " ".join(heads))))]
    return found


def test_the_tables_name_every_field_figure_and_target():
    assert named("target") == set(FIELDS) - {"until"}
    assert set(expected({"until": "quality"})) <= named("time_to_train")
    for workload, (_key, better, target) in TARGETS.items():
        side = "less" if better == "lower" else "more"
        assert re.search(rf"^- {workload}: .*, {target:g} or {side} \(", PAGE, re.MULTILINE), workload


@pytest.mark.servers
@pytest.mark.slow
def test_the_first_test_of_the_page_reaches_its_target_and_is_recorded(suite):
    suite.file("test_page.py", BLOCKS[0])

    ended = suite.run()

    ended.assert_outcomes(passed=1)
    (record,) = suite.records()
    metrics = {metric["name"]: metric["value"] for metric in record["measurement"]["metrics"]}
    assert metrics["quality"] <= 0.124
    assert metrics["time_to_train"] > 0
    keys = [event["key"] for event in record["measurement"]["per_rank"][0]["events"]]
    assert (keys.count("run_start"), keys.count("run_stop")) == (1, 1)
    assert keys.count("eval_error") == metrics["epochs"]
    assert "until=quality" in record["definition"]


@pytest.mark.servers
@pytest.mark.slow
def test_a_missed_target_fails_the_test_and_says_what_was_reached(suite):
    block = BLOCKS[0].replace("max_epochs=24", "max_epochs=1, target=0.001")
    suite.file("test_page.py", block)

    ended = suite.run()

    assert ended.ret == 1
    ended.assert_outcomes(failed=1)
    ended.stdout.re_match_lines(
        [r".*target_missed: rank 0: eval_error is 0\.\d+ after 1 training epochs \(12 steps, .*"]
    )
    assert [record["verdict"] for record in suite.records()] == ["target_missed"]


@pytest.mark.servers
@pytest.mark.slow
def test_the_suite_of_the_project_runs_what_this_machine_can_and_skips_what_needs_the_data(suite):
    for file in (ROOT / "suites/mlperf").glob("*.py"):
        suite.file(file.name, file.read_text())

    ended = suite.run()

    ended.assert_outcomes(passed=4, deselected=15)
