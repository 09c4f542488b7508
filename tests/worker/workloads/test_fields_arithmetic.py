"""What the fields of arithmetic refuse, and what `tuning` fills in; no torch."""

from __future__ import annotations

import pytest

from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of
from pytest_mlhpc.worker.workloads.fields import arithmetic

TRAINING = {workload.name: workload for workload in WORKLOADS if "tuning" in workload.fields}


def values_of(workload="cosmoflow", accelerator="cuda", **changes):
    more = {name: changes.pop(name) for name in ("devices", "warmup") if name in changes}
    return {
        **parameters_of(TRAINING[workload], "smoke", **changes),
        "devices": 1, "nodes": 1, "warmup": 16, "accelerator": accelerator, **more,
    }  # fmt: skip


def texts_of(**changes):
    return [f"{field}: {text}" for field, text in arithmetic.wrong(values_of(**changes))]


def test_every_training_has_the_fields_and_none_of_them_is_set():
    assert set(TRAINING) == {"cosmoflow", "deepcam", "resnet50", "language_model"}
    for workload in TRAINING.values():
        assert [name for name in arithmetic.FIELDS if workload.fields[name].default is not None] == []
        assert arithmetic.wrong(values_of(workload.name)) == ()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"accelerator": "cpu", "cuda_graphs": True}, "cuda_graphs: cpu has no CUDA graphs"),
        ({"accelerator": "xpu", "cuda_graphs": True}, "cuda_graphs: xpu has no CUDA graphs"),
        ({"cuda_graphs": True, "gradient_accumulation": 2}, "gradient_accumulation must be 1"),
        ({"cuda_graphs": True, "compile": "reduce-overhead"}, "makes graphs of its own"),
        ({"cuda_graphs": True, "compile": "max-autotune"}, "makes graphs of its own"),
        ({"cuda_graphs": True, "optimizer": "lamb"}, "LAMB's count of steps"),
        ({"cuda_graphs": True, "until": "quality"}, "the learning rate changes"),
        ({"cuda_graphs": True, "warmup": 3}, "needs warmup=4 or more on 1 devices"),
        ({"cuda_graphs": True, "warmup": 11, "devices": 4}, "needs warmup=12 or more on 4 devices"),
        ({"threads": 4}, "threads: threads is for ranks that compute on cores"),
        ({"binding": "cores", "accelerator": "rocm"}, "binding: binding is for ranks that compute on cores"),
        ({"miopen_find": "fast"}, "miopen_find: MIOpen is the library of AMD's GPUs"),
        (
            {"compile": "default", "accelerator": "wse"},
            "compile: wse compiles every model in a way of its own",
        ),
        ({"fused_optimizer": True, "optimizer": "lars"}, "fused_optimizer: lars has no fused kernel"),
        ({"loss_scale": 1024.0}, "loss_scale: gradients of fp32 need no scaling"),
        ({"loss_scale": 1024.0, "precision": "bf16"}, "loss_scale: gradients of bf16 need no scaling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_what_contradicts_is_refused_with_the_field_and_the_reason(fields, text):
    (found,) = texts_of(**fields)

    assert text in found


@pytest.mark.parametrize(
    "fields",
    [
        {"cuda_graphs": True, "warmup": 4},
        {"cuda_graphs": True, "warmup": 12, "devices": 4, "accelerator": "rocm"},
        {"cuda_graphs": True, "compile": "default"},
        {"cuda_graphs": False, "accelerator": "cpu"},
        {"loss_scale": 1024.0, "precision": "fp16"},
        {"threads": 2, "binding": "cores", "accelerator": "cpu"},
        {"fused_optimizer": False, "optimizer": "lars"},
        {"miopen_find": "normal", "accelerator": "rocm"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_what_goes_together_is_taken(fields):
    assert texts_of(**fields) == []


def test_without_a_type_of_device_nothing_is_said_of_devices():
    values = values_of(cuda_graphs=True, threads=2, binding="cores")
    del values["accelerator"]

    assert arithmetic.wrong(values) == ()


@pytest.mark.parametrize("accelerator", sorted(arithmetic.FAST))
@pytest.mark.parametrize("workload", sorted(TRAINING))
def test_fast_never_contradicts_itself(workload, accelerator):
    asked = {"tuning": "fast"}
    values = values_of(workload, accelerator, **asked)

    tuned = arithmetic.tuned(values, asked, accelerator, workload)

    assert arithmetic.wrong({**tuned, "accelerator": accelerator}) == ()
    assert {name for name in tuned if tuned[name] != values.get(name)}


def test_fast_differs_by_device_and_workload():
    def fast(workload, accelerator):
        values = values_of(workload, accelerator, tuning="fast")
        tuned = arithmetic.tuned(values, {"tuning": "fast"}, accelerator, workload)
        return {name: tuned[name] for name in ("precision", "channels_last", "compile", "fused_optimizer")}

    assert fast("cosmoflow", "cpu") == {
        "precision": "fp32", "channels_last": True, "compile": None, "fused_optimizer": True
    }  # fmt: skip
    assert fast("cosmoflow", "cuda") == {
        "precision": "bf16", "channels_last": True, "compile": None, "fused_optimizer": True
    }  # fmt: skip
    assert fast("language_model", "cuda") == {
        "precision": "bf16", "channels_last": False, "compile": "default", "fused_optimizer": True
    }  # fmt: skip
    assert fast("cosmoflow", "rocm")["channels_last"] is False


def test_what_was_asked_for_stays():
    asked = {"tuning": "fast", "precision": "fp32", "compile": None}
    values = values_of("language_model", **asked)

    tuned = arithmetic.tuned(values, asked, "cuda", "language_model")

    assert (tuned["precision"], tuned["compile"], tuned["fused_optimizer"]) == ("fp32", None, True)


def test_what_would_contradict_is_left_out():
    asked = {"tuning": "fast", "optimizer": "lars"}

    tuned = arithmetic.tuned(values_of(**asked), asked, "cuda", "cosmoflow")

    assert tuned["fused_optimizer"] is None
    assert tuned["precision"] == "bf16"


def test_no_tuning_changes_nothing():
    values = values_of()

    assert arithmetic.tuned(values, {}, "cuda", "cosmoflow") == values


def test_an_unknown_device_or_workload_gets_what_is_said_of_any():
    values = values_of(tuning="fast")

    assert arithmetic.tuned(values, {"tuning": "fast"}, "wse", "cosmoflow")["precision"] == "fp32"
    assert arithmetic.tuned(values, {"tuning": "fast"}, "cuda", "theirs")["channels_last"] is False
