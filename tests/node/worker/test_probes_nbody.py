"""The n-body step: right physics, the same on one rank and on two, and a failure where it is not."""

import math

import pytest
import torch
from probe_ranks import place_of, sabotaged

from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import nbody
from pytest_mlhpc.session import check_measurement


def nbody_of(tmp_path, **parameters) -> nbody.NBody:
    return nbody.probe(place_of("nbody", tmp_path, **{"bodies": 128, **parameters}))


def test_the_model_has_the_energy_and_extent_of_plummers():
    position, velocity = nbody.plummer(4096, 1)
    radius = position.norm(dim=1)
    assert float(position.mean(dim=0).norm()) < 1e-12
    assert float(radius.median()) == pytest.approx(1.305, rel=0.05)  # half-mass radius of Plummer's model
    kinetic = 0.5 * float(velocity.square().sum(dim=1).mean())
    assert kinetic == pytest.approx(3 * math.pi / 64, rel=0.1)  # in equilibrium, half of the potential energy


def test_one_seed_gives_the_same_bodies_another_others():
    first, *others = (nbody.plummer(64, seed)[0] for seed in (3, 3, 4))
    assert [torch.equal(first, other) for other in others] == [True, False]


def test_accelerations_are_those_of_a_sum_written_plainly(tmp_path):
    probe = nbody_of(tmp_path, precision="fp64", bodies=40)
    apart = probe._all[None, :] - probe._all[:, None]
    expected = apart / (apart.square().sum(dim=2, keepdim=True) + nbody.SOFTENING**2) ** 1.5 / 40
    assert torch.allclose(probe._acceleration, expected.sum(dim=1), rtol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_energy_is_conserved(tmp_path, precision):
    probe = nbody_of(tmp_path, precision=precision)
    before = probe._total_energy()
    for _ in range(20):
        assert probe.repeat()["step"] > 0
    probe.verify()
    assert probe._total_energy() == pytest.approx(before, rel=2e-6)
    assert before == pytest.approx(-3 * math.pi / 64, rel=0.2)


@pytest.mark.parametrize(
    ("factor", "text"), [(1.01, r"the energy of 128 bodies went from -0\.1"), (math.nan, ".* to nan")]
)
def test_wrong_arithmetic_fails_the_run(tmp_path, factor, text):
    probe = nbody_of(tmp_path)
    probe._velocity.mul_(factor)
    with pytest.raises(WorkerFailure, match=f"wrong_result: {text}"):
        probe.verify()


def test_bodies_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(WorkerFailure, match="129 bodies do not divide over 2 ranks"):
        nbody.probe(place_of("nbody", tmp_path, (0, 0, 2), bodies=129))


@pytest.mark.servers
def test_two_ranks_measure_interactions_of_all_pairs(ranks, declare_probe):
    spec, run = declare_probe("nbody", ranks=2, bodies=256)
    measurement = ranks(run).measurement
    assert check_measurement.check(measurement, spec, run) == []
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
        before = whole.clone()
        real(whole, part)
        whole[: len(whole) // 2] = before[: len(whole) // 2]
    dist.all_gather_into_tensor = stale
"""


@pytest.mark.servers
def test_positions_that_did_not_arrive_fail_the_run(ranks, declare_probe, tmp_path):
    _, run = declare_probe("nbody", ranks=2, bodies=256)
    text = "wrong_result: all_gather_into_tensor: after an exchange of positions the ranks differ"
    assert ranks(run, **sabotaged(tmp_path, STALE)).failures[0].startswith(text)
