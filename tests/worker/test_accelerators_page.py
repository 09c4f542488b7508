"""docs/accelerators.md says what is: every field, what fast sets, and examples that are collected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.worker.workloads.fields import arithmetic

PAGE = (Path(__file__).parents[2] / "docs/accelerators.md").read_text(encoding="utf-8")
TRAINING = [workload.name for workload in WORKLOADS if "tuning" in workload.fields]


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table that begins with *heading*, without its first two lines."""
    table = PAGE.partition(heading)[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]


def test_the_table_names_every_field():
    named = {word for row in rows_of("| field | cpu |") for word in re.findall(r"`(\w+)`", row[0])}
    assert named == {*arithmetic.FIELDS, "precision", "channels_last"}


def test_what_the_table_calls_refused_is_refused_on_that_device():
    devices = ["cpu", "cuda", "rocm", "xpu"]
    values = {"cuda_graphs": True, "threads": 1, "binding": "cores", "miopen_find": "fast"}
    for cells in rows_of("| field | cpu |"):
        for field in set(re.findall(r"`(\w+)`", cells[0])) & set(values):
            for device, cell in zip(devices, cells[1:], strict=True):
                found = arithmetic.wrong({field: values[field], "accelerator": device})
                assert bool(found) == (cell == "refused"), (field, device)


def test_the_table_of_fast_is_that_of_the_code():
    told: dict[str, dict[str, dict[str, str]]] = {}
    for device, workloads, values in rows_of("| device | workload | `fast` sets |"):
        for workload in workloads.split(", "):
            name = "" if workload == "any other" else workload
            told.setdefault(device, {})[name] = dict(pair.split("=") for pair in values.split())
    assert told == {
        device: {name: {field: str(value) for field, value in sets.items()} for name, sets in rows.items()}
        for device, rows in arithmetic.FAST.items()
    }


def test_every_device_with_a_row_of_its_own_has_a_module():
    folder = Path(arithmetic.__file__).parents[2] / "accelerators"
    named = [row[0].strip("`") for row in rows_of("| type | torch |")]
    assert named == ["cpu", "cuda", "rocm", "xpu"]
    assert all((folder / f"{name}.py").is_file() for name in named)


def test_modes_of_compiling_and_finding_are_all_named():
    for word in (*arithmetic.MODES, *arithmetic.FIND_MODES):
        assert f"`{word}`" in PAGE
    assert (
        f"at least {arithmetic.EAGER_STEPS + 1}, or {arithmetic.EAGER_STEPS_DDP + 1} on several devices"
        in PAGE
    )


def collected(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_x.py").write_text(text)
    command = ["-m", "pytest", "--collect-only", "-q", "--system", "local", "-p", "no:cacheprovider"]
    environment = {**os.environ, "MLHPC_STATE": str(folder / "state")}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.servers
def test_the_example_is_taken_as_it_stands(tmp_path):
    example = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]  # later ones are of single devices

    ended = collected(tmp_path, example)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 tests collected" in ended.stdout


@pytest.mark.servers
def test_a_refusal_reads_as_the_page_says(tmp_path):
    text = "import pytest\n\n@pytest.mark.train('resnet50', cuda_graphs=True)\ndef test_x(run):\n    pass\n"

    ended = collected(tmp_path, text)

    (told,) = re.findall(r"^    (ERROR: .*)$", PAGE, re.MULTILINE)
    assert ended.returncode == 4
    assert told in ended.stdout + ended.stderr
