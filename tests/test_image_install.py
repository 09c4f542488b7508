"""What the Dockerfile installs over a base image: the base's torch stays, everything else has the pinned version."""

import importlib.util
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PINNED = ["# a comment", "numpy==2.4.6", "pytest==9.2.0", "torch==2.13.0", "typing_extensions==4.16.0"]


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "ci/image.d/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_base_without_torch_gets_every_pinned_version(install):
    assert install.versions(PINNED, {}, "") == PINNED


def test_a_version_of_torch_that_is_asked_for_replaces_the_pinned_one_alone(install):
    assert install.versions(PINNED, {}, "2.8.0") == [
        line for line in PINNED if not line.startswith("torch")
    ] + ["torch==2.8.0"]


def test_torch_and_numpy_of_the_base_stay_and_no_version_that_is_asked_for_counts(install):
    kept = {"torch": "2.8.0a0+vendor", "numpy": "1.26.4", "pytorch-triton": "3.4"}
    found = install.versions(PINNED, kept, "2.9.0")
    assert [line for line in found if line.startswith(("torch", "numpy"))] == [
        "numpy==1.26.4",
        "torch==2.8.0a0+vendor",
    ]
    assert "pytest==9.2.0" in found


def test_of_this_environment_torch_and_what_is_built_for_it_stays(install):
    kept = install.of_base()
    assert {"torch", "numpy"} <= set(kept)
    assert "pytest" not in kept


def test_a_python_that_is_too_old_is_named_with_what_to_do(install, monkeypatch):
    version = namedtuple("version", "major minor")  # noqa: PYI024 - compares as sys.version_info does
    monkeypatch.setattr(sys, "version_info", version(3, 10))
    monkeypatch.setattr(sys, "argv", ["install.py", "source", "target"])
    with pytest.raises(SystemExit, match=r"BASE has Python 3\.10, .* needs 3\.11.* run the base itself"):
        install.main()
