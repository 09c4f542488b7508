"""Learning rates over a run, against the numbers of the references."""

from __future__ import annotations

import itertools

import pytest
import torch

from pytest_mlhpc.worker.quality.schedule import REFERENCES, Schedule, schedule_of
from pytest_mlhpc.worker.quality.training import set_rate, stretches
from pytest_mlhpc.worker.workloads.fields.quality import wrong_schedule


def rates(schedule: Schedule, epochs: int, steps: int = 2) -> list[float]:
    return [schedule.at(epoch * steps, steps) for epoch in range(epochs)]


def test_cosmoflows_reference_rises_for_four_epochs_and_falls_after_32_and_64():
    schedule = schedule_of("cosmoflow", {"learning_rate": 8e-3}, batch=512)
    found = rates(schedule, 70)
    assert found[:5] == pytest.approx([1e-3, 2.75e-3, 4.5e-3, 6.25e-3, 8e-3])
    assert {found[5], found[31]} == {8e-3}
    assert (found[32], found[63], found[64]) == pytest.approx((2e-3, 2e-3, 1e-3))


def test_a_batch_below_the_references_starts_at_the_full_rate():
    assert rates(schedule_of("cosmoflow", {"learning_rate": 1e-3}, batch=8), 5) == [1e-3] * 5


def test_rates_by_epoch_change_at_the_first_step_of_an_epoch_only():
    schedule = schedule_of("cosmoflow", {"learning_rate": 8e-3}, batch=512)
    assert [schedule.at(step, 3) for step in range(3)] == [1e-3] * 3


def test_deepcams_reference_falls_to_a_tenth_after_800_steps():
    schedule = schedule_of("deepcam", {"learning_rate": 5.5e-3}, batch=64)
    assert (schedule.at(0, 100), schedule.at(799, 100)) == (5.5e-3, 5.5e-3)
    assert schedule.at(800, 100) == pytest.approx(5.5e-4)


def test_resnets_reference_wastes_no_epoch_at_rate_zero_and_ends_at_its_floor():
    schedule = schedule_of("resnet50", {"learning_rate": 8.0}, batch=2048)
    found = rates(schedule, 40)
    assert found[:3] == pytest.approx([4.0, 8.0, 8.0])
    assert found[37:] == pytest.approx([1e-4] * 3)
    assert all(later <= earlier for earlier, later in itertools.pairwise(found[2:]))


def test_a_cosine_ends_at_a_tenth_and_stays_there():
    schedule = schedule_of("language_model", {"learning_rate": 3e-4}, batch=8)
    assert schedule.at(0, 50) == pytest.approx(3e-6)
    assert schedule.at(99, 50) == pytest.approx(3e-4)
    assert schedule.at(5050, 50) == pytest.approx((3e-4 + 3e-5) / 2)
    assert schedule.at(10_000, 50) == schedule.at(99_999, 50) == pytest.approx(3e-5)


def test_every_reference_is_one_that_could_be_written_in_a_test():
    for reference in REFERENCES.values():
        given = {
            key: value
            for key, value in reference.items()
            if not isinstance(value, str) or key in ("kind", "by")
        }
        assert wrong_schedule({key: list(v) if isinstance(v, tuple) else v for key, v in given.items()}) == []


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
    assert list(stretches(Schedule(1.0), 10, 5)) == [(5, 1.0)]
    falling = Schedule(1.0, "multistep", "steps", milestones=(2, 3), factors=(0.5, 0.1))
    assert list(stretches(falling, 0, 4)) == [(2, 1.0), (1, 0.5), (1, 0.1)]
    assert list(stretches(falling, 4, 4)) == [(4, 0.1)]


def test_a_rate_on_the_device_is_changed_in_place():
    weight = torch.nn.Parameter(torch.ones(1))
    plain, captured = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)
    there = torch.tensor(1.0)
    captured.param_groups[0]["lr"] = there
    set_rate(plain, 0.5)
    set_rate(captured, 0.5)
    assert plain.param_groups[0]["lr"] == 0.5
    assert captured.param_groups[0]["lr"] is there
    assert there.item() == 0.5
