"""The job scripts of systems.yaml, as reviewed: ``MLHPC_UPDATE_GOLDEN=1 pytest tests/provision/slurm_script`` writes them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from pytest_mlhpc.plugins import make_manager
from pytest_mlhpc.system import cli
from pytest_mlhpc.system.loading import load_systems
from pytest_mlhpc.system.previews import previews
from pytest_mlhpc.system.selection import Systems

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"


def load(path: Path) -> Systems:
    schedulers = {
        name: model for each in make_manager().hook.mlhpc_schedulers() for name, model in each.items()
    }
    return load_systems(path, schedulers=schedulers, environ={})


def mlhpc_systems(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


def test_the_job_scripts_of_our_systems_are_those_that_were_reviewed():
    shown = previews(load(ROOT / "systems.yaml"), make_manager().hook)
    scripts = {name: preview.text for name, preview in shown.found.items() if preview.suffix == "sh"}
    if os.environ.get("MLHPC_UPDATE_GOLDEN"):
        for old in GOLDEN.glob("*.sh"):
            old.unlink()
        for name, script in scripts.items():
            (GOLDEN / f"{name}.sh").write_text(script)
    reviewed = {path.stem: path.read_text() for path in GOLDEN.glob("*.sh")}
    assert shown.notes == ()
    assert sorted(scripts) == sorted(reviewed)
    for name, script in scripts.items():
        assert script == reviewed[name], f"{name}: see the head of this file"


FILE = """\
systems:
  mine:
    partitions:
      one: &p
        scheduler: slurm
        nodes: {cores: 16, memory: 16GiB, max: N}
        slurm: {partition: short, account: "${MY_ACCOUNT}"}
        environments: {default: {python: python3}, other: {python: python3, setup: "SETUP"}}
      two: *p
  old:
    status: archived
    partitions: {three: *p}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "systems.yaml"
    path.write_text(FILE.replace("max: N", "max: 2").replace("SETUP", "true"))
    return path


def test_check_counts_the_scripts_it_rendered(file: Path, capsys):
    assert mlhpc_systems("check") == 0
    note, last = capsys.readouterr().out.splitlines()
    where = f"{file}:7: systems.mine.partitions.one.slurm.account"
    assert note == f"note: {where}: the environment variable MY_ACCOUNT is not set"
    assert last == f"{file}: 2 systems, 6 job scripts, no problem"


def test_a_variable_that_is_needed_in_many_places_has_one_note(file: Path, capsys):
    file.write_text(file.read_text().replace("partition: short", 'partition: "${MY_ACCOUNT}"'))
    assert mlhpc_systems("check") == 0
    assert "MY_ACCOUNT is not set (needed in 2 places)\n" in capsys.readouterr().out


def test_one_script_is_printed_as_it_is(file: Path, capsys):
    file.write_text(file.read_text().replace(', other: {python: python3, setup: "true"}', ""))
    assert mlhpc_systems("check", "--render", "mine:two") == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=mlhpc-ALLOCATION\n#SBATCH --partition=short\n")
    assert '#SBATCH --account="${MY_ACCOUNT}"\n' in out


def test_several_scripts_are_told_apart(file: Path, capsys):
    assert mlhpc_systems("check", "--render", "old") == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#####")]
    assert heads == ["##### old.three.default", "##### old.three.other"]


def test_scripts_are_written_to_a_folder(file: Path, tmp_path: Path):
    assert mlhpc_systems("check", "--render", "mine:one", "--render-to", str(tmp_path / "to/here")) == 0
    assert sorted(path.name for path in (tmp_path / "to/here").iterdir()) == [
        "mine.one.default.sh", "mine.one.other.sh",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_is_named(file: Path, capsys):
    assert mlhpc_systems("check", "--render-to", f"{file}/x") == 4
    assert capsys.readouterr().err == f"{file}/x: cannot be written: Not a directory\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mime", "unknown system 'mime' (did you mean 'mine'?); known: mine, old"),
        ("mine:thre", "'mine:thre' has no partition to render"),
    ],
)
def test_what_there_is_not_cannot_be_rendered(file: Path, capsys, name: str, text: str):
    assert mlhpc_systems("check", "--render", name) == 4
    assert capsys.readouterr().err == f"{file}: {text}\n"


@pytest.mark.parametrize(
    ("setup", "complaint"),
    [
        ("if true; then", "unexpected end of file"),
        ("echo 'a", "syntax error"),
        ("cat <<X", "here-document"),
    ],
)
def test_a_setup_that_bash_cannot_read_is_a_problem(file: Path, capsys, setup: str, complaint: str):
    file.write_text(file.read_text().replace('"true"', f'"{setup}"'))
    assert mlhpc_systems("check") == 4
    error = capsys.readouterr().err
    assert error.startswith("mine:one, environment other: bash cannot read the job script; look at `setup`: ")
    assert complaint in error


def test_a_partition_that_needs_variables_for_its_shape_is_named(file: Path, capsys):
    file.write_text(file.read_text().replace("max: 2", 'max: "${NODES}"'))
    assert mlhpc_systems("check") == 0
    assert "note: mine:one: not rendered: it needs variables that are not set\n" in capsys.readouterr().out
