"""docs/screen.md says what is so: its commands are ones, its names are those of the code."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from cli_calls import options_of, parsed
from screen_samples import device, process, samples

from benchmarks.__main__ import SCRIPTS
from pytest_mlhpc.node.telemetry.samples import figures, interval_of
from pytest_mlhpc.node.worker.workloads.fields import training
from pytest_mlhpc.screen import run

PAGE = (Path(__file__).parents[2] / "docs/screen.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    mlhpc screen ")]


@pytest.mark.parametrize("way", ["-- python", "--output", "--job", "--pod"])
def test_the_command_of_the_page_for_each_way_of_looking_is_one(way):
    (command,) = [
        command for command in COMMANDS if way in command and ("--output" in command) == (way == "--output")
    ]
    assert len(COMMANDS) == 4
    assert parsed(*shlex.split(command)[1:])


def test_options_in_the_text_exist():
    named = set(re.findall(r"`(--[a-z]+)", PAGE))
    assert named
    assert named <= options_of("screen") | {"--overlap"}


def test_signals_that_are_passed_on_are_those_of_the_page():
    (said,) = [line for line in PAGE.splitlines() if line.startswith("* SIGINT")]
    assert set(re.findall(r"SIG[A-Z0-9]+", said)) == {one.name for one in run.PASSED}


def test_figures_of_a_benchmark_are_those_of_the_page():
    taken = samples(lambda second: [process(10, second)], lambda _second: [device()])
    looks = [interval_of(before, after) for before, after in pairwise(taken)]
    assert set(re.findall(r"`(telemetry_[a-z_]+)`", PAGE)) == {one.name for one in figures(looks)}
    assert training("sgd", 0.1)["telemetry"].default is None
    assert not training("sgd", 0.1)["telemetry"].identity


def test_the_benchmark_script_is_one():
    assert "python -m benchmarks screening" in PAGE
    assert "screening" in SCRIPTS
