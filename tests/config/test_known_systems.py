"""Systems that the package knows, and ``mlhpc systems add NAME``."""

import json
from collections import ChainMap
from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.config.systems_files import KNOWN, add_system, known_names, known_text
from pytest_mlhpc.errors import UsageError

NAMES = known_names()


def load(path: Path):
    return load_systems(path, schedulers=dict(ChainMap(*make_manager().hook.mlhpc_schedulers())), environ={})


def test_each_known_system_has_a_file_of_its_name():
    assert sorted(load(KNOWN).entries) == NAMES
    assert {"archer2", "cirrus", "alps-clariden"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_known_system_is_added_to_a_new_file_next_to_this_machine(tmp_path, name):
    variables = add_system(tmp_path / "systems.yaml", name)
    assert list(load(tmp_path / "systems.yaml").entries) == ["local", name]
    assert ("MLHPC_ACCOUNT" in variables) == ("account: " in known_text(name))


@pytest.mark.parametrize(
    "text",
    [
        "systems:\n  mine: {partitions: {p: {scheduler: local}}}\n",
        "systems:\n    mine:\n        partitions: {p: {scheduler: local}}",
        "systems:\n  mine:\n    partitions:\n      p: {scheduler: local}\n    # last word of mine\n\n# of defaults\ndefaults: {max_jobs: 1}\n",
    ],
)
def test_what_stands_in_the_file_stays(tmp_path, text):
    path = tmp_path / "systems.yaml"
    path.write_text(text)
    add_system(path, "cirrus")
    new = path.read_text()
    found = yaml.safe_load(new)
    assert found["systems"].pop("cirrus") == yaml.safe_load(known_text("cirrus"))["cirrus"]
    assert found == yaml.safe_load(text)
    assert [line for line in text.splitlines() if line not in new.splitlines()] == []
    assert list(load(path).entries) == ["mine", "cirrus"]


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        (None, "cirus", "no system 'cirus' is known (did you mean 'cirrus'?)"),
        (None, "../builtin", "no system '../builtin' is known; `mlhpc systems list --known` lists them"),
        ("systems:\n  cirrus: {}\n", "cirrus", "line 2 has a system 'cirrus' already; nothing was written"),
        ("systems: {a: {}}\n", "cirrus", "it has no `systems:` with one system a line; nothing was written"),
        ("systems:\n", "cirrus", "it has no `systems:` with one system a line; nothing was written"),
        ("- a\n", "cirrus", "it has no `systems:` with one system a line"),
        ("", "cirrus", "it has no `systems:` with one system a line"),
        ("a: [", "cirrus", "it is no YAML; `mlhpc systems check` says where; nothing was written"),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_is_written(tmp_path, text, name, problem):
    path = tmp_path / "systems.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as error:
        add_system(path, name)
    assert problem in str(error.value)
    assert (path.read_text() if path.exists() else None) == text


@pytest.fixture
def systems(tmp_path, monkeypatch, mlhpc):
    monkeypatch.chdir(tmp_path)
    return lambda *words, code=0: mlhpc("systems", *words, code=code)


def test_a_known_system_is_listed_and_added_and_then_shown(systems):
    known = [row["name"] for row in json.loads(systems("list", "--known", "--json").out)["systems"]]
    assert "archer2" in known
    lines = systems("add", "archer2").out.splitlines()
    assert lines[0] == "systems.yaml: added archer2; its comments say what to check on the machine"
    assert "MLHPC_ACCOUNT" in lines[1]
    assert lines[2] == "next: mlhpc systems check --render archer2"
    assert [line.split()[0] for line in systems("list").out.splitlines()] == ["local", "archer2"]
    assert "has a system 'archer2' already; nothing was written" in systems("add", "archer2", code=2).err


def test_a_known_system_that_no_file_has_is_refused_with_how_to_add_it(systems):
    said = systems("show", "cirrus", code=2).err
    assert "there is no systems.yaml here: unknown system 'cirrus'" in said
    assert "`mlhpc systems add cirrus` adds it" in said
    misspelt = systems("show", "cirus", code=2).err
    assert "did you mean 'cirrus'? `mlhpc systems add cirrus` adds it" in misspelt
