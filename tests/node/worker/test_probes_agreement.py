"""A step on a device against float64: agreement is measured, disagreement fails by name, and so does what cannot be decided."""

import math

import pytest
import torch
from probe_ranks import place_of

from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import agreement
from pytest_mlhpc.session import check_measurement

SMALL = {"input_size": 16, "layers": 3, "base_channels": 4}


def agreement_of(tmp_path, **parameters):
    fields = {"of": "cosmoflow", "fields": SMALL, "batch": 2, **parameters}
    return agreement.probe(place_of("agreement", tmp_path, **fields))


def model(probe):
    return probe._inside.trainer.model


@pytest.mark.servers
def test_a_cpu_agrees_and_reports_how_far_it_was_from_float64(ranks, declare_probe):
    spec, run = declare_probe("agreement", ranks=1, fields=SMALL, batch=2)
    measurement = ranks(run).measurement
    assert check_measurement.check(measurement, spec, run) == []
    assert max(measurement.metric(f"{of}_error").value for of in ("gradient", "loss")) < 1e-5
    assert len(measurement.metric("gradient_time").samples) == run.steps
    assert 0 < float(measurement.environment["gradient_bound"]) < 1e-3


@pytest.mark.servers  # no server, but seconds of computing
@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({"precision": "fp32"}, 0.0, 1e-5),
        ({"precision": "fp16"}, 1e-5, 0.05),
        ({"precision": "bf16"}, 1e-4, 0.2),
        *(({"of": of, "fields": {}}, 0.0, 0.1) for of in ("deepcam", "resnet50", "language_model")),
    ],
)
def test_fewer_bits_are_further_from_float64_and_within_what_they_explain(tmp_path, fields, least, most):
    probe = agreement_of(tmp_path, **fields)
    probe.verify()
    assert least <= probe.figures()[1].value < most


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.01, "cosmoflow otherwise than a CPU in float64.* expected of fp32; run it on another device of its kind"),
        (math.nan, "the loss differs by nan"),
    ],
)  # fmt: skip
def test_a_device_that_computes_a_layer_wrongly_is_found(tmp_path, factor, text):
    probe = agreement_of(tmp_path)
    layer = next(module for module in model(probe).modules() if isinstance(module, torch.nn.Conv3d))
    layer.register_forward_hook(lambda _module, _inputs, output: output * factor)
    with pytest.raises(WorkerFailure, match=f"wrong_result: .*{text}"):
        probe.verify()


def test_a_bound_of_the_test_takes_the_place_of_the_usual_one(tmp_path):
    with pytest.raises(WorkerFailure, match="at most 1e-11 was expected of fp32"):
        agreement_of(tmp_path, bound=1e-11).verify()


def test_gradients_that_are_mostly_rounding_on_any_device_decide_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "FACTOR", 1e9)
    text = "not_supported: in fp32 the gradients of this step are mostly rounding"
    with pytest.raises(WorkerFailure, match=text):
        agreement_of(tmp_path)


def test_neither_weights_nor_their_twin_are_updated_and_nothing_is_dropped(tmp_path):
    probe = agreement_of(tmp_path)
    before = [parameter.detach().clone() for parameter in model(probe).parameters()]
    probe.verify()
    first = probe.figures()
    probe.repeat()
    probe.verify()
    assert all(torch.equal(one, now) for one, now in zip(before, model(probe).parameters(), strict=True))
    assert probe.figures() == first  # dropout would differ from step to step


def test_errors_are_relative_and_taken_over_all_parameters_together():
    expected = agreement.StepResult(2.0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    found = agreement.StepResult(2.5, {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])})
    assert [agreement.errors(one, expected) for one in (found, expected)] == [(0.25, 0.1), (0.0, 0.0)]
