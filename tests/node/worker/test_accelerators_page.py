"""docs/accelerators.md says what is: every field, what fast sets, and examples that are collected."""

import re

import pytest
from pages import ACCELERATORS as PAGE
from pages import COLLECT, blocks, session

from pytest_mlhpc.node.worker.base import DEVICES
from pytest_mlhpc.node.worker.workloads.fields import arithmetic


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table that begins with *heading*, without its first two lines."""
    table = PAGE.partition(heading)[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_table_names_every_field():
    named = {word for row in rows_of("| field | cpu |") for word in re.findall(r"`(\w+)`", row[0])}
    assert named == {*arithmetic.FIELDS, "precision", "channels_last"}


def test_what_the_table_calls_refused_is_refused_on_that_device():
    values = {"cuda_graphs": True, "threads": 1, "binding": "cores", "miopen_find": "fast"}
    for cells in rows_of("| field | cpu |"):
        for field in set(re.findall(r"`(\w+)`", cells[0])) & set(values):
            for device, cell in zip(("cpu", "cuda", "rocm", "xpu"), cells[1:], strict=True):
                found = arithmetic.wrong({field: values[field], "accelerator": device})
                assert bool(found) == (cell == "refused"), (field, device)


def test_the_table_of_fast_is_that_of_the_code():
    table: dict[str, dict[str, dict[str, str]]] = {}
    for device, workloads, values in rows_of("| device | workload | `fast` sets |"):
        for workload in workloads.split(", "):
            name = "" if workload == "any other" else workload
            table.setdefault(device, {})[name] = dict(pair.split("=") for pair in values.split())
    assert table == {
        device: {name: {field: str(value) for field, value in sets.items()} for name, sets in rows.items()}
        for device, rows in arithmetic.FAST.items()
    }


def test_every_device_with_a_row_of_its_own_can_be_opened():
    named = [row[0].strip("`") for row in rows_of("| type | torch |")]
    assert named == ["cpu", "cuda", "rocm", "xpu"]
    assert set(named) <= set(DEVICES)


def test_modes_of_compiling_and_finding_are_all_named():
    for word in (*arithmetic.MODES, *arithmetic.FIND_MODES):
        assert f"`{word}`" in PAGE
    steps, steps_ddp = arithmetic.EAGER_STEPS + 1, arithmetic.EAGER_STEPS_DDP + 1
    assert f"at least {steps}, or {steps_ddp} on several devices" in PAGE


@pytest.mark.servers
def test_the_example_is_taken_as_it_stands(tmp_path):
    example = blocks("python", PAGE)[0]  # later ones are of single devices
    code, output = session(tmp_path, example, *COLLECT, "--system", "local")
    assert code == 0, output
    assert "3 tests collected" in output


@pytest.mark.servers
def test_a_refusal_reads_as_the_page_says(tmp_path):
    tests = (
        "from pytest_mlhpc import train\n\n@train('resnet50', cuda_graphs=True)\ndef test_x(run):\n    pass\n"
    )
    code, output = session(tmp_path, tests, *COLLECT, "--system", "local")
    (refusal,) = re.findall(r"^    (ERROR .*)$", PAGE, re.MULTILINE)
    assert (code, refusal in output) == (1, True), output
