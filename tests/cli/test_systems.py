"""``mlhpc systems list|show|check``."""

import json
import shutil
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlhpc):
    """Return what runs the command in a folder with a systems file of its own, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("two_systems.yaml"), "systems.yaml")

    def run(*words: str, code: int = 0) -> str:
        printed = mlhpc("systems", *words, code=code)
        assert (printed.out if code else printed.err) == ""
        return printed.out or printed.err

    return run


def test_list_names_systems_partitions_and_what_is_archived(systems):
    first, second, *_ = systems("list").splitlines()
    assert (first, second) == ("mine   cpu  a laptop", "old    cs (archived)")


@pytest.mark.parametrize("text", [None, "systems: {mine: {partitions: {cpu: {scheduler: local}}}}\n"])
def test_this_machine_is_listed_without_a_systems_file(systems, text):
    Path("systems.yaml").write_text(text) if text else Path("systems.yaml").unlink()
    assert "local  cpu, accelerator  this machine" in systems("list")
    assert json.loads(systems("show", "local", "--json"))["system"]["partitions"][0]["nodes"]["cores"] >= 1


def test_check_without_a_file_checks_nothing_and_says_so(systems):
    Path("systems.yaml").unlink()
    assert systems("check").startswith("there is no systems.yaml here, only `local`; `mlhpc init` writes one")


def test_list_for_programs_is_json(systems):
    assert [row["status"] for row in json.loads(systems("list", "--json"))["systems"]] == [
        "live",
        "archived",
        "live",
    ]


def test_show_fills_in_what_is_known_but_no_variables_of_runs(systems, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2")
    out = systems("show", "mine")
    assert "mine:cpu: scheduler local, launcher auto, accelerator cpu" in out
    assert ("KEY=${MY_KEY}" in out, "hunter2" in out) == (True, False)


def test_show_renders_an_archived_system_with_its_data(systems):
    out = systems("show", "old")
    assert "archived, facts as of 2025-02" in out
    assert "data c: real, /data/c" in out


def test_show_of_an_unknown_system_ends_with_2_and_the_nearest_name(systems):
    assert "unknown system 'mime' (did you mean 'mine'?)" in systems("show", "mime", code=2)


def test_check_notes_missing_variables_and_ends_with_0(systems, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "x")
    lines = systems("check").splitlines()
    assert lines[0].startswith(f"note: {tmp_path}/systems.yaml:7: ")
    assert "the environment variable MY_PYTHON is not set" in lines[0]
    assert lines[1] == f"{tmp_path}/systems.yaml: 2 systems, no problem"


def test_check_names_every_problem_and_ends_with_2(systems):
    Path("bad.yaml").write_text("a: 1\nsystems: {s: {partitions: {p: {scheduler: pbs, launcher: x}}}}\n")
    problems = systems("check", "bad.yaml", code=2)
    texts = (
        "bad.yaml:1: a: unknown key",
        "serves scheduler 'pbs'",
        "has a launcher 'x'",
        "nodes: is missing",
    )
    assert [text for text in texts if text not in problems] == []
    assert "Traceback" not in problems


def test_check_of_a_file_that_does_not_exist_ends_with_2(systems):
    assert "'nothing.yaml': there is no such file" in systems("check", "nothing.yaml", code=2)


def test_show_names_everything_that_a_partition_says(systems):
    case = yaml.safe_load(Path(__file__).with_name("shown.yaml").read_text(encoding="utf-8"))
    Path("systems.yaml").write_text(case["file"])
    assert systems("show", "old").splitlines()[2:] == case["shown"]
