"""From fields to poptorch's options; which fields are refused, and where."""

import sys
from pathlib import Path

import poptorch_stand_in
import pytest
import torch

from pytest_mlhpc.node.worker.accelerators.ipu import IpuSettings, make
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields import compiled_devices


@pytest.fixture
def poptorch():
    return poptorch_stand_in.poptorch()


def made(poptorch, *, world=1, cache=None, data="memory", **parameters):
    return make(poptorch, IpuSettings.of(parameters, data), seed=7, world=world, cache=cache)


def numbers(options):
    parallel = options.device_iterations, options.replication_factor
    return *parallel, options.Training.gradient_accumulation, options.TensorLocations.io_tiles


def test_what_is_unset_stays_as_poptorch_has_it(poptorch):
    options = made(poptorch)
    assert numbers(options) == (1, 1, 1, None)
    assert options.random_seed == 7
    assert options.output_mode == poptorch.OutputMode.All  # or only the last loss would come back
    assert not hasattr(options.Precision, "partials")
    assert (options.strategy.stages, options.cache, options.synthetic) == ((), None, False)


def test_every_field_becomes_an_option(poptorch):
    options = made(
        poptorch, cache=Path("/cache"), data="device", device_iterations=4, ipus_per_replica=2, ipu_replicas=8,
        gradient_accumulation=3, ipu_execution="sharded", ipu_partials="half", ipu_io_tiles=64,
    )  # fmt: skip
    assert numbers(options) == (4, 8, 3, 64)
    assert options.Precision.partials is torch.half
    assert type(options.strategy) is poptorch.ShardedExecution
    assert (options.cache, options.synthetic) == ("/cache", True)


def test_several_ranks_take_the_options_of_popruns_library(poptorch, monkeypatch):
    module, half = poptorch_stand_in.popdist(local_replicas=2)
    monkeypatch.setitem(sys.modules, "popdist", module)
    monkeypatch.setitem(sys.modules, "popdist.poptorch", half)
    options = made(poptorch, world=4, ipu_replicas=2, ipus_per_replica=4)
    assert (options.replication_factor, options.ipus_per_replica) == (2, 4)
    with pytest.raises(WorkerFailure, match="poprun gave this rank 2 replicas, ipu_replicas is 1"):
        made(poptorch, world=4)


def test_several_ranks_without_that_library_cannot_run(poptorch, monkeypatch):
    monkeypatch.setitem(sys.modules, "popdist", None)
    with pytest.raises(WorkerFailure, match=r"^import_failed: .*several ranks on IPUs need popdist"):
        made(poptorch, world=2)


@pytest.mark.parametrize("device", ["cpu", "cuda", "rocm", "xpu", "wse"])
@pytest.mark.parametrize("name", compiled_devices.IPU_FIELDS)
def test_the_fields_are_refused_on_other_devices(device, name):
    ((field, text),) = compiled_devices.wrong_ipu({name: 2, "accelerator": device})
    assert (field, text) == (name, f"{name} is for Graphcore's IPUs; {device} has none")


@pytest.mark.parametrize(
    ("values", "field", "says"),
    [
        ({"ipu_execution": "sharded"}, "ipu_execution", "is of several IPUs: set ipus_per_replica"),
        ({"ipus_per_replica": 4}, "gradient_accumulation", "a pipeline of 4 IPUs needs as many micro-batches"),
        ({"ipu_io_tiles": 33}, "ipu_io_tiles", "ipu_io_tiles=33 is no even number from 32 to 192"),
        ({"ipu_io_tiles": 194}, "ipu_io_tiles", "ipu_io_tiles=194 is no even number"),
        ({"ipu_replicas": 4, "global_batch": 6, "devices": 2}, "global_batch",
         "global_batch=6 does not divide over 2 devices x gradient_accumulation=1 x ipu_replicas=4"),
        ({"device_iterations": 8, "steps": 12}, "steps", "steps=12 is no multiple of device_iterations=8"),
        ({"device_iterations": 8, "warmup": 4}, "warmup", "warmup=4 is no multiple of device_iterations=8"),
        ({"precision": "bf16"}, "precision", "on IPUs only fp32 has been written"),
        ({"optimizer": "lamb"}, "optimizer", "poptorch has no lamb that computes as ours does"),
        ({"channels_last": True}, "channels_last", "the IPU's compiler lays out tensors itself"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(values, field, says):
    found = dict(compiled_devices.wrong_ipu({"accelerator": "ipu", **values}))
    assert list(found) == [field]
    assert says in found[field]


@pytest.mark.parametrize(("fields", "ipus"), [({}, 1), ({"ipu_replicas": 2, "ipus_per_replica": 4}, 8)])
def test_ipus_of_a_rank_are_its_replicas_times_those_of_each(fields, ipus):
    assert compiled_devices.ipus_of_rank(fields) == ipus
