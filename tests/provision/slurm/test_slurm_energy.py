"""Energy comes from the accounting, which lags: with `energy: true` the end of a run waits for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from unittest.mock import Mock

import pytest
from scripted_slurm import World

from pytest_mlhpc.jobs.provisioner import LineArrived
from pytest_mlhpc.provision.scheduler.client import JobStep, SchedulerState
from pytest_mlhpc.provision.scheduler.poll import MAX_ENERGY_QUERIES

STEP = JobStep("0", "run-a", SchedulerState.COMPLETED, nodes=("n1",), energy_j=420.0, end_ns=1)


@pytest.fixture
def end_after(tmp_path, monkeypatch):
    """Let a run end where the accounting knows its step after so many queries; return the end's body and their number."""

    def run(lag):
        world = World(tmp_path, monkeypatch, energy=True)
        world.started("end", code=0, state=SchedulerState.COMPLETED, nodes=("n1",), end_ns=1)
        job = world.slurm.queued["101"]
        answers = chain(repeat([job], lag), repeat([replace(job, steps=(STEP,))]))
        world.slurm.accounting = Mock(side_effect=answers)
        (ended,) = world.follow(600.0)
        assert ended.error is None
        (body,) = [one.message.body for one in world.all_of(LineArrived) if one.message.kind == "end"]
        return body, world.slurm.accounting.call_count

    return run


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_end_of_a_run_brings_its_energy_and_its_step(end_after, lag):
    body, queries = end_after(lag)
    assert (body["step"], body["energy_j"]) == ("0", 420.0)
    assert queries == lag + 1


def test_an_accounting_that_never_knows_does_not_hold_the_result_up_for_ever(end_after):
    body, queries = end_after(1000)
    assert "energy_j" not in body
    assert queries == MAX_ENERGY_QUERIES
