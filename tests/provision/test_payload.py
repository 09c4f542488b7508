"""The payload: the same bytes for the same sources, small, whole, and alive with nothing installed."""

import ast
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.provision import payload

PACKAGE = Path(payload.__file__).parents[1]


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


def test_it_is_the_folder_of_the_nodes_below_an_empty_package(tmp_path):
    archive = zipfile.ZipFile(payload.build(tmp_path).path)
    names = set(archive.namelist()) - {"pynvml.py"}
    node = PACKAGE / "node"
    ours = {
        f"pytest_mlhpc/{path.relative_to(PACKAGE)}" for path in [*node.rglob("*.py"), *node.rglob("*.json")]
    }
    assert names == ours | {"pytest_mlhpc/__init__.py"}
    assert archive.read("pytest_mlhpc/__init__.py") == b""


def test_what_runs_on_nodes_imports_nothing_of_this_package_but_its_own_folder():
    imported = {
        (str(path.relative_to(PACKAGE)), name)
        for path in sorted((PACKAGE / "node").rglob("*.py"))
        for name in imports(path.read_text(encoding="utf-8"))
        if name.partition(".")[0] == "pytest_mlhpc"
    }
    assert len(imported) > 500, "imports inside functions count too"
    above = {
        (path, name)
        for path, name in imported
        if name != "pytest_mlhpc" and not f"{name}.".startswith("pytest_mlhpc.node.")
    }
    assert not above


def imports(source):
    """Yield the dotted names that a module imports, at its top and inside functions."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, "names are written in full"
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def test_it_fits_into_a_secret(tmp_path):
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
    with pytest.raises(ProvisionError, match=r"not_writable: cannot write the payload .*/payload/"):
        payload.build(tmp_path)


def test_every_payload_module_without_torch_imports_in_a_bare_interpreter(tmp_path):
    built = payload.build(tmp_path)
    code = """
import sys
assert not any("site-packages" in path for path in sys.path)
sys.path.insert(0, sys.argv[1])
import importlib, pkgutil, pytest_mlhpc
assert sys.argv[1] in pytest_mlhpc.__file__, pytest_mlhpc.__file__
for package in ("", ".agents", ".protocol", ".batch", ".vet", ".vet.checks", ".telemetry"):
    top = importlib.import_module("pytest_mlhpc.node" + package)
    for found in pkgutil.iter_modules(top.__path__, top.__name__ + "."):
        importlib.import_module(found.name)
from pytest_mlhpc.node.protocol.channel import running_payload
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


@pytest.mark.parametrize("state", [0o755, 0o2775])
@pytest.mark.parametrize("left", [None, 0o2775], ids=["new", "an older version's"])
def test_it_is_for_nobody_else_to_change_whatever_the_umask_and_the_state_directory_say(
    tmp_path, state, left
):
    tmp_path.chmod(state)
    if left is not None:
        (tmp_path / "payload").mkdir()
        (tmp_path / "payload").chmod(left)
    mask = os.umask(0o002)
    try:
        path = payload.build(tmp_path).path
    finally:
        os.umask(mask)
    assert [one.stat().st_mode & 0o7777 for one in (path.parent, path)] == [0o700, 0o600]


def test_it_brings_the_binding_of_nvml_along(tmp_path):
    path, _ = payload.build(tmp_path)
    code = "import pynvml, sys; sys.exit(not hasattr(pynvml, 'nvmlDeviceGetTotalEnergyConsumption'))"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}"],
        check=True,
    )
