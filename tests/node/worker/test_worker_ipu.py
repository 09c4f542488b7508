"""Graphcore's IPUs, with a stand-in for poptorch that has its recorded signatures and computes on the CPU: no IPU has seen this."""

import dataclasses
import functools
import gc
import sys

import poptorch_stand_in
import pytest
from gpu_stand_ins import lacking
from probe_ranks import NAMED, alone, sabotaged, smoke
from rank_helpers import run_plan

from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.worker import rank
from pytest_mlhpc.node.worker.accelerators import ipu
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers  # trainings

#: Smoke size, but for what takes longest.
SMALLER = {
    "deepcam": {"height": 48, "width": 48},
    "resnet50": {"image_size": 32},
    "cosmoflow": {"dropout": 0.0},
}
TRAINED = ("cosmoflow", "deepcam", "resnet50", "language_model")


@pytest.fixture(autouse=True)
def short_collections(monkeypatch):
    """Let a training collect no more garbage than its own."""
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    monkeypatch.undo()
    gc.unfreeze()


@pytest.fixture
def poptorch(monkeypatch):
    module = poptorch_stand_in.poptorch()
    monkeypatch.setitem(sys.modules, "poptorch", module)
    return module


def plan_of(name, plan=None, **fields):
    """Return a run with these fields of the workload; *plan* holds those of the run itself."""
    parameters = {**SMALLER.get(name, {}), **fields}
    parameters = smoke(name, global_batch=8, seed=3, loader_workers=0, **parameters)
    run = {"workload": name, "parameters": parameters, "steps": 2, "warmup_steps": 2, "variables": {}}
    return run_plan(**run, **(plan or {}))


@pytest.fixture(scope="session")
def cpu_losses(tmp_path_factory):
    """Return what computes the losses of a run on the CPU, of each run once."""

    @functools.cache
    def losses(name, **fields):
        return alone(rank.measure, plan_of(name, **fields), tmp_path_factory.mktemp(name)).losses

    return losses


def on_ipu(run, folder, *progress):
    return alone(ipu.measure, dataclasses.replace(run, device_type="ipu"), folder, *progress)


def test_the_stand_in_has_the_recorded_signatures(poptorch):
    assert poptorch_stand_in.signatures(poptorch) == poptorch_stand_in.RECORDED


def test_the_stand_in_refuses_what_poptorch_has_not(poptorch):
    with pytest.raises(TypeError):
        poptorch.Options().deviceIterations(device_iterations=1, more=2)
    with pytest.raises(AttributeError):
        poptorch.Options().deviceIteration(1)


def test_an_ipu_has_all_that_the_protocol_names(poptorch):
    device = open_device("ipu", 2)
    assert lacking(device) == []
    assert (device.type, device.index, device.model) == ("ipu", 2, "Graphcore IPU Mk2")
    assert (str(device.device), device.backend, device.asynchronous) == ("cpu", "gloo", False)
    assert device.peak_memory_bytes() is None


def test_its_environment_names_poptorch_and_the_partition(poptorch, monkeypatch):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "pod64")
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)
    assert open_device("ipu", 0).environment() == {"poptorch": "3.3.0", "ipu_partition": "pod64"}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (None, "It comes with the Poplar SDK, is in no package registry"),
        (poptorch_stand_in.poptorch(ipus=0), "poptorch finds no IPU; check that the job asked for some"),
    ],
    ids=["no poptorch", "no IPU"],
)
def test_the_device_is_wrong_where_there_is(monkeypatch, module, text):
    monkeypatch.setitem(sys.modules, "poptorch", module)
    with pytest.raises(WorkerFailure, match=f"^wrong_device: .*{text}"):
        open_device("ipu", 0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.feature("ipu", name, "stand-in")) for name in TRAINED]
)
def test_losses_are_those_of_the_cpu_path(poptorch, tmp_path, name, cpu_losses):
    assert on_ipu(plan_of(name), tmp_path).losses == pytest.approx(cpu_losses(name), rel=1e-5)
    assert poptorch.executors[0].destroyed


@pytest.mark.parametrize("name", ["cosmoflow", "language_model"])
@pytest.mark.parametrize("ipu_execution", [None, "sharded"])
def test_a_model_in_blocks_on_two_ipus_computes_the_same(poptorch, tmp_path, name, ipu_execution, cpu_losses):
    fields = {"gradient_accumulation": 2, **({"dropout": 0.0} if name == "cosmoflow" else {})}
    run = plan_of(name, ipus_per_replica=2, ipu_execution=ipu_execution, **fields)
    assert on_ipu(run, tmp_path).losses == pytest.approx(cpu_losses(name, **fields), rel=1e-5)
    strategy = poptorch.executors[0].options.strategy
    kind = poptorch.ShardedExecution if ipu_execution else poptorch.PipelinedExecution
    assert type(strategy) is kind
    assert strategy.stages == (poptorch.AutoStage.AutoIncrement,)


def test_two_replicas_of_half_a_batch_and_two_steps_a_call_train_as_one(poptorch, tmp_path, cpu_losses):
    report = on_ipu(plan_of("cosmoflow", ipu_replicas=2, device_iterations=2, dropout=0.0), tmp_path)
    assert report.losses == pytest.approx(cpu_losses("cosmoflow", dropout=0.0), rel=1e-4)
    assert (report.steps, len(report.step_times_s), report.samples) == (2, 2, 16)
    assert report.step_times_s[0] == report.step_times_s[1]
    (executor,) = poptorch.executors
    assert (executor.options.device_iterations, executor.options.replication_factor) == (2, 2)
    assert [shape[0] for shape in executor.shapes] == [16, 16]


