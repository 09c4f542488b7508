"""What a run tells of its optimizer and schedule is what the checker of MLPerf HPC asks for."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from pytest_mlhpc.worker.quality.logbook import Logbook, hyperparameters
from pytest_mlhpc.worker.quality.schedule import Schedule, schedule_of

SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0}
LAMB = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_norm": 1.0}

#: Lines of the closed division that the record knows, or the run tells as something else than a hyperparameter.
ELSEWHERE = {
    "global_batch_size", "opt_name", "dropout", "seed", "train_samples", "eval_samples", "eval_error", "eval_accuracy",
    "number_of_nodes", "accelerators_per_node",
}  # fmt: skip


def demanded(*names: str) -> set[str]:
    """Return the keys that the checker wants exactly once."""
    rules = resources.files("mlperf_logging.compliance_checker").joinpath("hpc_3.0.0")
    text = "".join(rules.joinpath(f"closed_{name}.yaml").read_text() for name in names)
    return set(re.findall(r"NAME:\s*(\w+)\s+REQ:\s+EXACTLY_ONE", text)) - ELSEWHERE


def test_cosmoflow_tells_all_that_the_closed_division_wants():
    schedule = schedule_of("cosmoflow", {"learning_rate": 8e-3}, batch=512)
    told = hyperparameters("cosmoflow", SGD, schedule, 1024, 1)
    assert demanded("cosmoflow") <= set(told)
    assert told["opt_learning_rate_warmup_epochs"] == 4
    assert told["opt_learning_rate_warmup_factor"] == 8
    assert told["opt_learning_rate_decay_boundary_epochs"] == [32, 64]
    assert told["opt_learning_rate_decay_factor"] == [0.25, 0.125]
    assert (told["opt_base_learning_rate"], told["opt_momentum"], told["opt_weight_decay"]) == (
        8e-3,
        0.9,
        0.0,
    )


@pytest.mark.parametrize(
    ("kind", "files"), [("multistep", ("multistep", "lamb")), ("cosine", ("cosine_annealing", "lamb"))]
)
def test_deepcam_tells_all_that_the_closed_division_wants(kind, files):
    schedule = Schedule(5.5e-3, kind, "epochs", 2, 1, milestones=(4,), factors=(0.1,), length=9, end=0.0)
    told = hyperparameters("deepcam", LAMB, schedule, 100, 2)
    assert demanded("deepcam", *(f"deepcam_{name}" for name in files)) <= set(told)
    assert (told["scheduler_lr_warmup_steps"], told["gradient_accumulation_frequency"]) == (200, 2)
    if kind == "multistep":
        assert (told["scheduler_milestones"], told["scheduler_decay_rate"]) == ([400], 0.1)
    else:
        assert (told["scheduler_type"], told["scheduler_t_max"]) == ("cosine_annealing", 900)


def test_a_schedule_without_warm_up_has_the_factor_of_none():
    assert hyperparameters("deepcam", LAMB, Schedule(1e-3), 100, 1)["scheduler_lr_warmup_factor"] == 1.0


def test_steps_are_told_as_epochs_where_the_rules_count_those():
    schedule = Schedule(1e-3, "multistep", "steps", 50, 1, milestones=(100,), factors=(0.5,))
    told = hyperparameters("cosmoflow", SGD, schedule, 25, 1)
    assert told["opt_learning_rate_warmup_epochs"] == 2
    assert told["opt_learning_rate_decay_boundary_epochs"] == [4]


def test_one_rank_keeps_the_log_and_all_know_the_time():
    one, other = Logbook(keeps=True), Logbook(keeps=False)
    times = [book.note("run_start", None, status="x") for book in (one, other)]
    assert [event.time_ns for event in one.events] == times[:1]
    assert one.events[0].metadata == {"status": "x"}
    assert other.events == ()
