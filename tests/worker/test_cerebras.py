"""Cerebras' own package, from the zip alone: the workloads trained on its CPU back-end, and lowered for a wafer."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from zipped_batch import bodies, run_batch, training

from pytest_mlhpc import payload
from pytest_mlhpc.results.schema import Measurement, from_json, to_json
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS

ROOT = Path(__file__).parents[2]
VARIABLE, DEFAULT = "MLHPC_CEREBRAS_PYTHON", ROOT / ".venv-cerebras/bin/python"

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture
def python():
    found = os.environ.get(VARIABLE) or str(DEFAULT)
    if not Path(found).exists():
        pytest.fail(
            f"there is no {found}: run `make cerebras`, or name an interpreter by {VARIABLE}", pytrace=False
        )
    return found


def measured(python, folder, run) -> Measurement:
    (body,) = bodies(run_batch([python], folder, run), run, "measurement")
    return from_json(Measurement, body)


def failed(python, folder, run):
    (body,) = bodies(run_batch([python], folder, run), run, "failed")
    return body["outcome"], body["text"]


def losses(measurement):
    return measurement.per_rank[0].losses


def lowering(python, of, **parameters):
    fields = {"of": of, **parameters}
    return training(python, "lowering", device_type="wse", parameters=fields, steps=1, warmup_steps=0)


#: Workload -> fields, and how many steps agree. Cerebras' AdamW adds eps before it corrects for its start, which shows where
#: eps is as large as DeepCAM's; ResNet-50 on small images doubles a difference of rounding many times within a few steps.
AGREE = {
    "cosmoflow": ({}, 6),
    "deepcam": ({"optimizer": "sgd"}, 6),
    "resnet50": ({}, 2),
    "language_model": ({}, 6),
}


@pytest.mark.parametrize("workload", sorted(AGREE))
def test_a_workload_trains_on_the_cpu_backend_with_the_losses_of_plain_torch(workload, python, tmp_path):
    fields, steps = AGREE[workload]
    ours, plain = tmp_path / "wse", tmp_path / "cpu"
    ours.mkdir()
    plain.mkdir()

    run = training(python, workload, device_type="wse", parameters={**fields, "cerebras": "cpu"})
    found = measured(python, ours, run)

    assert (found.device_type, found.device_model) == ("wse", "CPU back-end of cerebras.pytorch")
    assert (found.steps, len(found.step_times_s), len(losses(found))) == (4, 4, 6)
    assert found.samples == 4 * next(one.device_batch for one in WORKLOADS if one.name == workload)
    assert found.environment["cerebras_pytorch"] == "2.10.0"
    assert {"effective_throughput", "io_time", "warmup_time", "loss"} <= {one.name for one in found.metrics}
    expected = measured(python, plain, training(python, workload, parameters=fields))
    assert losses(found)[:steps] == pytest.approx(losses(expected)[:steps], rel=1e-4)


def test_bf16_on_the_cpu_backend_is_not_fp32(python, tmp_path):
    fields = {"cerebras": "cpu", "precision": "bf16"}
    found = measured(python, tmp_path, training(python, "cosmoflow", device_type="wse", parameters=fields))
    (tmp_path / "plain").mkdir()
    plain = measured(python, tmp_path / "plain", training(python, "cosmoflow"))
    assert losses(found) != losses(plain)
    assert losses(found)[0] == pytest.approx(losses(plain)[0], rel=0.05)


def test_samples_from_files_are_waited_for_and_read(python, tmp_path):
    run = training(
        python, "cosmoflow", device_type="wse", parameters={"cerebras": "cpu"}, data_source="files"
    )
    found = measured(python, tmp_path, run)
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
    found = measured(python, tmp_path, lowering(python, workload, precision="bf16"))
    assert found.metric("lowered_operations").value > 100
    assert found.metric("lowering_time").value > 0
    assert not list(tmp_path.glob("data/lowering-*"))


def test_what_does_not_lower_is_named_by_the_compilers_words(python, tmp_path):
    outcome, text = failed(python, tmp_path, lowering(python, "deepcam"))
    assert outcome == "cannot_lower"
    assert text.endswith(
        "cerebras.pytorch cannot lower deepcam: 'cirh.Convolution' op convolutions with groups != 1 are not supported"
    )
    assert not list(tmp_path.glob("data/lowering-*"))


def test_lowering_that_takes_longer_than_its_run_may_is_ended(python, tmp_path):
    archive, _ = payload.build(tmp_path, ())
    run = lowering(python, "cosmoflow")
    code = (
        "import json, sys; from pathlib import Path; from pytest_mlhpc.batch.plan import RunPlan\n"
        "from pytest_mlhpc.results.schema import from_json; from pytest_mlhpc.worker.probes.base import Place\n"
        "from pytest_mlhpc.worker.distributed import Group; from pytest_mlhpc.worker.probes.lowering import probe\n"
        "run = from_json(RunPlan, json.loads(sys.argv[1]), 'run')\n"
        "one = probe(Place(run, Group(), None, Path(sys.argv[2])))\n"
        "one._limit_s = 0.5\n"
        "try: one.repeat()\n"
        "except Exception as error: print(error.outcome, error.text)\n"
        "finally: one.close()\n"
    )
    argv = [python, "-c", code, json.dumps(to_json(run)), str(tmp_path)]
    ended = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(archive)}, capture_output=True, text=True, check=True
    )
    assert (
        ended.stdout == "time_limit lowering did not end within the run's limit of 0.5 s; raise time_limit\n"
    )
    assert not list(tmp_path.glob("data/lowering-*"))


def test_without_a_cluster_a_training_on_a_wafer_says_what_can_be_done_here(python, tmp_path):
    outcome, text = failed(python, tmp_path, training(python, "cosmoflow", device_type="wse"))
    assert outcome == "wrong_device"
    assert "no Cerebras cluster can be used from this host: ClusterConfigError" in text
    assert (
        "cerebras='cpu' trains on the CPU back-end and the workload `lowering` lowers for the wafer" in text
    )


#: Run by the package's interpreter: prints what it has of the classes that ``failing.py`` names, and what becomes of one of each.
ERRORS = """
import importlib, json
from pytest_mlhpc.worker.accelerators.wse import failing

