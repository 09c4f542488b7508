"""How fast do ranks talk to each other, on one node and between two?"""

import pytest

NODES = pytest.mark.parametrize("nodes", [1, 2], ids=["one-node", "two-nodes"])


@pytest.mark.job("collective", devices=2)
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "point_to_point"])
@NODES
def test_exchange(run, baseline):
    assert run >= baseline
