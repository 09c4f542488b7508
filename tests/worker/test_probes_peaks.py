"""Peaks of a device: what is computed is right, rates are operations and bytes over time, wrong arithmetic fails."""

from __future__ import annotations

import pytest
import torch
from probe_ranks import plan

from pytest_mlhpc.worker import prepare
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.probes import peaks
from pytest_mlhpc.worker.probes.base import Place


def alone(tmp_path, **parameters) -> peaks.Peaks:
    small = {"matrix": 64, "vector": 4096, **parameters}
    return peaks.probe(Place(plan("peaks", parameters=small), Group(), open_device("cpu", 0), tmp_path))


def test_each_precision_and_each_pass_is_timed(tmp_path):
    probe = alone(tmp_path)
    probe.verify()
    seconds = probe.repeat()
    assert list(seconds) == ["gemm_fp32", "gemm_bf16", "copy", "triad"]
    assert all(took > 0 for took in seconds.values())


def test_amounts_are_the_operations_of_a_product_and_the_bytes_of_stream(tmp_path):
    amounts = {rate.metric: rate.amount for one in alone(tmp_path).operations for rate in one.rates}
    assert amounts == {
        "gemm_flops_fp32": 2 * 64**3,
        "gemm_flops_bf16": 2 * 64**3,
        "copy_bandwidth": 2 * 4096,
        "triad_bandwidth": 3 * 4096,
    }


def test_a_wrong_product_fails_the_run(tmp_path, monkeypatch):
    probe = alone(tmp_path, precisions=["fp32"])
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right, out: real(left, right, out=out).mul_(1.01))
    with pytest.raises(
        WorkerFailure, match=r"wrong_result: a product of matrices of edge 64 in fp32 differs by"
    ):
        probe.verify()


def test_a_product_is_compared_in_its_own_arithmetic_whatever_was_multiplied_before(tmp_path, monkeypatch):
    """A process that has just multiplied in TF32 would do so in fp32 too, which a GPU that is right must not fail for."""
    probe = alone(tmp_path, precisions=["fp32"])
    seen = []
    real = torch.mm

    def multiply(left, right, out):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", multiply)
    prepare.choose_arithmetic("tf32")
    probe.verify()
    assert seen == [False]


def test_the_record_says_how_large_vectors_and_last_caches_are(tmp_path):
    said = alone(tmp_path).environment()
    assert said["vector_bytes"] == "4096"
    assert int(said.get("cache_bytes", "1")) > 0


def test_a_wrong_triad_fails_the_run(tmp_path):
    probe = alone(tmp_path, precisions=["fp32"])
    probe._c[100] = 5.0
    with pytest.raises(
        WorkerFailure, match="wrong_result: triad of 1024 elements: 7 to 16 instead of 7 everywhere"
    ):
        probe.verify()


def test_a_precision_that_the_device_does_not_have_is_refused(tmp_path):
    with pytest.raises(WorkerFailure, match="wrong_device: precision=tf32"):
        alone(tmp_path, precisions=["tf32"])
