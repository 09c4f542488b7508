"""Molecular dynamics of a melting crystal (Debian's lammps), two ranks of one node. Requires `lammps`."""

import re

import pytest

from pytest_mlhpc import Metric, program


@program(
    "lmp -in melt.lammps -log none",
    Metric("rate", r"(\S+) timesteps/s", "steps/s"),
    files=["melt.lammps"],
    ranks_per_node=2,
    requires="+lammps",
)
def test_melt(run):
    energies = re.findall(r"^\s*\d00(?:\s+\S+){3}\s+(\S+)", run.output, re.MULTILINE)
    assert float(energies[-1]) == pytest.approx(float(energies[0]), rel=0.01)
