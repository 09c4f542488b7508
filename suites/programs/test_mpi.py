"""Latency and all-reduce of MPI between two ranks, on one node and on two. Requires MPI's compiler and launcher (`mpi`)."""

import pytest

from pytest_mlhpc import Metric, build, program

exchange = build("mpicc -O2 -o exchange mpi/exchange.c", files=["mpi/exchange.c"])


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 1)], ids=["within", "between"])
@program(
    "{exchange}/exchange",
    Metric("latency", r"latency: (\S+)", "us", reduce="min"),
    Metric("all_reduce", r"all_reduce: (\S+)", "us", reduce="min"),
    requires="+mpi",
)
def test_exchange(run, exchange):
    pass
