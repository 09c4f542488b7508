"""docs/mlperf.md says what is: its commands print what stands there, its tables name every rule and table."""

import re
import shlex
import time
from pathlib import Path

import pytest
from trained_runs import events, record

from pytest_mlhpc.papers.mlperf.package import ACCELERATOR_FIELDS, HOST_FIELDS
from pytest_mlhpc.papers.mlperf.results import RULES
from pytest_mlhpc.papers.mlperf.sheets import make_sheets
from pytest_mlhpc.papers.mlperf.trained import CLOSED, QUALITY, sort_out

PAGE = (Path(__file__).parents[3] / "docs/mlperf.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


def runs():
    """Return the three runs that the page shows."""
    fields = {"devices": 4, "data_kind": "synthetic", "partition": "gpu", "name": "test_time_to_train"}
    return [
        record(
            seed,
            **fields,
            parameters={"seed": seed},
            created_ns=time.time_ns() + seed,  # its commands look back for a year
            told=events(epochs=30, epoch_s=12.8 * factor, eval_s=2.0, counts=(4096, 512)),
        )
        for seed, factor in enumerate((1.0, 1.02, 0.99), 1)
    ]


def test_the_command_that_makes_a_package_makes_one_that_is_accepted(store, tmp_path, monkeypatch, mlhpc):
    told = events(epochs=9)
    now = time.time_ns()
    store(
        *(record(seed, parameters={"seed": seed}, told=told, created_ns=now + seed) for seed in range(1, 11))
    )
    monkeypatch.chdir(tmp_path)
    fields = (*HOST_FIELDS, *ACCELERATOR_FIELDS)
    (tmp_path / "cirrus.yaml").write_text("".join(f"{name}: as the site says\n" for name in fields))
    (command,) = [block for block in BLOCKS if block.startswith("$ mlhpc papers mlperf package")]
    assert "EPCC: accepted\n" in mlhpc(*shlex.split(command.removeprefix("$ mlhpc "))).out


RULE = re.compile(r"^- `(\w+)` \((both|closed)\):", re.MULTILINE)


LOG = """\
test_time_to_train on cirrus:gpu: mean absolute error, target 0.124
log                          run                 quality  training epochs  time to train
logs/cosmoflow/result_0.txt  reached its target  0.12     30               449 s
logs/cosmoflow/result_1.txt  reached its target  0.12     30               456.7 s
logs/cosmoflow/result_2.txt  reached its target  0.12     30               445.2 s
olympic mean of 3 runs: 449 s (without the fastest and the slowest)
departures from the rules, which the logs name too (mlhpc_departure):
  data_set: synthetic data; 4,096 training samples, not 524,288; 512 evaluation samples, not 65,536 (Training rules, 'Training and Test Sets')
  runs: 3 of 10 runs (HPC rules 3.0, 'Benchmark Results')
by the rules these runs belong in no division of MLPerf; their logs say closed
"""  # fmt: skip


def test_the_commands_print_what_the_page_says(store, tmp_path, monkeypatch, mlhpc):
    store(*runs())
    monkeypatch.chdir(tmp_path)
    command = BLOCKS[0].splitlines()[1]
    assert mlhpc(*shlex.split(command.removeprefix("$ mlhpc "))).out == LOG
    (shown,) = [block for block in BLOCKS if block.startswith("$ mlhpc papers mlperf check")]
    command, _, text = shown.partition("\n")
    assert mlhpc(*shlex.split(command.removeprefix("$ mlhpc "))).out == text


def test_the_commands_of_the_beginning_run_one_after_the_other(store, tmp_path, monkeypatch, mlhpc):
    store(*runs())
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line.removeprefix("$ ")) for line in BLOCKS[0].splitlines()]
    assert [command[0] for command in commands] == ["pytest", "mlhpc", "mlhpc", "mlhpc"]
    for command in commands[1:]:
        mlhpc(*command[1:])


def test_the_table_names_every_rule_and_whom_it_binds():
    assert RULE.findall(PAGE) == [(rule.name, "both" if rule.both else "closed") for rule in RULES]


def test_the_numbers_of_runs_are_those_of_the_rules():
    runs_by_the_rules = {name: one.runs for name, one in QUALITY.items() if name in CLOSED}
    assert runs_by_the_rules == {"cosmoflow": 10, "deepcam": 5}
    assert "the rules want 10 of CosmoFlow and 5 of DeepCAM" in " ".join(PAGE.split())


def test_the_page_names_every_table_of_the_report():
    batches = {1: 32, 2: 32, 4: 32, 8: 32, 16: 128}
    some = [
        record(
            number,
            devices=devices,
            data_kind="synthetic",
            parameters={"global_batch": batch},
            communication=0.1,
            told=events(counts=(4096, 512), epoch_s=10.0 / devices),
        )
        for number, (devices, batch) in enumerate(batches.items())
    ]
    section = PAGE.partition("## Report")[2]
    titles = re.findall(r"^- (.*?):\s", section, re.MULTILINE)
    assert [sheet.title for sheet in make_sheets(sort_out(some))] == titles


@pytest.mark.parametrize("action", ["log", "package", "check", "report"])
def test_each_command_explains_itself(action, mlhpc):
    assert f"mlhpc papers mlperf {action}" in mlhpc("papers", "mlperf", action, "--help").out
