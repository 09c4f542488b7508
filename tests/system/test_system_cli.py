"""``mlhpc systems list|show|check``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pytest_mlhpc.system import cli


def mlhpc_systems(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_list_names_systems_partitions_and_what_is_archived(folder: Path, capsys):
    (folder / "systems.yaml").write_text(GOOD)
    assert mlhpc_systems("list") == 0
    assert capsys.readouterr().out == "mine  cpu  a laptop\nold   cs (archived)\n"


def test_list_without_a_file_shows_the_built_in_system(folder: Path, capsys):
    assert mlhpc_systems("list") == 0
    assert capsys.readouterr().out.startswith("local  cpu, accelerator")


def test_list_for_programs_is_json(folder: Path, capsys):
    (folder / "systems.yaml").write_text(GOOD)
    assert mlhpc_systems("list", "--json") == 0
    assert [row["status"] for row in json.loads(capsys.readouterr().out)] == ["live", "archived"]


def test_show_fills_in_what_is_known_but_no_variables_of_runs(folder: Path, capsys, monkeypatch):
    (folder / "systems.yaml").write_text(GOOD)
    monkeypatch.setenv("MY_KEY", "hunter2")
    assert mlhpc_systems("show", "mine") == 0
    out = capsys.readouterr().out
    assert "mine:cpu: scheduler local, launcher auto, accelerator cpu" in out
    assert "KEY=${MY_KEY}" in out
    assert "hunter2" not in out


def test_show_renders_an_archived_system_with_its_data(folder: Path, capsys):
    (folder / "systems.yaml").write_text(GOOD)
    assert mlhpc_systems("show", "old") == 0
    out = capsys.readouterr().out
    assert "archived, facts as of 2025-02" in out
    assert "data c: real, /data/c" in out


def test_show_for_programs_is_json(folder: Path, capsys):
    assert mlhpc_systems("show", "local", "--json") == 0
    assert json.loads(capsys.readouterr().out)["partitions"][0]["nodes"]["cores"] >= 1


def test_show_of_an_unknown_system_ends_with_4_and_the_nearest_name(folder: Path, capsys):
    assert mlhpc_systems("show", "lcal") == 4
    assert "unknown system 'lcal' (did you mean 'local'?)" in capsys.readouterr().err


def test_check_notes_missing_variables_and_ends_with_0(folder: Path, capsys, monkeypatch):
    (folder / "systems.yaml").write_text(GOOD)
    monkeypatch.setenv("MY_KEY", "x")
    assert mlhpc_systems("check") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"note: {folder}/systems.yaml:7: ")
    assert "the environment variable MY_PYTHON is not set" in lines[0]
    assert lines[1] == f"{folder}/systems.yaml: 2 systems, no problem"


def test_check_names_every_problem_and_ends_with_4(folder: Path, capsys):
    (folder / "bad.yaml").write_text("a: 1\nsystems: {s: {partitions: {p: {scheduler: pbs, launcher: x}}}}\n")
    assert mlhpc_systems("check", "bad.yaml") == 4
    err = capsys.readouterr().err
    for text in (
        "bad.yaml:1: a: unknown key",
        "serves scheduler 'pbs'",
        "has a launcher 'x'",
        "nodes: is missing",
    ):
        assert text in err
    assert "Traceback" not in err


def test_check_of_a_file_that_does_not_exist_ends_with_4(folder: Path, capsys):
    assert mlhpc_systems("check", "nothing.yaml") == 4
    assert "'nothing.yaml': there is no such file" in capsys.readouterr().err


def test_show_names_everything_that_a_partition_says(folder: Path, capsys):
    (folder / "systems.yaml").write_text(
        "systems: {old: {status: archived, partitions: {gpu: {scheduler: lsf, lsf: {queue: batch}, accelerator: cuda,"
        " nodes: {cores: 44, memory: 512GiB, devices: 6, device_model: V100}, budget: 3 node-hours, features: [ib],"
        " environments: {d: {modules: [cuda/11], python: /p, container: x.sif}}}}}}\n"
    )
    assert mlhpc_systems("show", "old") == 0
    out = capsys.readouterr().out
    for text in (
        "nodes: 44 cores, 512GiB, 6 x V100, at most 1 a job",
        "budget 3 node-hours, features ib",
        'lsf: {"queue": "batch"}',
        "environment d: /p",
        "modules cuda/11",
        "container {'image': 'x.sif', 'mounts': []}",
    ):
        assert text in out
