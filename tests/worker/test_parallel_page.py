"""docs/parallel.md says what is: its suite runs by its command, and its tables and its refusal are the code's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.jobs.device_memory import STATES, too_large
from pytest_mlhpc.system.model import Environment, NodeType, Partition, Target
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.worker.workloads.fields import parallel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """Return the only block of that kind."""
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_every_field_stands_in_the_table():
    for name in parallel.FIELDS:
        assert f"| `{name}` |" in PAGE


def test_the_numbers_that_optimizers_keep_are_those_that_are_counted():
    said = re.search(r"\((`sgd`.*?)\), whatever", PAGE.replace("\n", " "))
    assert said is not None
    found = {}
    for names, number in re.findall(r"((?:`\w+`(?:, )?)+): (\d)", said[1]):
        found.update(dict.fromkeys(re.findall(r"`(\w+)`", names), int(number)))
    assert found == STATES


def test_the_refusal_is_what_is_said():
    nodes = NodeType(64, 2**39, 4, devices=4, device_model="NVIDIA H100 80GB HBM3")
    environment = Environment("default", "python3")
    partition = Partition("sys", "part", "fake", "auto", "cuda", nodes, (environment,))
    declared = Declaration(
        "t.py::test_it", "test_it", "language_model", Target(partition, environment), {}, {}
    )
    declared = replace(declared, marked={"devices": 4})
    named = {workload.name: workload for workload in WORKLOADS}
    spec = resolve(declared, named, "llama_8b", {"torchrun": "pytest_mlhpc.launch.torchrun"})

    assert [str(problem) for problem in too_large([spec])] == block("text").splitlines()


@pytest.mark.slow
@pytest.mark.servers
def test_the_suite_of_the_page_runs_by_its_command(tmp_path):
    (tmp_path / "test_sharing.py").write_text(block("python"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    program, *arguments = shlex.split(block("console"))
    assert program == "pytest"
    environment = {**os.environ, "MLHPC_STATE": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "CI": ""}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-p", "no:randomly"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout
