"""What is done around a probe, ours or a third party's: checks before and after, repetitions, an end whatever happens."""

from __future__ import annotations

import pytest
from rank_helpers import run_plan

from pytest_mlhpc.results.combine import combine
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.probes import measure

TINY = {"MLHPC_WORKLOAD_MODULE": "tiny_probe"}


def measured(tmp_path, *, told=None, calibrate=False, **parameters):
    calls = parameters.setdefault("calls", [])
    run = run_plan(
        workload="count", parameters=parameters, variables=TINY, steps=3, warmup_steps=2, data_source="none",
        data_kind="none", calibrate=calibrate,
    )  # fmt: skip
    told = [] if told is None else told
    report = measure.measure(
        run, Group(), open_device("cpu", 0), tmp_path, lambda *state: told.append(state[:2])
    )
    return combine(run, [report]), calls


def test_a_third_partys_probe_is_checked_warmed_up_repeated_and_checked_again(tmp_path):
    told = []
    measurement, calls = measured(tmp_path, told=told)
    assert calls == ["verify", "repeat", "repeat", "repeat", "repeat", "repeat", "verify", "close"]
    assert measurement.metric("count_rate").value == 20.0
    assert measurement.metric("count_time").samples == (0.5,) * 3
    assert (measurement.steps, measurement.samples, measurement.data_source) == (3, 3, "none")
    assert measurement.environment["counter"] == "fingers"
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_the_machines_speed_is_measured_around_it_where_that_is_asked(tmp_path):
    measurement, _ = measured(tmp_path, calibrate=True)
    assert measurement.calibration_before > 0
    assert measurement.calibration_after > 0
    assert measured(tmp_path)[0].calibration_before is None


@pytest.mark.parametrize(("time", "calls"), [(1, 1), (2, 7)])
def test_a_wrong_result_before_or_after_fails_the_run_and_nothing_is_left(tmp_path, time, calls):
    done: list[str] = []
    with pytest.raises(WorkerFailure, match="wrong_result: it counted to eleven"):
        measured(tmp_path, wrong=time, calls=done)
    assert done[-1] == "close"
    assert len(done) == calls + 1


def test_nothing_is_left_when_it_breaks(tmp_path):
    done: list[str] = []
    with pytest.raises(RuntimeError, match="the counter jams"):
        measured(tmp_path, explode=True, calls=done)
    assert done == ["verify", "repeat", "close"]


def test_processor_time_of_the_kernel_is_not_called_other_programs(tmp_path):
    assert "busy_cores" in measured(tmp_path)[0].contention
    during = measured(tmp_path, kernel_works=True)[0].contention
    assert not {"busy_cores", "own_cores", "other_cores"} & set(during)
    assert "load1_before" in during
