"""Real trainings to a target: what is reached, what it took, and what is told of it."""

import dataclasses

import pytest
from quality_runs import figures, make_small_set, plan, trained, values

from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.quality import datasets, measure
from pytest_mlhpc.node.worker.rank import measure_of

pytestmark = pytest.mark.servers

#: Two steps, for what does not depend on how well they train.
FEW = {"train_samples": 16, "eval_samples": 4}


@pytest.mark.parametrize(
    ("workload", "key", "target"),
    [
        ("cosmoflow", "eval_error", 0.124), ("deepcam", "eval_accuracy", 0.82), ("language_model", "eval_error", 3.3),
        pytest.param("resnet50", "eval_accuracy", 0.759, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_small_model_reaches_the_benchmarks_own_target(tmp_path, workload, key, target):
    run = plan(workload)
    found = trained(run, tmp_path)
    quality = values(found, key)
    assert values(found, "quality_target") == [target]
    assert (quality[-1] >= target) if key == "eval_accuracy" else (quality[-1] <= target)
    figure = figures(found)
    assert figure["quality"] == quality[-1]
    assert figure["epochs"] == len(quality) == len(values(found, "epoch_stop"))
    assert figure["time_to_train"] >= figure["training_time"] + figure["evaluation_time"]
    assert figure["staging_time"] == 0
    batch, samples = run.parameters["global_batch"], run.parameters["train_samples"]
    assert found.steps == figure["epochs"] * (samples // batch)
    assert found.samples == found.steps * batch
    assert figure["loss"] > 0
    kind = "real" if workload == "language_model" else "synthetic"
    assert (found.data_source, found.data_kind) == ("files", kind)


@pytest.fixture(scope="session")
def record(tmp_path_factory):
    """Return what a training of few steps left."""
    return trained(plan(target=0.9, **FEW), tmp_path_factory.mktemp("few"))


def test_events_tell_the_run_in_the_order_of_the_rules(record):
    events = record.per_rank[0].events
    keys = [event.key for event in events]
    phases = [key for key in keys if key.endswith(("_start", "_stop"))]
    assert phases[:5] == ["init_start", "init_stop", "run_start", "epoch_start", "epoch_stop"]
    assert phases[-3:] == ["eval_start", "eval_stop", "run_stop"]
    assert keys.index("run_start") < keys.index("train_samples")
    assert (values(record, "train_samples"), values(record, "eval_samples")) == ([16], [4])
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    start, stop = (events[keys.index(key)] for key in ("run_start", "run_stop"))
    assert stop.metadata["status"] == "success"
    assert (record.started_ns, record.ended_ns) == (start.time_ns, stop.time_ns)
    for event in events:
        if event.key.startswith(("epoch_", "eval_")) and event.key != "eval_samples":
            assert event.metadata["epoch_num"] >= 1


def test_equal_seeds_reach_equal_quality(record, tmp_path):
    again = trained(plan(target=0.9, **FEW), tmp_path)
    assert values(again, "eval_error") == values(record, "eval_error")
    assert again.metric("loss").samples == record.metric("loss").samples


@pytest.mark.parametrize(
    ("workload", "fields", "text"),
    [
        (
            "cosmoflow",
            {"target": 0.0001, "max_epochs": 3, "evaluate_every": 2},
            r".* after 3 .* \(6 steps, .* at most 0\.0001; the best was 0\..*the last: [^,]*,[^,]*\. Ended by max_epochs",
        ),
        (
            "cosmoflow",
            {"target": 0.0001, "max_seconds": 0.001, "evaluate_every": 5},
            r".*after 1 training epochs .*Ended by max_seconds=0\.001",
        ),
        (
            "resnet50",
            {"global_batch": 8, "eval_samples": 8, "learning_rate": 1e-6, "max_epochs": 1},
            r"eval_accuracy is 0\..* after 1 training epochs \(2 steps, .* at least 0\.759; the best was 0\.",
        ),
    ],
    ids=["all epochs are over", "the time is over", "of right answers there are too few"],
)
def test_a_missed_target_is_a_failure_that_says_what_was_reached_when(tmp_path, workload, fields, text):
    with pytest.raises(WorkerFailure, match=f"^target_missed: {text}"):
        trained(plan(workload, **{**FEW, **fields}), tmp_path)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "^data_exhausted: .*4 samples are less than one step of 8 on 1 ranks: use more data or a smaller global_batch"),
        ({"train_samples": 64, "eval_samples": 2}, "holds 4 samples, 64 were asked for"),
        ({"global_batch": 2}, "has no samples for evaluation: expected a folder validation or val"),
    ],
    ids=["less than one step", "less than asked for", "none for evaluation"],
)  # fmt: skip
def test_less_data_than_a_run_needs_is_named(tmp_path, fields, text):
    root = make_small_set(tmp_path / "small", 4, 2)
    if "global_batch" in fields:
        (root / "validation").rename(root / "other")
    fields = {"train_samples": None, "eval_samples": None, **fields}
    with pytest.raises(WorkerFailure, match=text):
        trained(plan(changes={"data_path": str(root), "data_kind": "real"}, **fields), tmp_path)


def test_a_run_names_what_its_schedule_has_beyond_the_reference(tmp_path):
    found = trained(plan(**FEW, target=0.9, schedule={"kind": "poly", "length": 9}), tmp_path)
    assert values(found, "schedule_departure") == ["a poly schedule; the reference decays at boundaries"]


def test_evaluation_samples_count_once_each_also_in_an_incomplete_batch(tmp_path):
    found = trained(plan(target=0.5, eval_samples=11, train_samples=16), tmp_path)
    assert values(found, "eval_samples") == [11]
    assert figures(found)["epochs"] == 1


def test_a_workload_without_a_measure_of_quality_is_refused():
    text = "not_supported: mine has no measure of quality; until='quality' is for cosmoflow"
    with pytest.raises(WorkerFailure, match=text):
        measure.settings_of(dataclasses.replace(plan(), workload="mine"))


def test_data_that_do_not_leave_the_cache_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "cool", lambda _paths: "warm")
    text = "is in the page cache of this node and does not leave it.* use a copy on a disk"
    with pytest.raises(WorkerFailure, match=text):
        trained(plan(train_samples=8, eval_samples=2), tmp_path)


def test_the_mode_is_chosen_by_the_field():
    assert measure_of(plan()) is measure.measure
