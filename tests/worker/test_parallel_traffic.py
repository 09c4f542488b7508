"""Collectives are counted whichever thread begins them."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pytest_mlhpc.worker import parallel_traffic


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduce_floats(number: int) -> None:
    dist.all_reduce(torch.zeros(number))


def in_a_thread(number: int) -> None:
    thread = threading.Thread(target=reduce_floats, args=(number,))
    thread.start()
    thread.join()


@pytest.mark.usefixtures("one_rank")
def test_collectives_of_this_and_of_other_threads_are_noted_once_each():
    with parallel_traffic.noted() as collectives:
        reduce_floats(4)
        in_a_thread(8)
    assert collectives == [("all_reduce", 16), ("all_reduce", 32)]


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_noted_afterwards():
    function = dist.all_reduce
    with parallel_traffic.noted() as collectives:
        pass
    reduce_floats(4)
    in_a_thread(8)
    assert collectives == []
    assert dist.all_reduce is function


def test_figures_are_number_and_bytes_of_each_kind():
    found = parallel_traffic.figures([("all_reduce", 16), ("all_gather", 4), ("all_reduce", 32)])
    assert [(one.name, one.value, one.unit) for one in found] == [
        ("all_gather_count", 1.0, "1"),
        ("all_gather_bytes", 4.0, "B"),
        ("all_reduce_count", 2.0, "1"),
        ("all_reduce_bytes", 48.0, "B"),
    ]
