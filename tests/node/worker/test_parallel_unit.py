"""Parts of sharded training that need no second rank: what is refused, what is gathered at a time, what is put back."""

import importlib
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from probe_ranks import alone, smoke, task_of
from rank_helpers import run_plan
from torch import nn

from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.worker import distributed, rank
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.reporting import on_meta
from pytest_mlhpc.node.worker.workloads.fields import arithmetic
from pytest_mlhpc.node.worker.workloads.fields import parallel as fields
from pytest_mlhpc.node.worker.workloads.fields.parallel import MeshLayout

SHARDED = {"parallel": {"replicate": 1, "shard": 4}}


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({**SHARDED, "optimizer": "sgd", "fused_optimizer": True}, "fused_optimizer", "fused SGD does not know sharded"),
        ({**SHARDED, "bagging": [2, 2]}, "parallel", "replicate=1 x shard=4 are 4 devices, a base model has 2"),
        ({"parallel": {"replicate": 1, "shard": 2}, "bagging": [2, 2]}, None, ""),
        ({**SHARDED, "bagging": [4]}, "bagging", "is no pair (M, P)"),
        ({"bucket_mb": 1e300}, "bucket_mb", "1e+300 MiB are more than any device has; 1048576 at most"),
        ({"bucket_mb": 1024.0}, None, ""),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_once_and_before_anything_starts(values, field, text):
    found = fields.wrong({"devices": 4, **values})
    assert [name for name, _ in found] == ([] if field is None else [field])
    assert all(text in problem for _, problem in found)


@pytest.mark.parametrize("name", ["resnet50", "language_model"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tuning_leaves_out_what_shards_cannot_have(name, device):
    asked = {**SHARDED, "tuning": "fast"}
    values = {**smoke(name), **asked, "devices": 4}
    tuned = arithmetic.tuned(values, asked, device, name)
    assert fields.wrong(tuned) == ()
    assert (tuned["channels_last"] if name == "resnet50" else tuned["compile"]) in (False, None)


@pytest.mark.parametrize(
    ("asked", "ranks", "layout"),
    [
        ({}, 4, (4, 1)),
        ({"parallel": None}, 4, (4, 1)),
        ({"parallel": {"replicate": 2, "shard": 3}}, 6, (2, 3)),
    ],
)
def test_ranks_are_replicas_unless_the_field_says_otherwise(asked, ranks, layout):
    assert distributed.layout_of(asked, ranks) == MeshLayout(*layout)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"replicate": 2, "shard": 2}, "parallel: replicate=2 x shard=2 are not the 3 ranks of this run"),
        ({"replicate": 3}, "parallel: shard is missing"),
    ],
)
def test_another_number_of_ranks_than_the_field_needs_fails_the_run(asked, text):
    with pytest.raises(WorkerFailure, match=f"^worker_exit: {text}"):
        distributed.layout_of({"parallel": asked}, 3)


@pytest.mark.parametrize(
    ("owner", "missing", "call", "text"),
    [
        (
            "torch.distributed.fsdp", "fully_shard",
            lambda: distributed.wrap(nn.Linear(2, 2), Group(0, 0, 4), open_device("cpu", 0), SHARDED),
            rf".*since 2\.6; this is {re.escape(torch.__version__)}",
        ),
        (
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "bf16_compress_hook",
            lambda: distributed.compress(nn.Linear(2, 2), "bf16"), ".*gradient_compression=bf16: torch .* has no such",
        ),
        (
            "torch.distributed", "MPI", lambda: join_by_mpi(0),
            ".*was built without MPI.*leave backend unset, which is gloo",
        ),
    ],
    ids=["FSDP2", "a hook", "MPI"],
)  # fmt: skip
def test_a_torch_is_named_that_has_not(monkeypatch, owner, missing, call, text):
    monkeypatch.delattr(importlib.import_module(owner), missing, raising=False)
    with pytest.raises(WorkerFailure, match=f"^not_supported: {text}"):
        call()


def model_of(name: str) -> nn.Module:
    with on_meta():
        return task_of(name).model()


@pytest.mark.parametrize(("name", "number"), [("language_model", 4), ("resnet50", 16), ("cosmoflow", 0)])
def test_blocks_are_what_a_model_repeats(name, number):
    found = [type(block) for block in distributed.blocks(model_of(name))]
    assert (len(found), len(set(found))) == (number, min(number, 1))


def test_no_block_lies_within_another():
    model = model_of("deepcam")
    found = distributed.blocks(model)
    inside = [id(part) for block in found for part in block.modules()]
    assert len(found) > 8
    assert len(inside) == len(set(inside))
    assert model not in found


