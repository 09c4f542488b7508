"""How fast do ranks talk to each other, on one node and between two?"""

import pytest

from pytest_mlhpc import collective

NODES = pytest.mark.parametrize(
    ("nodes", "devices_per_node"), [(1, 2), (2, 1)], ids=["one-node", "two-nodes"]
)


@collective()
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "point_to_point"])
@NODES
def test_exchange(run, baseline):
    assert run >= baseline