told = {}
for group in (failing.UNREACHABLE, failing.FROM_CLUSTER, failing.FROM_COMPILER):
    for name, module in group.items():
        found = getattr(importlib.import_module(module), name)
        error = found.__new__(found)
        Exception.__init__(error, "why")
        told[name] = [found.__module__, issubclass(found, Exception), failing.before_any_step(error)[0]]
print(json.dumps(told))
"""


def told_by(python, folder, code):
    """Return what *code* prints as JSON in the package's interpreter, with the payload's zip."""
    archive, _ = payload.build(folder, ())
    environ = {**os.environ, "PYTHONPATH": str(archive)}
    ended = subprocess.run(
        [python, "-c", code, str(folder)], env=environ, capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_errors_by_whose_names_runs_are_judged_are_where_the_package_has_them(python, tmp_path):
    appliance = "cerebras.appliance.errors"
    assert told_by(python, tmp_path, ERRORS) == {
        "ClusterConfigError": ["cerebras.appliance.cluster.config", True, "wrong_device"],
        "ClusterJobScheduleError": [appliance, True, "wrong_device"],
        "ClusterJobInitError": [appliance, True, "wrong_device"],
        "ApplianceVersionError": [appliance, True, "wrong_device"],
        "RpcError": ["grpc", True, "wrong_device"],
        "ApplianceClientException": [appliance, True, "worker_exit"],
        "ApplianceCompilationError": [appliance, True, "cannot_lower"],
    }


#: Prints the cluster's configuration of a run on four systems as the package took it, and what it says of none.
SYSTEMS = """
import importlib, json, sys
from pathlib import Path
from pytest_mlhpc.worker.accelerators.wse import stepping

module = importlib.import_module("cerebras.appliance.cluster_config")
config = stepping.backend_options(4, Path(sys.argv[1]), 90.5, module)["cluster_config"]
try:
    module.ClusterConfig(num_csx=-1)
except ValueError as error:
    refused = str(error)
found = {name: getattr(config, name) for name in ("num_csx", "job_time_sec", "num_workers_per_csx", "python_paths")}
print(json.dumps({**found, "mounts": [str(one.path) for one in config.mount_dirs], "refused": refused}))
"""


def test_the_package_takes_several_systems_with_the_runs_time_and_folders(python, tmp_path):
    told = told_by(python, tmp_path, SYSTEMS)
    assert (told["num_csx"], told["job_time_sec"], told["num_workers_per_csx"]) == (4, 90, 1)
    assert told["mounts"] == [str(tmp_path)]
    assert any(path.endswith(".zip") for path in told["python_paths"])
    assert "num_csx" in told["refused"]


def test_a_compiler_dies_with_the_rank_that_asked_for_it(python, tmp_path):
    archive, _ = payload.build(tmp_path, ())
    reads, writes = (
        os.pipe()
    )  # open on our side, so that the end of its input cannot be what ends the compiler
    code = (
        "import subprocess, sys, time\n"
        "argv = [sys.executable, '-m', 'pytest_mlhpc.worker.accelerators.wse.lower']\n"
        "print(subprocess.Popen(argv, stdin=int(sys.argv[1])).pid, flush=True); time.sleep(600)\n"
    )
    rank = subprocess.Popen(
        [python, "-c", code, str(reads)],
        env={**os.environ, "PYTHONPATH": str(archive)},
        pass_fds=[reads],
        stdout=subprocess.PIPE,
        text=True,
    )
    with rank:
        child = Path(f"/proc/{int(rank.stdout.readline())}")
        until(lambda: "torch" in (child / "maps").read_text())
        time.sleep(5.0)  # past its imports, or the kernel would have been told nothing yet
        assert child.exists()
        rank.kill()
        try:
            until(lambda: not child.exists())
        finally:
            os.close(reads)
            os.close(writes)


def until(holds, limit_s=60.0):
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)
