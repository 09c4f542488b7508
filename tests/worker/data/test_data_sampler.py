import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.worker.data.sampler import ShardedSampler


@st.composite
def sizes(draw):
    world = draw(st.integers(1, 9))
    return draw(st.integers(world, 200)), world, draw(st.integers(0, 2**31))


@given(sizes(), st.integers(1, 3))
def test_every_training_epoch_gives_each_sample_to_exactly_one_rank(size, training_epochs):
    length, world, seed = size
    samplers = [ShardedSampler(length, rank, world, seed) for rank in range(world)]
    for _ in range(training_epochs):
        shares = [list(sampler) for sampler in samplers]
        assert sorted(itertools.chain(*shares)) == list(range(length))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]


@given(sizes())
def test_repeating_is_one_training_epoch_after_the_other(size):
    length, world, seed = size
    once = ShardedSampler(length, 0, world, seed)
    expected = list(once) + list(once) + list(once)
    endless = ShardedSampler(length, 0, world, seed, repeat=True)
    assert list(itertools.islice(endless, len(expected))) == expected


def test_the_order_is_the_seeds():
    assert list(ShardedSampler(50, 0, 1, 3)) == list(ShardedSampler(50, 0, 1, 3))
    assert list(ShardedSampler(50, 0, 1, 3)) != list(ShardedSampler(50, 0, 1, 4))


def test_each_training_epoch_is_shuffled_anew():
    sampler = ShardedSampler(50, 0, 1, 3)
    assert list(sampler) != list(sampler)


def test_a_rank_without_a_sample_is_refused_instead_of_spinning():
    with pytest.raises(ValueError, match="3 samples cannot be shared by 4 ranks"):
        ShardedSampler(3, 0, 4, 0, repeat=True)


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(rank, world):
    with pytest.raises(ValueError, match="a rank is 0 or more"):
        ShardedSampler(9, rank, world, 0)


def test_a_repeating_sampler_has_no_length():
    with pytest.raises(TypeError):
        len(ShardedSampler(9, 0, 1, 0, repeat=True))
