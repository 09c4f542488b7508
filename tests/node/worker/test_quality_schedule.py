"""Learning rates over a run, against the numbers of the references."""

import pytest
import torch

from pytest_mlhpc.node.worker.quality.rules import REFERENCES, Schedule, departures, schedule_of
from pytest_mlhpc.node.worker.quality.train import set_rate, stretches
from pytest_mlhpc.node.worker.workloads.fields.quality import wrong_schedule

#: Printed by the references' own code (mlcommons/hpc): ``cosmoflow/utils/optimizers.py`` with ``configs/cosmo.yaml``, and
#: ``deepcam/src/deepCam/utils/schedulers.py`` with torch's SGD, a step of the optimiser before each of the scheduler.
FACTOR_4 = {"kind": "multistep", "by": "steps", "warmup": 400, "warmup_factor": 4, "milestones": [1201, 1601],
            "factors": [0.1, 0.01]}  # fmt: skip
COSINE = {"kind": "cosine", "by": "steps", "warmup": 100, "warmup_factor": 1, "length": 600, "end": 1e-5}


@pytest.mark.parametrize(
    ("workload", "rate", "batch", "schedule", "found"),
    [
        ("cosmoflow", 1e-3, 512, None, {0: 1e-3, 1: 2.75e-3, 2: 4.5e-3, 3: 6.25e-3, 4: 8e-3, 5: 8e-3, 32: 8e-3, 33: 2e-3,
                                        64: 2e-3, 65: 1e-3}),
        ("cosmoflow", 1e-3, 64, None, {0: 1e-3, 4: 1e-3, 32: 1e-3, 33: 2.5e-4, 65: 1.25e-4}),
        ("cosmoflow", 1e-3, 8, None, {0: 1e-3, 1: 7.8125e-4, 3: 3.4375e-4, 4: 1.25e-4, 33: 3.125e-5}),
        ("deepcam", 5.5e-3, 128, None, {0: 0, 1: 1.375e-5, 100: 1.375e-3, 399: 5.48625e-3, 400: 5.48625e-3,
                                        800: 5.48625e-3, 1200: 5.48625e-3, 1201: 5.48625e-4, 5000: 5.48625e-4}),
        ("deepcam", 4e-3, 128, FACTOR_4, {0: 1e-3, 100: 1.75e-3, 399: 3.9925e-3, 400: 3.9925e-3, 1200: 3.9925e-3,
                                          1201: 3.9925e-4, 1601: 3.9925e-5}),
        ("deepcam", 1e-3, 128, COSINE, {0: 0, 50: 5e-4, 99: 9.9e-4, 100: 9.9e-4, 101: 9.89990327819507e-4, 350: 5e-4,
                                        599: 1.0009672180492814e-5, 600: 1e-5}),
        # Ours: wastes no epoch at rate zero, and ends at its floor.
        ("resnet50", 8.0, 2048, None, {0: 4.0, 1: 8.0, 2: 8.0, 37: 1e-4, 38: 1e-4, 39: 1e-4}),
        # A cosine ends at a tenth, and stays there.
        ("language_model", 3e-4, 8, None, {0: 3e-6, 99: 3e-4, 5050: (3e-4 + 3e-5) / 2, 10_000: 3e-5, 99_999: 3e-5}),
    ],
)  # fmt: skip
def test_rates_are_those_of_the_reference(workload, rate, batch, schedule, found):
    made = schedule_of(workload, {"learning_rate": rate, "schedule": schedule}, batch=batch)
    assert {step: made.at(step, 1) for step in found} == pytest.approx(found)


def test_a_rate_by_epochs_changes_at_the_first_step_of_an_epoch_only():
    schedule = schedule_of("cosmoflow", {"learning_rate": 1e-3}, batch=512)
    assert [schedule.at(step, 3) for step in (0, 1, 2, 3, 5)] == pytest.approx([1e-3] * 3 + [2.75e-3] * 2)


