"""How often the judge is wrong: small simulations with fixed seeds; benchmarks/vet_simulation.py does large ones.

Counts are bounds that a rule with the error rates of the design meets in all but one of a thousand seeds, and that the
rules it replaced (3 MADs; twice the fail bound) miss.
"""

import pytest
from judge_worlds import drawn, vetted

from pytest_mlhpc.node.vet.finding import Exit


def lost(count, nodes, **how):
    """In how many of *count* good allocations a node is not used."""
    draw = drawn(nodes)
    return sum(vetted(draw, nodes, **how).exit is not Exit.READY for _ in range(count))


def caught(count, nodes, by):
    """In how many of *count* allocations the one slow node is left out, and in how many another one."""
    draw = drawn(nodes)
    verdicts = [vetted(draw, nodes, slow=1, by=by) for _ in range(count)]
    return sum("n0" in each.exclude for each in verdicts), sum(
        bool(set(each.exclude) - {"n0"}) for each in verdicts
    )


@pytest.mark.parametrize(("nodes", "count"), [(4, 600), (8, 300), (64, 40), (256, 10)])
def test_good_allocations_lose_no_node(nodes, count):
    assert lost(count, nodes) <= 1  # 3 MADs would lose 60 of the 600


def test_good_allocations_of_many_devices_lose_no_node():
    assert lost(20, 16, devices=8) == 0


@pytest.mark.parametrize("nodes", [8, 16])
def test_15_percent_slow_is_found(nodes):
    found, others = caught(150, nodes, 0.15)
    assert found >= 147
    assert others == 0


def test_8_percent_slow_among_16_is_mostly_found():
    found, others = caught(100, 16, 0.08)
    assert found >= 72  # 86 are expected; with the fail bound demanded twice it would be 29
    assert others == 0
