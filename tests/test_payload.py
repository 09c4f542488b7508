"""The payload: the same bytes for the same sources, small, whole, and alive with nothing installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pytest_mlhpc import payload
from pytest_mlhpc.errors import ProvisionError, UsageError


def test_its_name_is_the_hash_of_its_content(tmp_path):
    built = payload.build(tmp_path)
    assert built.path == tmp_path / "payload" / f"{built.sha256}.zip"
    assert hashlib.sha256(built.path.read_bytes()).hexdigest() == built.sha256


def test_the_same_sources_give_the_same_bytes(tmp_path):
    assert payload.build(tmp_path / "a").path.read_bytes() == payload.build(tmp_path / "b").path.read_bytes()


def test_a_change_of_a_source_gives_another_name(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    before = payload.pack({"a.py": tmp_path / "a.py"})
    (tmp_path / "a.py").write_text("x = 2")
    assert payload.pack({"a.py": tmp_path / "a.py"}) != before


def test_it_holds_the_payload_and_nothing_of_the_controller(tmp_path):
    names = set(zipfile.ZipFile(payload.build(tmp_path).path).namelist())
    assert {
        "pytest_mlhpc/worker/main.py",
        "pytest_mlhpc/batch/main.py",
        "pytest_mlhpc/results/combine.py",
    } <= names
    folders = {name.split("/")[1] for name in names - {"pynvml.py"}}
    assert folders == {"__init__.py", "worker", "batch", "launch", "results", "vet", "screen"}
    assert not [name for name in names if name.startswith("pytest_mlhpc/vet/command")]
    assert {name for name in names if "/results/" in name} == {
        f"pytest_mlhpc/results/{name}.py"
        for name in ("__init__", "schema", "lines", "combine", "foreign", "probed", "samples", "timed")
    }


def test_it_fits_into_a_config_map(tmp_path):
    assert payload.build(tmp_path).path.stat().st_size < payload.MAX_BYTES


def test_a_zip_that_was_cut_short_is_written_again(tmp_path):
    built = payload.build(tmp_path)
    whole = built.path.read_bytes()
    built.path.write_bytes(whole[:100])
    payload.build(tmp_path)
    assert built.path.read_bytes() == whole
    assert [path.name for path in built.path.parent.iterdir()] == [built.path.name]


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "payload").touch()
    with pytest.raises(ProvisionError, match=r"disk_full: cannot write the payload .*/payload/"):
        payload.build(tmp_path)


def test_every_payload_module_without_torch_imports_in_a_bare_interpreter(tmp_path):
    built = payload.build(tmp_path)
    code = """
import sys
assert not any("site-packages" in path for path in sys.path)
sys.path.insert(0, sys.argv[1])
import importlib, pkgutil, pytest_mlhpc
assert sys.argv[1] in pytest_mlhpc.__file__, pytest_mlhpc.__file__
for package in ("batch", "launch", "results", "vet", "vet.checks", "vet.policies", "screen.node"):
    top = importlib.import_module("pytest_mlhpc." + package)
    for found in pkgutil.iter_modules(top.__path__, top.__name__ + "."):
        importlib.import_module(found.name)
from pytest_mlhpc.batch.channel import running_payload
print(running_payload())
"""
    argv = [sys.executable, "-I", "-S", "-c", code, str(built.path)]
    found = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.strip() == built.sha256


def test_a_third_partys_module_travels_with_its_packages(tmp_path, monkeypatch):
    package = tmp_path / "theirs" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "theirs" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set(zipfile.ZipFile(payload.build(tmp_path, ["theirs.deep.model"]).path).namelist())
    assert {"theirs/__init__.py", "theirs/deep/__init__.py", "theirs/deep/model.py"} <= names


def test_a_third_partys_package_travels_whole(tmp_path, monkeypatch):
    package = tmp_path / "whole" / "sub"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", package / "a.py"):
        path.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set(zipfile.ZipFile(payload.build(tmp_path, ["whole"]).path).namelist())
    assert {"whole/__init__.py", "whole/sub/__init__.py", "whole/sub/a.py"} <= names


@pytest.mark.parametrize("name", ["no_such_module", "no.such.module", "sys", ""])
def test_a_module_that_cannot_travel_is_a_usage_error(tmp_path, name):
    with pytest.raises(UsageError, match="cannot find"):
        payload.build(tmp_path, [name])


def test_it_is_written_for_everybody_to_read(tmp_path):
    assert Path(payload.build(tmp_path).path).stat().st_mode & 0o777 == 0o644


def test_it_brings_the_binding_of_nvml_along(tmp_path):
    path, _ = payload.build(tmp_path)
    code = "import pynvml, sys; sys.exit(not hasattr(pynvml, 'nvmlDeviceGetTotalEnergyConsumption'))"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}"],
        check=True,
    )


def test_users_of_one_group_share_its_folder(tmp_path):
    tmp_path.chmod(0o2775)
    assert payload.build(tmp_path).path.parent.stat().st_mode & 0o7777 == 0o2775
