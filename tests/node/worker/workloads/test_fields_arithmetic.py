"""What the fields of arithmetic refuse, and what `tuning` fills in; no torch."""

import pytest
from tables import table

from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.fields import arithmetic
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

TRAINING = {workload.name: workload for workload in WORKLOADS if "tuning" in workload.fields}
TABLES = table("arithmetic_fields")


def values_of(workload="cosmoflow", accelerator="cuda", **changes):
    of_run = {name: changes.pop(name) for name in ("devices", "warmup") if name in changes}
    values = parameters_of(TRAINING[workload], "smoke", **changes)
    return {**values, "devices": 1, "nodes": 1, "warmup": 16, "accelerator": accelerator, **of_run}


def tuned(workload, accelerator, **fields):
    fields = {"tuning": "fast", **fields}
    return arithmetic.tuned(values_of(workload, accelerator, **fields), fields, accelerator, workload)


def values_text(case):
    return case if isinstance(case, str) else "-".join(map(str, case.values()))


@pytest.mark.parametrize(("fields", "text"), TABLES["refused"], ids=values_text)
def test_what_contradicts_is_refused_with_the_field_and_the_reason(fields, text):
    ((field, reason),) = arithmetic.wrong(values_of(**fields))
    assert text in f"{field}: {reason}"


@pytest.mark.parametrize("fields", TABLES["taken"], ids=values_text)
def test_what_goes_together_is_taken(fields):
    assert arithmetic.wrong(values_of(**fields)) == ()


def test_without_a_type_of_device_nothing_is_refused_of_devices():
    assert arithmetic.wrong(values_of(accelerator=None, cuda_graphs=True, threads=2, binding="cores")) == ()


@pytest.mark.parametrize("accelerator", sorted(arithmetic.FAST))
@pytest.mark.parametrize("workload", sorted(TRAINING))
def test_fast_changes_something_and_never_contradicts_itself(workload, accelerator):
    found = tuned(workload, accelerator)
    assert arithmetic.wrong({**found, "accelerator": accelerator}) == ()
    before = values_of(workload, accelerator, tuning="fast")
    assert {name for name in found if found[name] != before.get(name)}


@pytest.mark.parametrize(("workload", "accelerator", "chosen"), TABLES["fast"])
def test_fast_differs_by_device_and_workload(workload, accelerator, chosen):
    found = tuned(workload, accelerator)
    assert {name: found[name] for name in chosen} == chosen
    assert found["compile"] == chosen.get("compile")


def test_what_was_asked_for_stays():
    found = tuned("language_model", "cuda", precision="fp32", compile=None)
    assert (found["precision"], found["compile"], found["fused_optimizer"]) == ("fp32", None, True)


def test_what_would_contradict_is_left_out():
    found = tuned("cosmoflow", "cuda", optimizer="lars")
    assert (found["fused_optimizer"], found["precision"]) == (None, "bf16")


def test_no_tuning_changes_nothing():
    assert arithmetic.tuned(values_of(), {}, "cuda", "cosmoflow") == values_of()


def test_an_unknown_device_or_workload_gets_what_holds_for_any():
    assert tuned("cosmoflow", "wse")["precision"] == "fp32"
    values = values_of(tuning="fast")
    assert arithmetic.tuned(values, {"tuning": "fast"}, "cuda", "theirs")["channels_last"] is False
