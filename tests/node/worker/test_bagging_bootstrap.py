"""The bootstrap sample of a base model: its distribution, that it can be had again, and how ranks share it."""

import itertools
import math

import pytest
import torch

from pytest_mlhpc.node.worker import ensemble
from pytest_mlhpc.node.worker.environment import WorkerFailure

MANY = 200_000


def test_63_2_percent_of_the_samples_are_drawn_at_least_once():
    found = [float((ensemble.multiplicities(MANY, seed, 0) > 0).double().mean()) for seed in range(5)]

    one_sigma = math.sqrt(ensemble.DISTINCT * (1 - ensemble.DISTINCT) / MANY)
    assert round(ensemble.DISTINCT, 3) == 0.632
    assert all(abs(share - ensemble.DISTINCT) < 5 * one_sigma for share in found)


def test_draws_have_mean_and_variance_one():
    counts = ensemble.multiplicities(MANY, 7, 3).double()

    assert abs(float(counts.mean()) - 1) < 5 / math.sqrt(MANY)
    # The fourth central moment of Poisson(1) is 4.
    assert abs(float(counts.var()) - 1) < 5 * math.sqrt(3 / MANY)


def test_a_bootstrap_sample_follows_from_seed_and_base_model_alone():
    first, *others = (ensemble.multiplicities(1000, *of) for of in ((5, 2), (5, 2), (5, 3), (6, 2)))
    assert [torch.equal(first, other) for other in others] == [True, False, False]


def test_two_base_models_share_as_many_samples_as_independent_ones():
    a, b = (ensemble.multiplicities(MANY, 0, model) > 0 for model in (0, 1))
    assert float((a & b).double().mean()) == pytest.approx(ensemble.DISTINCT**2, abs=0.006)


def test_ranks_of_a_base_model_share_each_training_epoch_of_its_sample():
    drawn_from = torch.arange(100, 200)
    samplers = [ensemble.BootstrapSampler(drawn_from, rank, 3, seed=1, model=4) for rank in range(3)]
    sample = samplers[0].sample
    shares = [itertools.islice(one, len(range(rank, len(sample), 3))) for rank, one in enumerate(samplers)]
    assert sorted(itertools.chain(*shares)) == sample.tolist()


def test_training_epochs_repeat_the_sample_in_another_order():
    sampler = ensemble.BootstrapSampler(torch.arange(50), 0, 1, seed=1, model=0)
    order = iter(sampler)
    first, second = (list(itertools.islice(order, len(sampler.sample))) for _ in range(2))
    assert sorted(first) == sorted(second) == sampler.sample.tolist()
    assert first != second


def test_an_iteration_of_a_number_of_samples_ends_there_and_the_next_has_another_order():
    sampler = ensemble.BootstrapSampler(torch.arange(50), 0, 2, seed=1, model=0, count=30)
    whole = list(itertools.islice(ensemble.BootstrapSampler(torch.arange(50), 0, 2, seed=1, model=0), 30))
    first, second = list(sampler), list(sampler)
    assert first == whole  # beyond the rank's share, it begins anew
    assert len(second) == 30
    assert first != second


def test_held_out_samples_are_never_drawn():
    parted = ensemble.part(100, 20, seed=3)
    sampler = ensemble.BootstrapSampler(parted.drawn_from, 0, 1, seed=3, model=1)

    assert len(parted.held_out) == 20
    assert not set(parted.held_out.tolist()) & set(sampler.sample.tolist())
    assert sorted([*parted.drawn_from.tolist(), *parted.held_out.tolist()]) == list(range(100))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ensemble.part(7, 4, seed=0), "of 7 samples 4 cannot be held out"),
        (
            lambda: ensemble.BootstrapSampler(torch.arange(8), 0, 64, seed=0, model=2),
            "the bootstrap sample of base model 2 has .* for 64 ranks",
        ),
    ],
    ids=["to hold any out", "for all ranks"],
)
def test_too_few_samples_are_refused(call, text):
    with pytest.raises(WorkerFailure, match=f"^data_exhausted: {text}"):
        call()


def test_ranks_of_a_base_model_are_neighbours():
    places = [ensemble.place_of(rank, 2) for rank in range(4)]

    assert [(place.model, place.place) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
