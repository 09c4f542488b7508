"""Vetting's child from the zip alone, under the oldest torch we promise, and under the one of Cerebras' releases."""

import os
from pathlib import Path

import pytest
from child_driver import ROOT, Child
from test_child_pair import orders

from pytest_mlhpc.provision import payload

#: torch -> variable that names its interpreter, or else where `make old-torch` puts it.
INTERPRETERS = {
    "1.13": ("MLHPC_TORCH_1_13_PYTHON", ROOT / ".venv-torch-1.13/bin/python"),
    "2.4": ("MLHPC_TORCH_2_4_PYTHON", ROOT / ".venv-torch-2.4/bin/python"),
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", sorted(INTERPRETERS))
def test_every_command_works(version: str, tmp_path: Path) -> None:
    variable, default = INTERPRETERS[version]
    python = os.environ.get(variable) or str(default)
    archive = payload.build(tmp_path / "payload").path
    options = {"python": python, "environ": {"PYTHONPATH": str(archive)}, "folder": tmp_path}
    with Child(**options) as child, Child(**options) as other:
        assert child.ready()["torch"].startswith(f"{version}.")
        other.ready()
        for do in ("gemm", "memory", "hash", "all_reduce", "host_copy", "transport"):
            outcome = child.outcome(do, seconds=0.1)
            assert not [finding for finding in outcome.findings if finding.severity.value != "INFO"]
        assert len(child.outcome("checkpoint", path=str(tmp_path), size=1 << 20).readings) == 2
        for backend in ("socket", "gloo"):
            for side, order in zip((child, other), orders(backend=backend), strict=True):
                side.order("pair", **order)
            assert [len(side.answer()["outcome"]["readings"]) for side in (child, other)] == [1, 1]
