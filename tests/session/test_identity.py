"""The identity of a test: the same wherever its suite lies and pytest is started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import pytest_mlhpc
from pytest_mlhpc.session.collection import identity_of, suite_root


def files(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("there", "file", "identity"),
    [
        (["systems.yaml"], "suites/test_a.py", "suites/test_a.py"),
        (["pytest.ini", "bench/systems.yaml"], "bench/suites/test_a.py", "suites/test_a.py"),
        ([".git/HEAD"], "a/b/test_a.py", "a/b/test_a.py"),
        ([], "suites/training/test_a.py", "suites/training/test_a.py"),
        ([], "a/b/test_a.py", "test_a.py"),
        ([".git/HEAD"], "venv/lib/python3.11/site-packages/site_suite/test_a.py", "site_suite/test_a.py"),
    ],
    ids=[
        "beside the systems file",
        "by the nearest mark",
        "in a repository",
        "without a mark by the folder suites",
        "without that by the file alone",
        "of an installed suite by its package",
    ],
)
def test_paths_are_relative_to_the_root_of_the_suite(tmp_path, there, file, identity):
    files(tmp_path, *there, file)
    path = tmp_path / file
    assert path.relative_to(suite_root(path)).as_posix() == identity


def test_the_suites_of_the_package_are_called_as_those_of_the_checkout():
    package = Path(pytest_mlhpc.__file__).parent
    installed = package / "suites/training/test_cosmoflow.py"
    checkout = package.parent / "suites/training/test_cosmoflow.py"
    assert installed.relative_to(suite_root(installed)) == checkout.relative_to(suite_root(checkout))


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        (None, "TestIt::test_a"),
        ("local:cpu", "TestIt::test_a"),
        ("local:cpu-4", "TestIt::test_a[4]"),
        ("local:cpu-4-bf16", "TestIt::test_a[4-bf16]"),
        ("1-local:cpu-4", "TestIt::test_a[1-4]"),
    ],
    ids=[
        "without parameters",
        "of the target alone",
        "with one more",
        "with two",
        "behind that of another plug-in",
    ],
)
def test_the_target_is_no_part_of_it(tmp_path, parameters, names):
    files(tmp_path, "systems.yaml", "suites/test_a.py")
    node_id = "elsewhere/test_a.py::TestIt::test_a" + (f"[{parameters}]" if parameters else "")
    item = SimpleNamespace(nodeid=node_id, path=tmp_path / "suites/test_a.py")
    if parameters:
        item.callspec = SimpleNamespace(id=parameters)
    assert identity_of(item, "local:cpu") == f"suites/test_a.py::{names}"
