import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.worker.data.source import ShardedSampler


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


def test_the_order_is_the_seeds_and_each_training_epoch_is_shuffled_anew():
    sampler, again, other = (ShardedSampler(50, 0, 1, seed) for seed in (3, 3, 4))
    order = list(sampler)
    assert order == list(again)
    assert order not in (list(other), list(sampler))


@pytest.mark.parametrize(
    ("length", "rank", "world", "text"),
    [
        (3, 0, 4, "3 samples cannot be shared by 4 ranks"),
        *((9, rank, world, "a rank is 0 or more") for rank, world in ((-1, 2), (2, 2), (0, 0))),
    ],
)
def test_a_rank_that_cannot_be_or_has_no_sample_is_refused_instead_of_spinning(length, rank, world, text):
    with pytest.raises(ValueError, match=text):
        ShardedSampler(length, rank, world, 0, repeat=True)


def test_a_repeating_sampler_has_no_length():
    with pytest.raises(TypeError):
        len(ShardedSampler(9, 0, 1, 0, repeat=True))
