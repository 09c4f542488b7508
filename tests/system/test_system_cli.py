"""``mlhpc systems list|show|check``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pytest_mlhpc.system import cli


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Return how to run the command in a folder of its own, where GOOD is the systems file; what it prints is returned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "systems.yaml").write_text(GOOD)

    def run(*words: str, code: int = 0) -> str:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        assert cli.run(parser.parse_args(words)) == code
        out, err = capsys.readouterr()
        assert (out if code else err) == ""
        return out or err

    return run


GOOD = """\
systems:
  mine:
    description: a laptop
    partitions:
      cpu:
        scheduler: local
        environments: {d: {python: "${MY_PYTHON}", variables: {KEY: "${MY_KEY}"}}}
  old:
    status: archived
    as_of: 2025-02
    partitions:
      cs: {scheduler: cszoo, nodes: {cores: 1, memory: 1GiB}, environments: {d: {}}}
    datasets: {c: {path: /data/c, kind: real}}
"""


def test_list_names_systems_partitions_and_what_is_archived(systems):
    assert systems("list") == "mine  cpu  a laptop\nold   cs (archived)\n"


def test_list_without_a_file_shows_the_built_in_system(systems):
    Path("systems.yaml").unlink()
    assert systems("list").startswith("local  cpu, accelerator")


def test_list_for_programs_is_json(systems):
    assert [row["status"] for row in json.loads(systems("list", "--json"))] == ["live", "archived"]


def test_show_fills_in_what_is_known_but_no_variables_of_runs(systems, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2")
    out = systems("show", "mine")
    assert "mine:cpu: scheduler local, launcher auto, accelerator cpu" in out
    assert "KEY=${MY_KEY}" in out
    assert "hunter2" not in out


def test_show_renders_an_archived_system_with_its_data(systems):
    out = systems("show", "old")
    assert "archived, facts as of 2025-02" in out
    assert "data c: real, /data/c" in out


def test_show_for_programs_is_json(systems):
    Path("systems.yaml").unlink()
    assert json.loads(systems("show", "local", "--json"))["partitions"][0]["nodes"]["cores"] >= 1


def test_show_of_an_unknown_system_ends_with_4_and_the_nearest_name(systems):
    assert "unknown system 'mime' (did you mean 'mine'?)" in systems("show", "mime", code=4)


def test_check_notes_missing_variables_and_ends_with_0(systems, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "x")
    lines = systems("check").splitlines()
    assert lines[0].startswith(f"note: {tmp_path}/systems.yaml:7: ")
    assert "the environment variable MY_PYTHON is not set" in lines[0]
    assert lines[1] == f"{tmp_path}/systems.yaml: 2 systems, no problem"


def test_check_names_every_problem_and_ends_with_4(systems):
    Path("bad.yaml").write_text("a: 1\nsystems: {s: {partitions: {p: {scheduler: pbs, launcher: x}}}}\n")
    problems = systems("check", "bad.yaml", code=4)
    texts = (
        "bad.yaml:1: a: unknown key",
        "serves scheduler 'pbs'",
        "has a launcher 'x'",
        "nodes: is missing",
    )
    assert [text for text in texts if text not in problems] == []
    assert "Traceback" not in problems


def test_check_of_a_file_that_does_not_exist_ends_with_4(systems):
    assert "'nothing.yaml': there is no such file" in systems("check", "nothing.yaml", code=4)


def test_show_names_everything_that_a_partition_says(systems):
    Path("systems.yaml").write_text(
        "systems: {old: {status: archived, partitions: {gpu: {scheduler: lsf, lsf: {queue: batch}, accelerator: cuda,"
        " nodes: {cores: 44, memory: 512GiB, devices: 6, device_model: V100}, budget: 3 node-hours, features: [ib],"
        " environments: {d: {modules: [cuda/11], python: /p, container: x.sif}}}}}}\n"
    )
    out = systems("show", "old")
    for text in (
        "nodes: 44 cores, 512GiB, 6 x V100, at most 1 a job",
        "budget 3 node-hours, features ib",
        'lsf: {"queue": "batch"}',
        "environment d: /p",
        "modules cuda/11",
        "container {'image': 'x.sif', 'mounts': []}",
    ):
        assert text in out