def test_a_measurement_has_all_that_is_asked_of_training(poptorch, tmp_path):
    progress = []
    run = plan_of("cosmoflow", ipus_per_replica=2, gradient_accumulation=2)
    measurement = combine(run, [on_ipu(run, tmp_path, lambda *state: progress.append(state))])
    expected = {*NAMED["cosmoflow"].expected, *NAMED["cosmoflow"].expected_of(run.parameters)}
    assert {"compile_time", "ipus"} <= expected <= {metric.name for metric in measurement.metrics}
    assert measurement.metric("ipus").value == 2
    assert measurement.metric("host_ipu_latency").value == pytest.approx(0.002)
    assert measurement.metric("forward_time") is measurement.metric("peak_memory") is None
    assert (measurement.device_type, measurement.device_model) == ("ipu", "Graphcore IPU Mk2")
    assert progress[0][:2] == (0, 2)


def test_input_and_output_are_the_share_that_transfers_have_in_a_round_trip(poptorch, tmp_path):
    report = on_ipu(plan_of("language_model"), tmp_path)
    assert report.copy_s == pytest.approx(0.3 * (sum(report.step_times_s) - report.wait_s), rel=0.2)
    assert report.wait_s + report.copy_s < report.epoch_s


def test_the_run_without_input_lets_ipus_make_their_data(poptorch, tmp_path):
    report = on_ipu(plan_of("cosmoflow", {"data_source": "device"}, device_iterations=2), tmp_path)
    assert (poptorch.executors[0].options.synthetic, report.steps, report.read_s) == (True, 2, None)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"device_iterations": 4}, "^worker_exit: .*no multiples of device_iterations=4"),
        ({"ipu_replicas": 16}, "^worker_exit: .*8 samples of a micro-batch do not divide over ipu_replicas=16"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_fails_with_a_name(poptorch, tmp_path, parameters, text):
    with pytest.raises(WorkerFailure, match=text):
        on_ipu(plan_of("cosmoflow", ipu_execution="sharded", **parameters), tmp_path)


def test_a_loader_that_ends_early_is_named():
    batches = iter([(1, 2, 0.0)])
    assert ipu.next_batch(batches, 0) == (1, 2, 0.0)
    with pytest.raises(WorkerFailure, match=r"^data_exhausted: the loader ended after 5 steps of this rank"):
        ipu.next_batch(batches, 5)


def test_a_rank_that_is_started_on_ipus_reports_what_it_trained(ranks, tmp_path):
    shim = "import sys, poptorch_stand_in\nsys.modules['poptorch'] = poptorch_stand_in.poptorch()\n"
    run = plan_of("language_model", {"device_type": "ipu"}, device_iterations=2)
    (report,) = ranks(run, **sabotaged(tmp_path, shim)).measurement.per_rank
    assert (report.device_type, report.device_model, report.steps) == ("ipu", "Graphcore IPU Mk2", 2)
    assert "compile_time" in {figure.name for figure in report.figures}
    assert report.environment["poptorch"] == "3.3.0"


#: A rank that poprun has started: the stand-ins note the samples of each call and where programs lie.
INSTANCE = """
import os, sys, zlib, poptorch_stand_in

rank, _, _ = (os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
os.environ.update(MLHPC_RANKS_FROM="openmpi", OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_LOCAL_RANK=rank,
                  OMPI_COMM_WORLD_SIZE="2")
call = poptorch_stand_in.PoplarExecutor.__call__

def noted(self, *tensors):
    with open(f"samples-{rank}", "a") as file:
        for sample in tensors[0]:
            file.write(f"{zlib.crc32(str(sample.tolist()).encode())} {self.options.cache}\\n")
    return call(self, *tensors)

poptorch_stand_in.PoplarExecutor.__call__ = noted
sys.modules["poptorch"] = poptorch_stand_in.poptorch()
sys.modules["popdist"], sys.modules["popdist.poptorch"] = poptorch_stand_in.popdist(local_replicas=2)
"""


def test_instances_of_poprun_train_on_shares_of_their_own_and_report_their_own_ipus(ranks, tmp_path):
    plan = {"device_type": "ipu", "ranks": 2, "launcher": "poprun"}
    run = plan_of("language_model", plan, ipu_replicas=2)
    measurement = ranks(run, **sabotaged(tmp_path, INSTANCE)).measurement
    found = [(one.rank, one.local_rank, one.steps, one.samples) for one in measurement.per_rank]
    assert found == [(0, 0, 2, 8), (1, 1, 2, 8)]
    assert (measurement.ranks, measurement.samples, measurement.metric("ipus").value) == (2, 16, 4)
    files = [(tmp_path / f"samples-{rank}").read_text() for rank in (0, 1)]
    noted = [[line.split() for line in file.splitlines()] for file in files]
    shares = [{sample for sample, _ in calls} for calls in noted]
    # Four steps of four samples.
    assert [len(calls) for calls in noted] == [len(share) for share in shares] == [16, 16]
    assert shares[0].isdisjoint(shares[1])
    assert {cache for calls in noted for _, cache in calls} == {str(tmp_path / "data" / "ipu-run-1")}
