"""Ensembles that are trained until they reach a quality, on real ranks: rounds, targets that are missed, base models that die."""

import dataclasses
import statistics
import threading
from types import SimpleNamespace

import pytest
from probe_ranks import alone, run_ranks, sabotaged
from quality_runs import figures, plan, values
from rank_helpers import ROOT

from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.worker import ensemble, ensemble_process
from pytest_mlhpc.node.worker.ensemble import BaseModelPlace
from pytest_mlhpc.node.worker.ensemble_rank import measure
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers

#: What the process of the second base model runs first: it is killed as it evaluates its second epoch.
DIES = """
import os, signal
if os.environ.get("MLHPC_BASE_MODEL") == "1" and os.environ.get("LOCAL_RANK", "0") in ("1", "3"):
    from pytest_mlhpc.node.worker.quality import train
    def _evaluated(self, loaders, epoch, *, last, evaluated=train.QualityRun._evaluated):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluated(self, loaders, epoch, last=last)
    train.QualityRun._evaluated = _evaluated
"""


def bagging(models: int, each: int, **fields):
    changes = {"ranks": models * each, "time_limit_s": 600.0}
    asked = {"max_epochs": 24, "global_batch": 8 * models, **fields}
    return plan(changes=changes, bagging=[models, each], **asked)


def check_reached(measurement, models: int) -> None:
    """The ensemble reached its target after some rounds of one epoch each, and every base model ended with them."""
    found, curve = figures(measurement), values(measurement, "eval_error")
    assert found["quality"] == found["ensemble_quality"] == curve[-1] <= 0.124
    assert all(quality > 0.124 for quality in curve[:-1])
    assert found["ensemble_rounds"] == found["epochs"] == len(curve)
    assert 0 < found["evaluation_time"] < found["time_to_train"]
    assert (found["base_models"], found["base_models_failed"]) == (models, 0)
    assert len({report.steps for report in measurement.per_rank}) == 1
    # An absolute error is convex: that of the mean is never above the mean one.
    alone_ = measurement.metric("base_model_quality")
    assert len(alone_.samples) == models
    assert found["ensemble_quality"] <= statistics.mean(alone_.samples)


def test_two_base_models_train_until_their_mean_reaches_the_target(ranks):
    run = bagging(2, 1)
    read_apart = {
        **run.parameters,
        "loader_workers": 1,
    }  # a process that is forked beside the one that hears the rank
    measurement = ranks(dataclasses.replace(run, parameters=read_apart)).measurement
    check_reached(measurement, 2)
    first, second = measurement.per_rank
    assert first.losses != second.losses
    assert 0.4 < figures(measurement)["distinct_samples"] < 0.9
    assert values(measurement, "quality_target") == [0.124]


@pytest.mark.slow
def test_base_models_of_two_ranks_reach_the_target_sharded_as_data_parallel(ranks):
    measured = [
        ranks(bagging(2, 2, eval_samples=9, parallel={"replicate": 2 // n, "shard": n})).measurement
        for n in (1, 2)
    ]
    for one in measured:
        check_reached(one, 2)
        assert one.metric("exposed_communication_time") is not None
    replicated, sharded = (values(one, "eval_error") for one in measured)
    assert sharded == pytest.approx(replicated, rel=1e-3)


@pytest.mark.slow
def test_an_ensemble_of_one_base_model_is_as_good_as_that_and_can_be_had_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = bagging(1, 1, max_epochs=2, target=10.0)
    first, again = (figures(combine(run, [alone(measure, run, tmp_path)])) for _ in range(2))
    assert first["ensemble_quality"] == first["base_model_quality"] == again["ensemble_quality"]
    assert first["ensemble_rounds"] == 1


def test_a_target_that_is_never_reached_is_missed_by_the_ensemble(ranks):
    finished = ranks(bagging(2, 1, max_epochs=3, evaluate_every=2, target=0.001))
    text = finished.failures[0]
    assert text.startswith("target_missed: the ensemble's eval_error is 0."), text
    assert "after 3 training epochs" in text
    assert text.count("Ended by max_epochs") == 1
    shown = text.split("the last: ")[1].split(". Ended")[0]
    assert len(shown.split(", ")) == 2  # after the second epoch, and the last


@pytest.mark.slow
def test_the_time_that_a_target_may_take_ends_all_base_models_in_one_round(ranks):
    finished = ranks(bagging(2, 1, max_seconds=0.001, target=0.001))
    assert "after 1 training epochs" in finished.failures[0]
    assert "Ended by max_seconds=0.001" in finished.failures[0]


@pytest.mark.parametrize(
    "each", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["a base model", "one rank of a base model"]
)
def test_the_others_go_on_to_the_target_without_a_base_model_that_is_killed(rank_server, tmp_path, each):
    run = bagging(2, each, target=0.1)
    finished = run_ranks(rank_server, tmp_path, run, **sabotaged(tmp_path, DIES))
    measurement = finished.measurement
    found, curve = figures(measurement), values(measurement, "eval_error")
    assert (found["base_models"], found["base_models_failed"]) == (1, 1)
    assert len(curve) == found["ensemble_rounds"] > 2
    assert found["ensemble_quality"] == found["base_model_quality"] == curve[-1] <= 0.1
    assert values(measurement, "base_model_failed")
    assert any("base model 1 failed: worker_killed" in output for _, output in finished.ended)


def test_an_evaluation_that_no_rank_has_room_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ensemble, "EVALUATION_BUDGET", 64)
    run = bagging(1, 1)
    teller = SimpleNamespace(say=lambda *_: None)
    orders = SimpleNamespace(go=threading.Event())
    orders.go.set()
    with pytest.raises(
        WorkerFailure, match="no room for its predictions of 16 evaluation samples, but for 4"
    ):
        ensemble_process._train(
            ensemble_process.job_of(run, 1, BaseModelPlace(0, 0), 0, tmp_path), 1, teller, orders
        )