@pytest.mark.parametrize(
    ("workload", "schedule", "texts"),
    [
        ("cosmoflow", None, []),
        ("deepcam", None, []),
        ("deepcam", FACTOR_4, []),
        ("deepcam", COSINE, []),
        ("resnet50", {"kind": "poly", "length": 9}, []),
        ("cosmoflow", {"kind": "poly", "by": "steps", "warmup": 3, "length": 9}, ["a poly schedule", "at single steps", "from zero"]),
        ("deepcam", {"warmup": 2}, ["a constant schedule", "between training epochs", "warm-up counts from its end"]),
        ("deepcam", {**FACTOR_4, "milestones": [400, 1601], "factors": [0.1, 0.05]}, ["factors [0.1, 0.05]", "within warm-up"]),
    ],
)  # fmt: skip
def test_what_the_reference_cannot_be_set_to_is_named(workload, schedule, texts):
    found = departures(
        workload, schedule_of(workload, {"learning_rate": 1e-3, "schedule": schedule}, batch=64)
    )
    assert [text for text, words in zip(found, texts, strict=True) if words not in text] == []


def test_resnets_rate_never_rises_again():
    schedule = schedule_of("resnet50", {"learning_rate": 8.0}, batch=2048)
    rates = [schedule.at(epoch, 1) for epoch in range(2, 40)]
    assert rates == sorted(rates, reverse=True)


def test_every_reference_is_one_that_could_be_written_in_a_test():
    for reference in REFERENCES.values():
        numbers = {key: value for key, value in reference.items() if not isinstance(value, str)}
        lists = {key: list(value) for key, value in numbers.items() if isinstance(value, tuple)}
        words = {key: reference[key] for key in ("kind", "by") if key in reference}
        assert wrong_schedule({**numbers, **lists, **words}) == []


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({"kind": "step"}, "kind='step' is not one of constant, multistep, cosine, poly"),
        ({"by": "days"}, "by='days' is not one of epochs, steps"),
        ({"milestone": [1]}, "unknown key 'milestone' (did you mean 'milestones'?)"),
        ({"warmup": -1}, "warmup=-1 is not a number of at least 0"),
        ({"warmup": float("nan")}, "warmup=nan is not a number of at least 0"),
        ({"warmup": True}, "warmup=True is not a number of at least 0"),
        ({"warmup": 2, "warmup_factor": 2, "base_batch": 64},
         "warmup_factor and base_batch both say where warm-up starts: leave one out"),
        ({"length": 10**400}, f"length={10**400} is not a number of at least 0"),
        ({"base_batch": 0}, "base_batch=0 is less than one sample"),
        ({"kind": "multistep"}, "multistep needs milestones, and as many factors: the rate after each over the full one"),
        ({"kind": "multistep", "milestones": [8, 4], "factors": [0.5, 0.1]}, "milestones=[8, 4] are not in ascending order"),
        ({"kind": "cosine"}, "cosine needs length: the epochs or steps, from the start, in which the rate falls to its end"),
        ({"kind": "poly", "length": 4, "warmup": 4}, "length=4 is not beyond warmup=4"),
    ],
)  # fmt: skip
def test_an_odd_schedule_is_refused_with_a_reason(schedule, text):
    assert wrong_schedule(schedule) == [text]


def test_steps_of_one_rate_go_together():
    falling = Schedule(1.0, "multistep", "steps", milestones=(2, 3), factors=(0.5, 0.1))
    assert list(stretches(Schedule(1.0), 10, 5)) == [(5, 1.0)]
    assert list(stretches(falling, 0, 8)) == [(2, 1.0), (1, 0.5), (5, 0.1)]


def test_a_rate_on_the_device_is_changed_in_place():
    plain, captured = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    there = captured.param_groups[0]["lr"] = torch.tensor(1.0)
    for optimizer in (plain, captured):
        set_rate(optimizer, 0.5)
    assert plain.param_groups[0]["lr"] == there.item() == 0.5
    assert captured.param_groups[0]["lr"] is there
