"""Learning rates over a run, against the numbers of the references."""

import pytest
import torch

from pytest_mlhpc.worker.quality.schedule import REFERENCES, Schedule, schedule_of
from pytest_mlhpc.worker.quality.training import set_rate, stretches
from pytest_mlhpc.worker.workloads.fields.quality import wrong_schedule


@pytest.mark.parametrize(
    ("workload", "rate", "batch", "steps", "found"),
    [
        # Rises for four epochs, and falls after 32 and 64.
        ("cosmoflow", 8e-3, 512, 1, {0: 1e-3, 1: 2.75e-3, 2: 4.5e-3, 3: 6.25e-3, 4: 8e-3, 5: 8e-3, 31: 8e-3, 32: 2e-3,
                                     63: 2e-3, 64: 1e-3}),
        # Changes at the first step of an epoch only.
        ("cosmoflow", 8e-3, 512, 3, {0: 1e-3, 1: 1e-3, 2: 1e-3, 3: 2.75e-3, 5: 2.75e-3}),
        # A batch below the reference's starts at the full rate.
        ("cosmoflow", 1e-3, 8, 1, dict.fromkeys(range(5), 1e-3)),
        # Falls to a tenth after 800 steps.
        ("deepcam", 5.5e-3, 64, 100, {0: 5.5e-3, 799: 5.5e-3, 800: 5.5e-4}),
        # Wastes no epoch at rate zero, and ends at its floor.
        ("resnet50", 8.0, 2048, 1, {0: 4.0, 1: 8.0, 2: 8.0, 37: 1e-4, 38: 1e-4, 39: 1e-4}),
        # A cosine ends at a tenth, and stays there.
        ("language_model", 3e-4, 8, 50, {0: 3e-6, 99: 3e-4, 5050: (3e-4 + 3e-5) / 2, 10_000: 3e-5, 99_999: 3e-5}),
    ],
)  # fmt: skip
def test_rates_are_those_of_the_reference(workload, rate, batch, steps, found):
    schedule = schedule_of(workload, {"learning_rate": rate}, batch=batch)
    assert {step: schedule.at(step, steps) for step in found} == pytest.approx(found)


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
