"""Is each node fit? Every check is a test of its own, and with --mlhpc-each-node every node is one.

All checks share one vetting of a node.
"""

import pytest

from pytest_mlhpc import nodes
from pytest_mlhpc.node.vet.workers import checks_of_nodes


@nodes(vet="quick", unknown="warn")
@pytest.mark.parametrize("check", checks_of_nodes())
def test_node(vetting, check):
    assert vetting.trouble(check) == []


@nodes(count=4, vet="quick", unknown="warn")
def test_four_nodes_keep_up_with_each_other(vetting):
    assert vetting.unfit == {}
