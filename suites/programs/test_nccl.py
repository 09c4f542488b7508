"""All-reduce of NVIDIA's nccl-tests over all GPUs of two nodes. Requires the partition to have them (`nccl-tests`)."""

from pytest_mlhpc import Metric, program


@program(
    "all_reduce_perf -b 1G -e 1G -g 1",
    Metric("bus_bandwidth", r"Avg bus bandwidth\s*: (\S+)", "GB/s"),
    nodes=2,
    ranks_per_node=4,
    sanity="Out of bounds values : 0 OK",
    requires="+cuda +nccl-tests",
)
def test_all_reduce(run):
    pass
