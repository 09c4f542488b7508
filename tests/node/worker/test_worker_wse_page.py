"""What docs/accelerators.md says of Cerebras: every field is there, and its system and tests run as they stand there."""

import os
import re

import pytest
from pages import COLLECT, ROOT, blocks, section, session

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.worker.workloads.fields import compiled_devices

SECTION = section("Cerebras (wse)")
(SYSTEMS,), (TESTS,) = blocks("yaml", SECTION), blocks("python", SECTION)


def on_page(folder, python, *arguments):
    systems = SYSTEMS.replace("/path/of/venv/bin/python", python)
    return session(folder, TESTS, "--system", "our-cs3", *arguments, systems=systems)


def test_the_list_names_every_field():
    assert set(compiled_devices.WSE_FIELDS) <= set(re.findall(r"^- `(\w+)`:", SECTION, re.MULTILINE))


def test_the_tests_of_the_page_are_collected_on_its_system(tmp_path):
    code, output = on_page(tmp_path, "python3", *COLLECT)
    assert code == 0, output
    names = re.findall(r"::(test_\w+)", output)
    assert names == ["test_cosmoflow_on_a_wafer", "test_cosmoflow_by_the_cpu_backend", *["test_lowering"] * 4]


@pytest.mark.servers
@pytest.mark.slow
def test_the_page_without_a_cluster_trains_lowers_skips_and_says_that_there_is_no_cluster(tmp_path):
    python = os.environ.get("MLHPC_CEREBRAS_PYTHON") or str(ROOT / ".venv-cerebras/bin/python")
    arguments = ("-rs", "--mlhpc-preset", "smoke", "--mlhpc-baseline=update", "-k", "not resnet50")
    output = " ".join(on_page(tmp_path, python, *arguments)[1].split())
    assert "1 failed, 3 passed, 1 skipped" in output
    assert "convolutions with groups != 1 are not supported" in output
    assert "no Cerebras cluster can be used from this host" in output


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
