"""Ensembles on real ranks: what is measured, and what becomes of base models that really die."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
from probe_ranks import alone, run_ranks
from rank_helpers import HERE, ROOT, run_plan

from pytest_mlhpc.node.worker import ensemble_process, loop
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.ensemble import BaseModelPlace, seed_of
from pytest_mlhpc.node.worker.ensemble_rank import EnsembleGroups, HeldOutPredictions, figures_of, measure
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers


def bagging(models: int, each: int, **parameters):
    return run_plan(
        ranks=models * each,
        parameters={"global_batch": 8 * models * each, "seed": 3, "bagging": [models, each], **parameters},
        variables={"MLHPC_WORKLOAD_MODULE": "bagging_workload"},
        time_limit_s=300.0,
    )


def reports(finished):
    return sorted(finished.batch.reports(), key=lambda report: report.rank)


@pytest.fixture(scope="session")
def ensemble(rank_server, tmp_path_factory):
    """Three base models, of which the first is killed."""
    run = bagging(3, 1, victim=0, death="killed")
    return run_ranks(rank_server, tmp_path_factory.mktemp("ensemble"), run)


def test_base_models_are_measured_together(ensemble):
    measurement, (_, first, second) = ensemble.measurement, reports(ensemble)

    assert [(one.rank, one.samples) for one in (first, second)] == [(1, 12 * 8), (2, 12 * 8)]
    rate = 12 * 16 / max(first.epoch_s, second.epoch_s)
    assert measurement.metric("effective_throughput").value == pytest.approx(rate)
    assert first.losses != second.losses  # base models differ in weights and samples
    alone = measurement.metric("base_model_quality")
    assert len(alone.samples) == 2
    # Squared error is convex: that of the mean is never above the mean one.
    assert measurement.metric("ensemble_quality").value < alone.value


def test_a_base_model_that_is_killed_is_named_and_the_others_count(ensemble):
    measurement, (killed, first, second) = ensemble.measurement, reports(ensemble)

    text = "base model 0 failed: worker_killed: the process that trained it was killed by"
    assert killed.failed.startswith(text)
    assert first.failed is second.failed is None
    assert [measurement.metric(f"base_models{ended}").value for ended in ("", "_failed")] == [2, 1]
    assert (measurement.samples, measurement.ranks, measurement.devices) == (12 * 16, 3, 3)
    assert measurement.environment
    (event,) = first.events
    assert (event.key, event.metadata) == ("base_model_failed", {"base_model": 0, "outcome": "worker_killed"})
    assert any("base model 0 failed: worker_killed" in output for _, output in ensemble.ended)


def figures_of_one(folder):
    """Train one base model in this process, and return the figures of an ensemble of it alone, and its losses."""
    run, sent = bagging(1, 1), {}
    teller = SimpleNamespace(say=lambda kind, body=None, tensors=None: sent.update({kind: (body, tensors)}))
    orders = SimpleNamespace(go=threading.Event())
    orders.go.set()
    ensemble_process._train(
        ensemble_process.job_of(run, 1, BaseModelPlace(0, 0), 0, folder), 3, teller, orders
    )
    body, tensors = sent["predictions"]
    groups = EnsembleGroups(run, Group(), 1)
    figures = figures_of(run, groups, HeldOutPredictions(*tensors, body["distinct"]), {})
    return {figure.name: figure.value for figure in figures}, sent["report"][0]["losses"]


def test_a_base_model_tells_its_progress_and_why_it_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "PROGRESS_NS", 0)  # as steps that take a second each
    said = []
    teller = SimpleNamespace(say=lambda kind, body=None, tensors=None: said.append((kind, body)))
    orders = SimpleNamespace(go=threading.Event())
    orders.go.set()
    run = dataclasses.replace(bagging(1, 1), usual_s=1e-9)
    ensemble_process._train(
        ensemble_process.job_of(run, 1, BaseModelPlace(0, 0), 0, tmp_path), 3, teller, orders
    )
    step, steps, rate, late = [body for kind, body in said if kind == "progress"][-1]
    assert (step, steps, rate > 0) == (12, 12, True)
    assert late["elapsed_s"] > late["usual_s"]


def test_an_ensemble_can_be_had_again_from_its_seed(tmp_path):
    figures, losses = figures_of_one(tmp_path)
    assert (figures, losses) == figures_of_one(tmp_path)
    assert figures["ensemble_quality"] == figures["base_model_quality"]
    assert 0.4 < figures["distinct_samples"] < 0.9
    assert figures["base_models"] == 1


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (bagging(1, 1, nan=True), "loss_nan: all 1 base models failed, the first: the loss of step 0 is nan"),
        (
            dataclasses.replace(bagging(2, 1), ranks=1),
            r"worker_exit: bagging=\(2, 1\) is 2 ranks, 1 were started$",
        ),
    ],
    ids=["all base models fail", "ranks are not M x P"],
)
def test_a_run_fails_by_its_name_when(tmp_path, monkeypatch, run, text):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HERE}")
    with pytest.raises(WorkerFailure, match=f"^{text}"):
        alone(measure, run, tmp_path)


@pytest.mark.slow
def test_ranks_of_a_base_model_train_it_together(ranks):
    finished = ranks(bagging(2, 2))
    measurement = finished.measurement

    assert [report.rank for report in reports(finished)] == [0, 1, 2, 3]
    assert measurement.samples == 12 * 32
    assert measurement.metric("exposed_communication_time") is not None
    assert len(measurement.metric("base_model_quality").samples) == 2
    assert measurement.metric("ensemble_quality").value < measurement.metric("base_model_quality").value


@pytest.mark.slow
def test_base_models_that_are_sharded_over_their_ranks_learn_and_predict_as_replicas_do(ranks):
    sharded = ranks(bagging(2, 2, parallel={"replicate": 1, "shard": 2}))
    replicated = ranks(bagging(2, 2, parallel={"replicate": 2, "shard": 1}))

    losses = [[report.losses for report in reports(one)] for one in (sharded, replicated)]
    assert losses[0] == [pytest.approx(of_a_rank, rel=1e-5) for of_a_rank in losses[1]]
    for name in ("ensemble_quality", "base_model_quality", "distinct_samples"):
        found, wanted = (one.measurement.metric(name).value for one in (sharded, replicated))
        assert found == pytest.approx(wanted, rel=1e-5), name
    exchanged = [
        {metric.name for metric in one.measurement.metrics if metric.name.endswith("_bytes")}
        for one in (sharded, replicated)
    ]
    assert exchanged == [{"all_gather_bytes", "reduce_scatter_bytes"}, {"all_reduce_bytes"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "outcome", "text"),
    [
        ("killed", "worker_killed", "was killed by SIGKILL"),
        ("exits", "worker_exit", "ended with exit code 3"),
        ("raises", "worker_exit", "the device caught fire"),
    ],
)
def test_a_base_model_of_several_ranks_that_dies_is_named(ranks, death, outcome, text):
    finished = ranks(bagging(2, 2, victim=1, death=death, dies_at=8))  # within the timed window
    measurement, failures = finished.measurement, [report.failed for report in reports(finished)]

    assert [failure is None for failure in failures] == [True, True, False, False]
    assert f"base model 1 failed: {outcome}" in failures[2]
    assert text in failures[2]
    assert measurement.samples == 12 * 16
    assert measurement.metric("base_models_failed").value == 1


def test_base_model_0_has_the_seed_of_the_run():
    assert seed_of(3, 0) == 3
    assert len({seed_of(3, model) for model in range(1000)}) == 1000
