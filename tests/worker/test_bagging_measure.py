"""Ensembles on real ranks: what is measured, and what becomes of base models that really die."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

pytest.importorskip("torch")

from probe_ranks import Ranks, free_port
from rank_helpers import Batch, run_plan, start_rank

from pytest_mlhpc.results.combine import combine
from pytest_mlhpc.worker.bagging.bootstrap import seed_of

pytestmark = pytest.mark.servers


def bagging(models: int, each: int, **parameters):
    return run_plan(
        ranks=models * each,
        parameters={"global_batch": 8 * models * each, "seed": 3, "bagging": [models, each], **parameters},
        variables={"MLHPC_WORKLOAD_MODULE": "bagging_workload"},
        time_limit_s=300.0,
    )


@pytest.fixture
def ranks(tmp_path):
    """Do a run with all its ranks on this machine, and wait for their end: each starts a process that imports torch."""

    def do(run):
        port = str(free_port())
        with Batch(str(tmp_path / "channel")) as batch:
            started = [
                start_rank(
                    batch, run, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.ranks),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                )
                for rank in range(run.ranks)
            ]  # fmt: skip
            ended = []
            try:
                for process in started:
                    output, _ = process.communicate(timeout=280)
                    ended.append((process.returncode, output.decode()))
            finally:
                for process in started:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.communicate()
            return Ranks(run, batch, ended)

    return do


def reports(done):
    assert [code for code, _ in done.ended] == [0] * done.run.ranks, done.ended
    return sorted(done.batch.reports(), key=lambda report: report.rank)


def test_base_models_are_measured_together(ranks):
    run = bagging(2, 1)

    told = reports(ranks(run))
    measurement = combine(run, told)

    assert [report.rank for report in told] == [0, 1]
    assert [report.samples for report in told] == [12 * 8] * 2
    slowest = max(report.epoch_s for report in told)
    assert measurement.metric("effective_throughput").value == pytest.approx(12 * 16 / slowest)
    assert measurement.metric("base_models").value == 2
    assert measurement.metric("base_models_failed").value == 0
    assert told[0].losses != told[1].losses  # base models differ in weights and samples
    alone = measurement.metric("base_model_quality")
    assert len(alone.samples) == 2
    # Squared error is convex: that of the mean is never above the mean one.
    assert measurement.metric("ensemble_quality").value < alone.value


def test_an_ensemble_can_be_had_again_from_its_seed(ranks, tmp_path):
    run = bagging(1, 1)
    first = combine(run, reports(ranks(run)))
    (tmp_path / "channel").unlink()
    again = combine(run, reports(ranks(run)))

    for name in ("ensemble_quality", "base_model_quality", "distinct_samples", "loss"):
        assert first.metric(name) == again.metric(name)
    assert first.metric("ensemble_quality").value == first.metric("base_model_quality").value
    assert 0.4 < first.metric("distinct_samples").value < 0.9


def test_a_base_model_that_is_killed_is_named_and_the_others_count(ranks):
    run = bagging(2, 1, victim=0, death="killed")

    done = ranks(run)
    told = reports(done)
    measurement = combine(run, told)

    assert told[0].failed.startswith(
        "base model 0 failed: worker_killed: the process that trained it was killed by"
    )
    assert told[1].failed is None
    assert measurement.metric("base_models").value == measurement.metric("base_models_failed").value == 1
    assert measurement.samples == 12 * 8
    assert measurement.ranks == measurement.devices == 2
    assert measurement.environment
    assert measurement.metric("ensemble_quality").value == measurement.metric("base_model_quality").value
    (event,) = told[1].events
    assert (event.key, event.metadata) == ("base_model_failed", {"base_model": 0, "outcome": "worker_killed"})
    assert any("base model 0 failed: worker_killed" in output for _, output in done.ended)


@pytest.mark.slow
def test_ranks_of_a_base_model_train_it_together(ranks):
    run = bagging(2, 2)

    told = reports(ranks(run))
    measurement = combine(run, told)

    assert [report.rank for report in told] == [0, 1, 2, 3]
    assert measurement.samples == 12 * 32
    assert measurement.metric("exposed_communication_time") is not None
    assert len(measurement.metric("base_model_quality").samples) == 2
    assert measurement.metric("ensemble_quality").value < measurement.metric("base_model_quality").value


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
    run = bagging(2, 2, victim=1, death=death, dies_at=8)  # within the timed window

    told = reports(ranks(run))
    measurement = combine(run, told)

    assert [report.failed is None for report in told] == [True, True, False, False]
    assert f"base model 1 failed: {outcome}" in told[2].failed
    assert text in told[2].failed
    assert measurement.samples == 12 * 16
    assert measurement.metric("base_models_failed").value == 1


def test_a_run_whose_base_models_all_fail_has_failed_by_that_name(ranks):
    (failure,) = ranks(bagging(1, 1, nan=True)).batch.of("failed")

    assert failure["outcome"] == "loss_nan"
    assert failure["text"].startswith("all 1 base models failed, the first: the loss of step 0 is nan")


def test_ranks_that_are_no_m_times_p_are_refused(ranks):
    run = dataclasses.replace(bagging(2, 1), ranks=1)

    (failure,) = ranks(run).batch.of("failed")

    assert failure == {"outcome": "worker_exit", "text": "bagging=(2, 1) is 2 ranks, 1 were started"}


def test_base_model_0_has_the_seed_of_the_run():
    assert seed_of(3, 0) == 3
    assert len({seed_of(3, model) for model in range(1000)}) == 1000
