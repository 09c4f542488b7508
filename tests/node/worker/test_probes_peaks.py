"""Peaks of a device: what is computed is right, rates are operations and bytes over time, wrong arithmetic fails."""

import pytest
import torch
from probe_ranks import place_of

from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import peaks


def peaks_of(tmp_path, **parameters) -> peaks.PeaksProbe:
    return peaks.probe(place_of("peaks", tmp_path, **{"matrix": 64, "vector": 4096, **parameters}))


def test_each_precision_and_each_pass_is_timed(tmp_path):
    probe = peaks_of(tmp_path)
    probe.verify()
    seconds = probe.repeat()
    assert list(seconds) == ["gemm_fp32", "gemm_bf16", "copy", "triad"]
    assert min(seconds.values()) > 0
    amounts = {rate.metric: rate.amount for one in probe.operations for rate in one.rates}
    of_stream = {"copy_bandwidth": 2 * 4096, "triad_bandwidth": 3 * 4096}  # bytes
    assert amounts == {"gemm_flops_fp32": 2 * 64**3, "gemm_flops_bf16": 2 * 64**3, **of_stream}


def multiply_wrongly(monkeypatch, probe):
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right, out: real(left, right, out=out).mul_(1.01))


@pytest.mark.parametrize(
    ("sabotage", "text"),
    [
        (multiply_wrongly, "a product of matrices of edge 64 in fp32 differs by"),
        (
            lambda _, probe: probe._c[100].fill_(5.0),
            "triad of 1024 elements: 7 to 16 instead of 7 everywhere",
        ),
    ],
    ids=["a product", "a triad"],
)
def test_a_wrong_result_fails_the_run(tmp_path, monkeypatch, sabotage, text):
    probe = peaks_of(tmp_path, precisions=["fp32"])
    sabotage(monkeypatch, probe)
    with pytest.raises(WorkerFailure, match=f"wrong_result: {text}"):
        probe.verify()


def test_a_product_is_compared_in_its_own_arithmetic_whatever_was_multiplied_before(tmp_path, monkeypatch):
    """A process that has just multiplied in TF32 would do so in fp32 too, which a GPU that is right must not fail for."""
    probe = peaks_of(tmp_path, precisions=["fp32"])
    allowed = []
    real = torch.mm

    def multiply(left, right, out):
        allowed.append(torch.backends.cuda.matmul.allow_tf32)
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", multiply)
    prepare.choose_arithmetic("tf32")
    probe.verify()
    assert allowed == [False]


def test_the_record_says_how_large_vectors_and_last_caches_are(tmp_path):
    environment = peaks_of(tmp_path).environment()
    assert environment["vector_bytes"] == "4096"
    assert int(environment.get("cache_bytes", "1")) > 0


def test_a_precision_that_the_device_does_not_have_is_refused(tmp_path):
    with pytest.raises(WorkerFailure, match="wrong_device: precision=tf32"):
        peaks_of(tmp_path, precisions=["tf32"])
