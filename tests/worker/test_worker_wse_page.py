"""What docs/accelerators.md says of Cerebras: every field is there, and its system and tests run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.plugins import make_manager
from pytest_mlhpc.system.loading import load_systems
from pytest_mlhpc.worker.workloads.fields import wse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/accelerators.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Cerebras (wse)\n")[2].partition("\n## ")[0]
(SYSTEMS,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
(TESTS,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def session(folder: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "systems.yaml").write_text(SYSTEMS.replace("/path/of/venv/bin/python", python))
    (folder / "test_x.py").write_text(TESTS)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "--system",
        "our-cs3",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]
    return subprocess.run(
        [*argv, *arguments],
        cwd=folder,
        env={**os.environ, "MLHPC_STATE": str(folder / "state")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_table_names_every_field():
    assert set(wse.FIELDS) <= set(re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE))


def test_the_tests_of_the_page_are_collected_on_its_system(tmp_path):
    found = session(tmp_path, "python3", "--collect-only", "-q")
    assert found.returncode == 0, found.stdout + found.stderr
    names = re.findall(r"::(test_\w+)", found.stdout)
    assert names == ["test_cosmoflow_on_a_wafer", "test_cosmoflow_by_the_cpu_backend", *["test_lowering"] * 4]


@pytest.mark.servers
@pytest.mark.slow
def test_the_page_without_a_cluster_trains_lowers_skips_and_says_that_there_is_no_cluster(tmp_path):
    python = os.environ.get("MLHPC_CEREBRAS_PYTHON") or str(ROOT / ".venv-cerebras/bin/python")
    found = session(tmp_path, python, "-rs", "--preset", "smoke", "--update-baselines", "-k", "not resnet50")
    words = " ".join(found.stdout.split())
    assert "1 failed, 3 passed, 1 skipped" in words, found.stdout
    assert "convolutions with groups != 1 are not supported" in words
    assert "no Cerebras cluster can be used from this host" in words


def shipped(environ):
    known = {name: model for each in make_manager().hook.mlhpc_schedulers() for name, model in each.items()}
    return load_systems(ROOT / "systems.yaml", schedulers=known, environ=environ).select("eidf-cs3")


def test_the_cluster_in_edinburgh_is_one_partition_of_its_user_node_with_an_interpreter_of_its_own():
    (target,) = shipped({"MLHPC_CEREBRAS_PYTHON": "/venv/bin/python"})
    assert target.partition.id == "eidf-cs3:csx"
    assert (target.partition.scheduler, target.partition.accelerator) == ("local", "wse")
    assert (target.partition.nodes.devices, target.partition.nodes.device_model) == (1, "Cerebras CS-3")
    assert target.environment.python == "/venv/bin/python"


def test_without_that_interpreter_the_variable_is_named():
    with pytest.raises(UsageError, match=r"eidf-cs3\.partitions\.csx\..*MLHPC_CEREBRAS_PYTHON"):
        shipped({})
