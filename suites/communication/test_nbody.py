"""Arithmetic and communication together: gravity between all pairs of bodies, positions gathered at each step."""

from pytest_mlhpc import workload


@workload("nbody", devices_per_node=2)
def test_nbody(run, baseline):
    assert run >= baseline
