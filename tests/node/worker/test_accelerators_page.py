"""docs/accelerators.md says what is: every field, what fast sets, and examples that are collected."""

import re
from pathlib import Path

import pytest
from pages import ACCELERATORS as PAGE
from pages import COLLECT, blocks, section, session

from pytest_mlhpc.node.worker.workloads.fields import arithmetic


def test_the_list_names_every_field():
    heads = re.findall(r"^- (`.*?):\s", section("The fields"), re.MULTILINE)
    named = {word for head in heads for word in re.findall(r"`(\w+)`", head)}
    assert named == {*arithmetic.FIELDS, "precision", "channels_last"}


def test_a_field_is_refused_on_devices_that_do_not_stand_in_its_brackets():
    values = {"cuda_graphs": True, "threads": 1, "binding": "cores", "miopen_find": "fast"}
    entries = re.findall(r"^- (`.*?)(?: \(([\w, ]+)\))?:\s", section("The fields"), re.MULTILINE)
    taken = {
        field: devices.split(", ") if devices else ["cpu", "cuda", "rocm", "xpu"]
        for head, devices in entries
        for field in re.findall(r"`(\w+)`", head)
    }
    for field, value in values.items():
        for device in ("cpu", "cuda", "rocm", "xpu"):
            found = arithmetic.wrong({field: value, "accelerator": device})
            assert bool(found) == (device not in taken[field]), (field, device)


def test_the_list_of_fast_is_that_of_the_code():
    listed: dict[str, dict[str, dict[str, str]]] = {}
    for device, workloads, values in re.findall(
        r"^- (\w+), ([\w, ]+): (.*=.*)$", section('`tuning="fast"`'), re.MULTILINE
    ):
        for workload in workloads.split(", "):
            name = "" if workload == "any other" else workload
            listed.setdefault(device, {})[name] = dict(pair.split("=") for pair in values.split())
    assert listed == {
        device: {name: {field: str(value) for field, value in sets.items()} for name, sets in rows.items()}
        for device, rows in arithmetic.FAST.items()
    }


def test_every_device_with_an_entry_of_its_own_has_a_module():
    folder = Path(arithmetic.__file__).parents[2] / "accelerators"
    named = re.findall(r"^- `(\w+)`: ", section("Devices"), re.MULTILINE)
    assert named == ["cpu", "cuda", "rocm", "xpu"]
    assert all((folder / f"{name}.py").is_file() for name in named)


def test_modes_of_compiling_and_finding_are_all_named():
    for word in (*arithmetic.MODES, *arithmetic.FIND_MODES):
        assert f"`{word}`" in PAGE
    steps, steps_ddp = arithmetic.EAGER_STEPS + 1, arithmetic.EAGER_STEPS_DDP + 1
    assert f"at least {steps}, or {steps_ddp} on several devices" in " ".join(PAGE.split())


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