@pytest.mark.servers
def test_one_rank_exchanges_nothing_and_reports_nothing_of_it(tmp_path):
    run = run_plan()
    report = alone(rank.measure, run, tmp_path)
    assert report.exposed_communication_s is None
    assert not [metric for metric in combine(run, [report]).metrics if metric.name.endswith("_bytes")]


def test_what_exchanges_is_put_back_when_a_silent_pass_fails():
    before = {name: getattr(torch.distributed, name, None) for name in distributed._SHARDED}

    def fail() -> None:
        with distributed.silent(nn.Linear(2, 2)) as left_out:
            torch.distributed.all_reduce(torch.ones(3))
            assert left_out == ["all_reduce"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {name: getattr(torch.distributed, name, None) for name in before} == before
    assert len([function for function in before.values() if function]) >= 3


@pytest.mark.parametrize(
    ("version", "can"),
    [
        ("1.13.1", False),
        ("2.4.0+cpu", False),
        ("2.5.0a0+e000cf0ad9.nv24.10", True),
        ("2.13.0+cpu", True),
        ("3", True),
    ],
)
def test_collectives_are_counted_by_a_torch_that_can(version, can):
    assert distributed.countable(version) is can


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"backend": "mpi"}, ""),
        ({"backend": "mpi", "accelerator": "cpu", "parallel": {"replicate": 4, "shard": 1}}, ""),
        ({"backend": "gloo", "accelerator": "cuda"}, "backend is for ranks that compute on cores; cuda has one of its own"),
        ({"backend": "mpi", **SHARDED}, "shards need collectives that torch's MPI has not; use gloo"),
        ({"backend": "mpi", "bagging": [2, 2]}, "must be able to die alone, which ranks of one MPI cannot"),
        ({"backend": "mpi", "gradient_compression": "fp16"}, "torch's MPI exchanges no numbers of 16 bits: use gloo"),
        ({"backend": "mpi", "gradient_compression": "powersgd"}, ""),
    ],
)  # fmt: skip
def test_mpi_is_refused_where_its_ranks_cannot_do_what_is_asked(values, text):
    found = fields.wrong({"devices": 4, **values})
    assert [name for name, _ in found] == (["backend"] if text else [])
    assert all(text in problem for _, problem in found)


WITHOUT_LIBUV = RuntimeError("use_libuv was requested but PyTorch was build without libuv support")


@pytest.mark.parametrize("errors", [[WITHOUT_LIBUV, None], [None]], ids=["without libuv", "with libuv"])
def test_ranks_meet_without_libuv_where_torch_has_none(monkeypatch, errors):
    """The text is that of Debian's torch 2.6; torch of the published wheels has libuv."""
    for name, value in (("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("USE_LIBUV", "1")
    meet = mock.Mock(side_effect=errors)
    monkeypatch.setattr(distributed.dist, "init_process_group", meet)
    distributed.join(Group(1, 1, 2), open_device("cpu", 0), 1.0)
    assert meet.call_count == len(errors)
    assert os.environ["USE_LIBUV"] == ("0" if len(errors) > 1 else "1")


def test_ranks_that_cannot_meet_without_libuv_either_say_why(monkeypatch):
    for name, value in (("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500"), ("USE_LIBUV", "1")):
        monkeypatch.setenv(name, value)
    meet = mock.Mock(side_effect=[WITHOUT_LIBUV, RuntimeError("no route to host")])
    monkeypatch.setattr(distributed.dist, "init_process_group", meet)
    with pytest.raises(RuntimeError, match=r"^no route to host$"):
        distributed.join(Group(1, 1, 2), open_device("cpu", 0), 1.0)


def join_by_mpi(rank):
    distributed.join(Group(rank, rank, 2), open_device("cpu", 0), 1.0, {"backend": "mpi"})


def test_ranks_of_another_mpi_than_their_launchers_are_no_group():
    """Published wheels have no MPI, so that what torch would say of its own is put in here."""
    joined: list[object] = []
    said = {"is_mpi_available": lambda: True, "get_rank": lambda: 0, "get_world_size": lambda: 1}
    text = "^too_few_ranks: .*MPI calls this rank 0 of 1, the launcher 1 of 2"
    patched = mock.patch.multiple(distributed.dist, init_process_group=joined.append, **said)
    with patched, pytest.raises(WorkerFailure, match=text):
        join_by_mpi(1)
    assert joined == ["mpi"]
