"""What is done around a probe, ours or a third party's: checks before and after, repetitions, an end whatever happens."""

import pytest
from probe_ranks import alone
from rank_helpers import run_plan

from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import measure


def measured(tmp_path, *, calibrate=False, progress=None, calls=None, **parameters):
    run = run_plan(
        workload="count", parameters={"calls": [] if calls is None else calls, **parameters},
        variables={"MLHPC_WORKLOAD_MODULE": "tiny_probe"}, steps=3, warmup_steps=2, data_source="none", data_kind="none",
        calibrate=calibrate,
    )  # fmt: skip
    progress = [] if progress is None else progress
    return combine(run, [alone(measure.measure, run, tmp_path, lambda *now: progress.append(now[:2]))])


def test_a_third_partys_probe_is_checked_warmed_up_repeated_and_checked_again(tmp_path):
    progress, calls = [], []
    measurement = measured(tmp_path, progress=progress, calls=calls)
    assert calls == ["verify", "repeat", "repeat", "repeat", "repeat", "repeat", "verify", "close"]
    assert measurement.metric("count_rate").value == 20.0
    assert measurement.metric("count_time").samples == (0.5,) * 3
    assert (measurement.steps, measurement.samples, measurement.data_source) == (3, 3, "none")
    assert (measurement.environment["counter"], measurement.calibration_before) == ("fingers", None)
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_the_machines_speed_is_measured_around_it_where_that_is_asked(tmp_path, monkeypatch):
    rates = iter((3.0, 5.0))
    monkeypatch.setattr("pytest_mlhpc.node.worker.reporting.calibrate", lambda _device: next(rates))
    measurement = measured(tmp_path, calibrate=True)
    assert (measurement.calibration_before, measurement.calibration_after) == (3.0, 5.0)


@pytest.mark.parametrize(
    ("fault", "error", "text", "calls"),
    [
        ({"wrong": 1}, WorkerFailure, "wrong_result: it counted to eleven", 1),
        ({"wrong": 2}, WorkerFailure, "wrong_result: it counted to eleven", 7),
        ({"explode": True}, RuntimeError, "the counter jams", 2),
    ],
    ids=["wrong before", "wrong afterwards", "breaks"],
)
def test_a_probe_that_fails_is_closed(tmp_path, fault, error, text, calls):
    done: list[str] = []
    with pytest.raises(error, match=text):
        measured(tmp_path, calls=done, **fault)
    assert done[calls:] == ["close"]


def test_processor_time_of_the_kernel_is_not_called_other_programs(tmp_path):
    assert "busy_cores" in measured(tmp_path).contention
    during = measured(tmp_path, kernel_works=True).contention
    assert not {"busy_cores", "own_cores", "other_cores"} & set(during)
    assert "load1_before" in during
