"""Cerebras' own package, from the zip alone: the workloads trained on its CPU back-end, and lowered for a wafer."""

import json
import os
import select
import subprocess
from pathlib import Path

import pytest
from running_suites import wait_for
from zipped_batch import failed, interpreter, measured, training

from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.provision import payload

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture(scope="session")
def python():
    return interpreter("MLHPC_CEREBRAS_PYTHON", ".venv-cerebras", "make cerebras")


def on_backend(python, workload="cosmoflow", fields=(), **changes):
    """Return a run on the package's CPU back-end."""
    parameters = {**dict(fields), "cerebras": "cpu"}
    return training(python, workload, device_type="wse", parameters=parameters, run_id="wse", **changes)


def losses(measurement):
    return measurement.per_rank[0].losses


def lowering(python, of, **parameters):
    fields = {"of": of, **parameters}
    return training(python, "lowering", device_type="wse", parameters=fields, steps=1, warmup_steps=0)


@pytest.mark.parametrize(
    ("workload", "fields", "steps"),
    [
        ("cosmoflow", {}, 6),
        # Cerebras' AdamW adds eps before it corrects for its start, which shows where eps is as large as DeepCAM's.
        ("deepcam", {"optimizer": "sgd"}, 6),
        # On small images ResNet-50 doubles a difference of rounding many times within a few steps.
        ("resnet50", {}, 2),
        ("language_model", {}, 6),
    ],
    ids=["cosmoflow", "deepcam", "resnet50", "language_model"],
)
def test_a_workload_trains_on_the_cpu_backend_with_the_losses_of_plain_torch(
    workload, fields, steps, python, tmp_path
):
    runs = on_backend(python, workload, fields), training(python, workload, parameters=fields)
    found, plain = measured(python, tmp_path, *runs)

    assert (found.device_type, found.device_model) == ("wse", "CPU back-end of cerebras.pytorch")
    assert (found.steps, len(found.step_times_s), len(losses(found))) == (4, 4, 6)
    assert found.samples == 4 * next(one.device_batch for one in WORKLOADS if one.name == workload)
    assert found.environment["cerebras_pytorch"] == "2.10.0"
    assert {"effective_throughput", "io_time", "warmup_time", "loss"} <= {one.name for one in found.metrics}
    assert losses(found)[:steps] == pytest.approx(losses(plain)[:steps], rel=1e-4)


def test_bf16_on_the_cpu_backend_is_not_fp32(python, tmp_path):
    runs = on_backend(python, fields={"precision": "bf16"}), training(python, "cosmoflow")
    found, plain = measured(python, tmp_path, *runs)
    assert losses(found) != losses(plain)
    assert losses(found)[0] == pytest.approx(losses(plain)[0], rel=0.05)


def test_samples_from_files_are_waited_for_and_read(python, tmp_path):
    (found,) = measured(python, tmp_path, on_backend(python, data_source="files"))
    assert found.data_source == "files"
    assert found.metric("read_time").value > 0


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(name, marks=pytest.mark.feature("wse", name, "lowered"))
        for name in ("cosmoflow", "resnet50", "language_model")
    ],
)
def test_a_workload_is_lowered_for_a_wafer(workload, python, tmp_path):
    (found,) = measured(python, tmp_path, lowering(python, workload, precision="bf16"))
    assert found.metric("lowered_operations").value > 100
    assert found.metric("lowering_time").value > 0
    assert not list(tmp_path.glob("data/lowering-*"))


def test_what_does_not_lower_is_an_error_with_the_compilers_message(python, tmp_path):
    outcome, text = failed(python, tmp_path, lowering(python, "deepcam"))
    reason = "'cirh.Convolution' op convolutions with groups != 1 are not supported"
    assert outcome == "cannot_lower"
    assert text.endswith(f"cerebras.pytorch cannot lower deepcam: {reason}")
    assert not list(tmp_path.glob("data/lowering-*"))


def test_without_a_cluster_a_training_on_a_wafer_says_what_can_be_done_here(python, tmp_path):
    outcome, text = failed(python, tmp_path, training(python, "cosmoflow", device_type="wse"))
    other = "cerebras='cpu' trains on the CPU back-end and the workload `lowering` lowers for the wafer"
    assert outcome == "wrong_device"
    assert "no Cerebras cluster can be used from this host: ClusterConfigError" in text
    assert other in text


PROGRAMS = Path(__file__).with_name("cerebras_programs.py")


def payload_only(folder):
    """Return the environment of an interpreter that has the payload's zip."""
    archive, _ = payload.build(folder, ())
    return {**os.environ, "PYTHONPATH": str(archive)}


def output_of(python, folder, *arguments):
    """Return the last line that one of the programs prints in the package's interpreter."""
    argv, environment = [python, "-P", PROGRAMS, *arguments], payload_only(folder)
    ended = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout.splitlines()[-1]


def test_lowering_that_takes_longer_than_its_run_may_is_ended(python, tmp_path):
    run = json.dumps(to_json(lowering(python, "cosmoflow")))
    text = "time_limit lowering did not end within the run's limit of 0.5 s; raise time_limit"
    assert output_of(python, tmp_path, "limited", run, tmp_path) == text
    assert not list(tmp_path.glob("data/lowering-*"))


def test_the_errors_by_whose_names_runs_are_judged_are_where_the_package_has_them(python, tmp_path):
    appliance = "cerebras.appliance.errors"
    assert json.loads(output_of(python, tmp_path, "classes")) == {
        "ClusterConfigError": ["cerebras.appliance.cluster.config", True, "wrong_device"],
        "ClusterJobScheduleError": [appliance, True, "wrong_device"],
        "ClusterJobInitError": [appliance, True, "wrong_device"],
        "ApplianceVersionError": [appliance, True, "wrong_device"],
        "RpcError": ["grpc", True, "wrong_device"],
        "ApplianceClientException": [appliance, True, "worker_exit"],
        "ApplianceCompilationError": [appliance, True, "cannot_lower"],
    }


def test_the_package_takes_several_systems_with_the_runs_time_and_folders(python, tmp_path):
    found = json.loads(output_of(python, tmp_path, "systems", tmp_path))
    assert (found["num_csx"], found["job_time_sec"], found["num_workers_per_csx"]) == (4, 90, 1)
    assert found["mounts"] == [str(tmp_path)]
    assert any(path.endswith(".zip") for path in found["python_paths"])
    assert "num_csx" in found["refused"]


def test_a_compiler_dies_with_the_rank_that_asked_for_it(python, tmp_path):
    # Open on our side, so that the end of its input cannot be what ends the compiler.
    reads, writes = os.pipe()
    argv, environment = [python, "-P", PROGRAMS, "compiler", str(reads)], payload_only(tmp_path)
    os.write(writes, b"{")
    try:
        with subprocess.Popen(argv, env=environment, pass_fds=[reads], stdout=subprocess.PIPE) as rank:
            child = Path(f"/proc/{int(rank.stdout.readline())}")
            wait_for(lambda: not select.select([reads], [], [], 0)[0])  # it reads its input after its imports
            assert child.exists()
            rank.kill()
            wait_for(lambda: not child.exists())
    finally:
        os.close(reads)
        os.close(writes)
