"""What ``mlhpc init`` finds on a machine, and the files that it writes."""

import re
from collections import ChainMap
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.cli.init import (
    MachineSurroundings,
    SlurmPartition,
    find_machine,
    partitions_of,
    project_files,
    write_project,
)
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.errors import StoreError

GPUS = SlurmPartition("gpu", 2, 64, 500_000, 4, "h100", 86_400)
CPUS = SlurmPartition("cpu-long", 10, 128, 256_000)


@pytest.mark.parametrize(
    ("answer", "partitions"),
    [
        ("", ()),
        ("gpu|2|64|500000|gpu:h100:4(S:0-1)|1-00:00:00\n", (GPUS,)),
        ("gpu|1|64+|500000+|gpu:h100:4|1-00:00:00\ngpu|1|96|600000|gpu:h100:8|1-00:00:00\n", (GPUS,)),
        ("cpu-long|10|128|256000|(null)|infinite\n", (CPUS,)),
        ("a|1|2|3|gpu:2|30:00\n", (SlurmPartition("a", 1, 2, 3, 2, "gpu", 1800),)),
        ("slurm_load_partitions: Unable to contact slurm controller\n a b|x\n", ()),
    ],
)
def test_partitions_are_what_sinfo_lists(answer, partitions):
    assert partitions_of(answer) == partitions


@pytest.mark.parametrize(
    ("script", "names"), [("echo 'cpu|4|16|16000|(null)|1:00:00'", ["cpu"]), ("exit 1", []), (None, [])]
)
def test_sinfo_is_asked_where_there_is_one(tmp_path, monkeypatch, script, names):
    if script:
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_machine({"HOME": str(tmp_path)})
    assert ([part.name for part in found.slurm], found.kubernetes) == (names, False)


@pytest.mark.parametrize(
    "environ", [{"HOME": "{folder}"}, {"HOME": "/nowhere", "KUBECONFIG": "/x:{folder}/.kube/config"}]
)
def test_a_kubeconfig_means_kubernetes(tmp_path, monkeypatch, environ):
    monkeypatch.setenv("PATH", "")
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").touch()
    assert find_machine({key: value.format(folder=tmp_path) for key, value in environ.items()}).kubernetes


@pytest.mark.parametrize("torch", [True, False])
@pytest.mark.parametrize(
    ("surroundings", "targets"),
    [
        ({}, {"local": ["cpu", "accelerator"]}),
        ({"slurm": (GPUS, CPUS)}, {"local": ["cpu", "accelerator"], "cluster": ["gpu", "cpu-long"]}),
        ({"kubernetes": True}, {"local": ["cpu", "accelerator"], "kubernetes": ["cpu", "nvidia"]}),
    ],
)
def test_all_files_are_valid(tmp_path, surroundings, targets, torch):
    files = project_files(MachineSurroundings(torch=torch, **surroundings))
    written, there = write_project(tmp_path, files)
    assert (sorted(written), there) == (sorted(files), [])
    schedulers = dict(ChainMap(*make_manager().hook.mlhpc_schedulers()))
    found = load_systems(tmp_path / "systems.yaml", schedulers=schedulers, environ={})
    assert {name: list(entry.partitions) for name, entry in found.entries.items()} == targets
    compile(files["suites/test_first.py"], "test_first.py", "exec")
    inputs, jobs = yaml.safe_load_all(files[".gitlab-ci.yml"])
    assert inputs["spec"]["inputs"]["image"]["default"] == "python:3.12"
    assert jobs["benchmarks"]["image"] == "$[[ inputs.image ]]"


def test_what_must_be_asked_of_a_site_stands_in_the_entry():
    text = project_files(
        MachineSurroundings(slurm=(GPUS, CPUS, replace(CPUS, name="short", max_time_s=1200)))
    )["systems.yaml"]
    assert 'account: "${MLHPC_ACCOUNT}", max_time: 86400s' in text
    assert "devices: 4, device_model: h100" in text
    assert re.findall(r"time_limit: (\d+)s", text) == ["1800", "1800", "600"]
    assert '"Which account do my jobs charge?"' in text


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("systems.yaml", ["suites/test_first.py", "pytest.ini"]),
        ("pyproject.toml", ["suites/test_first.py", "systems.yaml"]),
    ],
)
def test_nothing_is_written_over(tmp_path, name, written):
    """And of two files with pytest's settings one would be hidden."""
    (tmp_path / name).write_text("mine")
    files = dict.fromkeys(("suites/test_first.py", "systems.yaml", "pytest.ini"), "new")
    assert write_project(tmp_path, files) == (written, [name])
    assert (tmp_path / name).read_text() == "mine"
    assert write_project(tmp_path, files)[0] == []


def test_who_is_killed_while_a_file_is_written_begins_that_file_anew(tmp_path, monkeypatch):
    files = {"suites/test_first.py": "new", "systems.yaml": "new"}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_project(tmp_path, files)
    assert write_project(tmp_path, files) == ([*files], [])


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "suites").write_text("a file")
    with pytest.raises(StoreError, match=r"suites/test_first\.py: cannot be written: "):
        write_project(tmp_path, {"suites/test_first.py": ""})


def test_init_says_what_it_wrote_and_what_comes_next(tmp_path, monkeypatch, mlhpc):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    (tmp_path / ".gitignore").write_text("mine")
    said = mlhpc("init").out.splitlines()
    assert said[:2] == ["wrote suites/test_first.py", "wrote systems.yaml"]
    assert said[-2:] == [".gitignore is there and was not changed", "next: pytest --system local"]
    assert mlhpc("init", "an other").out.splitlines()[-1] == "next: cd 'an other' && pytest --system local"
