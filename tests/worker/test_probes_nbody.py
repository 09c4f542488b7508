"""The n-body step: right physics, the same on one rank and on two, and a failure where it is not."""

from __future__ import annotations

import math

import pytest
import torch
from probe_ranks import plan, sabotaged

from pytest_mlhpc.results import validate
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.probes import nbody
from pytest_mlhpc.worker.probes.base import Place


def alone(tmp_path, **parameters) -> nbody.NBody:
    run = plan("nbody", parameters={"bodies": 128, **parameters})
    return nbody.probe(Place(run, Group(), open_device("cpu", 0), tmp_path))


def test_the_model_has_the_energy_and_extent_of_plummers(tmp_path):
    position, velocity = nbody.plummer(4096, 1)
    radius = position.norm(dim=1)
    assert float(position.mean(dim=0).norm()) < 1e-12
    assert float(radius.median()) == pytest.approx(1.305, rel=0.05)  # half-mass radius of Plummer's model
    kinetic = 0.5 * float(velocity.square().sum(dim=1).mean())
    assert kinetic == pytest.approx(3 * math.pi / 64, rel=0.1)  # in equilibrium, half of the potential energy


def test_one_seed_gives_the_same_bodies_another_others():
    assert torch.equal(nbody.plummer(64, 3)[0], nbody.plummer(64, 3)[0])
    assert not torch.equal(nbody.plummer(64, 3)[0], nbody.plummer(64, 4)[0])


def test_accelerations_are_those_of_a_sum_written_plainly(tmp_path):
    probe = alone(tmp_path, precision="fp64", bodies=40)
    position = probe._all
    wanted = torch.zeros_like(position)
    for one in range(40):
        for other in range(40):
            apart = position[other] - position[one]
            wanted[one] += apart / (apart.square().sum() + nbody.SOFTENING**2) ** 1.5 / 40
    assert torch.allclose(probe._acceleration, wanted, rtol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_energy_is_conserved(tmp_path, precision):
    probe = alone(tmp_path, precision=precision, bodies=256)
    before = probe._total_energy()
    for _ in range(50):
        assert probe.repeat()["step"] > 0
    probe.verify()
    assert probe._total_energy() == pytest.approx(before, rel=2e-6)
    assert before == pytest.approx(-3 * math.pi / 64, rel=0.2)


def test_wrong_arithmetic_fails_the_run(tmp_path):
    probe = alone(tmp_path)
    probe._velocity.mul_(1.01)
    with pytest.raises(WorkerFailure, match=r"wrong_result: the energy of 128 bodies went from -0\.1"):
        probe.verify()


def test_energy_that_is_no_number_fails_the_run(tmp_path):
    probe = alone(tmp_path)
    probe._velocity[3, 1] = float("nan")
    with pytest.raises(WorkerFailure, match=r"wrong_result: .* to nan"):
        probe.verify()


def test_bodies_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(WorkerFailure, match="129 bodies do not divide over 2 ranks"):
        nbody.probe(
            Place(plan("nbody", parameters={"bodies": 129}), Group(0, 0, 2), open_device("cpu", 0), tmp_path)
        )


@pytest.mark.servers
def test_two_ranks_measure_interactions_of_all_pairs(ranks, declare_probe):
    spec, run = declare_probe("nbody", ranks=2, bodies=256)
    measurement = ranks(run).measurement
    assert validate.check(measurement, spec, run) == []
    rate, step = measurement.metric("interaction_rate"), measurement.metric("step_time")
    assert rate.unit == "items/s"
    done = [per_s * took_s for per_s, took_s in zip(rate.samples, step.samples, strict=True)]
    assert done == [pytest.approx(256**2)] * len(rate.samples)
    assert measurement.metric("achieved_flops").value == pytest.approx(20 * rate.value)
    assert measurement.environment["all_gather"].startswith("all_gather")


STALE = """
import os, torch.distributed as dist
if os.environ.get("RANK") == "1":
    real = dist.all_gather_into_tensor
    def stale(whole, part):
        if whole.numel() < 100:
            return real(whole, part)
        kept = whole.clone()
        real(whole, part)
        whole[: len(whole) // 2] = kept[: len(whole) // 2]
    dist.all_gather_into_tensor = stale
"""


@pytest.mark.servers
def test_positions_that_did_not_arrive_fail_the_run(ranks, declare_probe, tmp_path):

    extra = sabotaged(tmp_path, STALE)
    _, run = declare_probe("nbody", ranks=2, bodies=256)
    failures = ranks(run, **extra).failures
    assert failures[0].startswith(
        "wrong_result: all_gather_into_tensor: after an exchange of positions the ranks differ"
    )
