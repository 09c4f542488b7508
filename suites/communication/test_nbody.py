"""Arithmetic and communication together: gravity between all pairs of bodies, positions gathered at each step."""

import pytest


@pytest.mark.job("nbody", devices=2)
def test_nbody(run, baseline):
    assert run >= baseline
