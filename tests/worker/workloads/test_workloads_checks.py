"""Values that are fine alone but not together are found before anything is submitted."""

from __future__ import annotations

import pytest

from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

NAMED = {workload.name: workload for workload in WORKLOADS}


def wrong(name: str, *, devices: int = 1, **changes: object) -> list[tuple[str, str]]:
    values = {**parameters_of(NAMED[name], "smoke", **changes), "devices": devices}
    return list(NAMED[name].contradictions(values))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_preset_is_free_of_contradictions(workload):
    assert not [p for p in workload.presets if workload.contradictions(parameters_of(workload, p))]


@pytest.mark.parametrize(
    ("name", "changes", "field", "text"),
    [
        ("cosmoflow", {"input_size": 16}, "input_size", "leaves nothing after 5 layers: at least 32"),
        ("cosmoflow", {"layers": 10**9}, "input_size", "at least 2 to the power 1000000000"),
        ("cosmoflow", {"dropout": 1.0}, "dropout", "not in [0, 1)"),
        ("deepcam", {"height": 100}, "height", "height=100 is not a multiple of 16"),
        ("resnet50", {"label_smoothing": 1.5}, "label_smoothing", "not in [0, 1)"),
        ("resnet50", {"global_batch": 9, "devices": 2}, "global_batch", "does not divide over 2 devices"),
        (
            "resnet50",
            {"global_batch": 8, "gradient_accumulation": 3},
            "global_batch",
            "gradient_accumulation=3",
        ),
        ("language_model", {"heads": 3}, "heads", "hidden=128 is not divisible by heads=3"),
        ("language_model", {"kv_heads": 2}, "kv_heads", "only architecture=llama"),
    ],
)
def test_a_contradiction_names_its_field(name, changes, field, text):
    ((found, sentence),) = wrong(name, **changes)
    assert found == field
    assert text in sentence


def test_all_contradictions_are_listed_at_once():
    assert [field for field, _ in wrong("deepcam", height=50, width=70, global_batch=3, devices=2)] == [
        "global_batch",
        "height",
        "width",
    ]
