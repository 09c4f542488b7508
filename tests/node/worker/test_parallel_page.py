"""docs/parallel.md says what is: its suite runs by its command, and its tables and its refusal are the code's."""

import re
import shlex

import pytest
from pages import ROOT, blocks, session
from probe_ranks import NAMED

from pytest_mlhpc.config.model import Environment, NodeType, Partition, Target
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.node.worker.workloads.fields import parallel
from pytest_mlhpc.session.preflight import STATES, too_large

PAGE = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")


def test_every_field_stands_in_the_table():
    for name in parallel.FIELDS.keys() - {"bagging"}:  # which has a page of its own
        assert f"| `{name}` |" in PAGE


def test_the_numbers_that_optimizers_keep_are_those_that_are_counted():
    (sentence,) = re.findall(r"\((`sgd`.*?)\), whatever", PAGE.replace("\n", " "))
    found = {}
    for names, number in re.findall(r"((?:`\w+`(?:, )?)+): (\d)", sentence):
        found.update(dict.fromkeys(re.findall(r"`(\w+)`", names), int(number)))
    assert found == STATES


def test_the_refusal_is_the_one_of_the_code():
    nodes = NodeType(64, 2**39, 4, devices=4, device_model="NVIDIA H100 80GB HBM3")
    environment = Environment("default", "python3")
    partition = Partition("sys", "part", "fake", "auto", "cuda", nodes, (environment,))
    target, marked = Target(partition, environment), {"devices_per_node": 4}
    declared = Declaration("test_x.py:12", "test_it", "language_model", target, marked, {})
    spec = resolve(declared, NAMED, "llama_8b", {"torchrun": "pytest_mlhpc.node.launch"})
    (refusal,) = blocks("text", PAGE)
    assert [str(problem) for problem in too_large([spec])] == refusal.splitlines()


@pytest.mark.slow
@pytest.mark.servers
def test_the_suite_of_the_page_runs_by_its_command(tmp_path):
    (tests,), (command,) = blocks("python", PAGE), blocks("console", PAGE)
    program, file, *arguments = shlex.split(command)
    assert program == "pytest"
    code, output = session(tmp_path, tests, file, *arguments, file=file)
    assert code == 0, output
    assert "3 passed" in output
