"""The payload's zip in an interpreter that has nothing else: no third party, no checkout."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from zipped_batch import bodies, failed, run_batch, training

from pytest_mlhpc.provision import payload

#: Prints the modules that cannot be imported without third parties, and what each of them lacks.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
"""

#: Modules that the batch and the controller import, so that they must do without torch.
TORCH_FREE = (
    "pytest_mlhpc.node.batch.", "pytest_mlhpc.node.launch", "pytest_mlhpc.store.", "pytest_mlhpc.node.worker.main",
    "pytest_mlhpc.cli.data", "pytest_mlhpc.node.worker.workloads.catalogue",
    "pytest_mlhpc.node.torchrun", "pytest_mlhpc.node.spawn",
    "pytest_mlhpc.node.worker.workloads.definitions", "pytest_mlhpc.node.worker.workloads.probing",
    "pytest_mlhpc.node.worker.probes.volume", "pytest_mlhpc.node.worker.probes.volume",
)  # fmt: skip


@pytest.fixture
def archive(tmp_path):
    return payload.build(tmp_path).path


@pytest.fixture
def bare_python(tmp_path):
    """Return an interpreter without site-packages, as a program of one word."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -s "$@"\n')
    python.chmod(0o755)
    return str(python)


def modules_of(archive: Path) -> list[str]:
    names = (name for name in zipfile.ZipFile(archive).namelist() if name.endswith(".py"))
    return sorted(name[:-3].replace("/", ".").removesuffix(".__init__") for name in names)


def test_every_file_is_python_3_9(archive):
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            tree = ast.parse(opened.read(name), name, feature_version=(3, 9))
            # feature_version lets these two pass, Python 3.9 does not.
            assert not [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.Match, ast.TryStar))]


def test_the_zip_is_below_the_limit_of_a_secret(archive):
    assert archive.stat().st_size < payload.MAX_BYTES


def test_importing_lacks_nothing_but_torch(archive, bare_python, tmp_path):
    modules = modules_of(archive)
    ended = subprocess.run(
        [bare_python, "-c", IMPORT_ALL, *modules],
        env={"PYTHONPATH": str(archive)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    lacking = dict(line.split() for line in ended.stdout.splitlines())
    assert set(lacking.values()) == {"torch"}
    assert not [name for name in lacking if name.startswith(TORCH_FREE)]
    assert "pytest_mlhpc.node.worker.probe" not in lacking


@pytest.mark.servers
def test_the_batch_measures_a_rank_that_needs_no_torch(bare_python, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run = training(bare_python, "cosmoflow", launcher="third_party.launcher", steps=2, warmup_steps=0)
    messages = run_batch([bare_python], tmp_path, run, extra_modules=["third_party.launcher"])
    (measurement,) = bodies(messages, run, "measurement")
    assert measurement["step_times_s"] == [1.5, 1.5]
    assert "third parties here: False" in (tmp_path / run.run_id / "rank0.log").read_text()


@pytest.mark.servers
def test_a_node_without_torch_says_which_interpreter_lacks_it(bare_python, tmp_path):
    outcome, text = failed(bare_python, tmp_path, training(bare_python, "cosmoflow"))
    named = [name in text for name in ("No module named 'torch'", sys.executable)]
    assert (outcome, named) == ("import_failed", [True, True])
