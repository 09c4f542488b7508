"""The bootstrap sample of a base model: its distribution, that it can be had again, and how ranks share it."""

import itertools
import math

import pytest
import torch

from pytest_mlhpc.worker.bagging import bootstrap
from pytest_mlhpc.worker.failure import WorkerFailure

MANY = 200_000


def test_63_2_percent_of_the_samples_are_drawn_at_least_once():
    found = [float((bootstrap.multiplicities(MANY, seed, 0) > 0).double().mean()) for seed in range(5)]

    one_sigma = math.sqrt(bootstrap.DISTINCT * (1 - bootstrap.DISTINCT) / MANY)
    assert round(bootstrap.DISTINCT, 3) == 0.632
    assert all(abs(share - bootstrap.DISTINCT) < 5 * one_sigma for share in found)


def test_draws_have_mean_and_variance_one():
    counts = bootstrap.multiplicities(MANY, 7, 3).double()

    assert abs(float(counts.mean()) - 1) < 5 / math.sqrt(MANY)
    # The fourth central moment of Poisson(1) is 4.
    assert abs(float(counts.var()) - 1) < 5 * math.sqrt(3 / MANY)


def test_a_bootstrap_sample_follows_from_seed_and_base_model_alone():
    first, again = bootstrap.multiplicities(1000, 5, 2), bootstrap.multiplicities(1000, 5, 2)
    others = [bootstrap.multiplicities(1000, 5, 3), bootstrap.multiplicities(1000, 6, 2)]

    assert torch.equal(first, again)
    assert not any(torch.equal(first, other) for other in others)


def test_two_base_models_share_as_many_samples_as_independent_ones():
    a, b = (bootstrap.multiplicities(MANY, 0, model) > 0 for model in (0, 1))

    together = float((a & b).double().mean())
    assert abs(together - bootstrap.DISTINCT**2) < 0.006


def test_ranks_of_a_base_model_share_each_training_epoch_of_its_sample():
    drawn_from = torch.arange(100, 200)
    samplers = [bootstrap.BootstrapSampler(drawn_from, rank, 3, seed=1, model=4) for rank in range(3)]
    sample = samplers[0].sample

    sizes = [len(range(rank, len(sample), 3)) for rank in range(3)]
    shares = [itertools.islice(sampler, size) for sampler, size in zip(samplers, sizes, strict=True)]

    assert sorted(itertools.chain(*shares)) == sample.tolist()


def test_training_epochs_repeat_the_sample_in_another_order():
    sampler = bootstrap.BootstrapSampler(torch.arange(50), 0, 1, seed=1, model=0)
    size = len(sampler.sample)

    order = list(itertools.islice(sampler, 2 * size))

    assert sorted(order[:size]) == sorted(order[size:]) == sampler.sample.tolist()
    assert order[:size] != order[size:]


def test_samples_that_are_held_out_are_never_drawn():
    parted = bootstrap.part(100, 20, seed=3)
    sampler = bootstrap.BootstrapSampler(parted.drawn_from, 0, 1, seed=3, model=1)

    assert len(parted.held_out) == 20
    assert not set(parted.held_out.tolist()) & set(sampler.sample.tolist())
    assert sorted([*parted.drawn_from.tolist(), *parted.held_out.tolist()]) == list(range(100))


def test_too_few_samples_to_hold_any_out_are_refused():
    with pytest.raises(WorkerFailure, match=r"^data_exhausted: of 7 samples 4 cannot be held out"):
        bootstrap.part(7, 4, seed=0)


def test_a_sample_that_ranks_cannot_share_is_refused():
    text = r"^data_exhausted: the bootstrap sample of base model 2 has .* for 64 ranks"
    with pytest.raises(WorkerFailure, match=text):
        bootstrap.BootstrapSampler(torch.arange(8), 0, 64, seed=0, model=2)


def test_ranks_of_a_base_model_are_neighbours():
    places = [bootstrap.place_of(rank, 2) for rank in range(4)]

    assert [(place.model, place.place) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
