"""A run's log of its optimizer and schedule has what the checker of MLPerf HPC asks for."""

import re
from importlib import resources

import pytest

from pytest_mlhpc.node.worker.quality.rules import Logbook, Schedule, hyperparameters, schedule_of

SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0}
LAMB = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_norm": 1.0}

#: Lines of the closed division that the record knows, or the run logs as something else than a hyperparameter.
ELSEWHERE = {
    "global_batch_size", "opt_name", "dropout", "seed", "train_samples", "eval_samples", "eval_error", "eval_accuracy",
    "number_of_nodes", "accelerators_per_node",
}  # fmt: skip


def demanded(*names: str) -> set[str]:
    """Return the keys that the checker asks for exactly once."""
    rules = resources.files("mlperf_logging.compliance_checker").joinpath("hpc_3.0.0")
    text = "".join(rules.joinpath(f"closed_{name}.yaml").read_text() for name in names)
    return set(re.findall(r"NAME:\s*(\w+)\s+REQ:\s+EXACTLY_ONE", text)) - ELSEWHERE


def test_cosmoflow_has_all_that_the_closed_division_asks_for():
    schedule = schedule_of("cosmoflow", {"learning_rate": 1e-3}, batch=512)
    found = hyperparameters("cosmoflow", SGD, schedule, 1024, 1)
    expected = {
        "opt_learning_rate_warmup_epochs": 4, "opt_learning_rate_warmup_factor": 8, "opt_base_learning_rate": 8e-3,
        "opt_learning_rate_decay_boundary_epochs": [32, 64], "opt_learning_rate_decay_factor": [0.25, 0.125],
        "opt_momentum": 0.9, "opt_weight_decay": 0.0,
    }  # fmt: skip
    assert demanded("cosmoflow") <= set(found)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("multistep", ("multistep", "lamb"), {"scheduler_milestones": [199], "scheduler_decay_rate": 0.1}),
        (
            "cosine",
            ("cosine_annealing", "lamb"),
            {"scheduler_type": "cosine_annealing", "scheduler_t_max": 700},
        ),
    ],
)
def test_deepcam_has_all_that_the_closed_division_asks_for(kind, files, expected):
    schedule = Schedule(5.5e-3, kind, "epochs", 2, 0.0, milestones=(4,), factors=(0.1,), length=9, end=0.0)
    found = hyperparameters("deepcam", LAMB, schedule, 100, 2)
    expected |= {"scheduler_lr_warmup_steps": 200, "gradient_accumulation_frequency": 2}
    assert demanded("deepcam", *(f"deepcam_{name}" for name in files)) <= set(found)
    assert {name: found[name] for name in expected} == expected


BY_STEPS = Schedule(1e-3, "multistep", "steps", 50, 5e-4, milestones=(100,), factors=(0.5,))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (hyperparameters("deepcam", LAMB, Schedule(1e-3), 100, 1), {"scheduler_lr_warmup_factor": 1.0}),
        (
            hyperparameters("cosmoflow", SGD, BY_STEPS, 25, 1),
            {"opt_learning_rate_warmup_epochs": 2, "opt_learning_rate_decay_boundary_epochs": [3]},
        ),
        (
            hyperparameters("deepcam", LAMB, BY_STEPS, 25, 1),
            {"opt_lr": 5e-4, "scheduler_lr_warmup_factor": 2, "scheduler_milestones": [49]},
        ),
        (
            hyperparameters("deepcam", LAMB, schedule_of("deepcam", {"learning_rate": 5.5e-3}, 128), 25, 1),
            {
                "opt_lr": 5.5e-3,
                "scheduler_lr_warmup_steps": 400,
                "scheduler_lr_warmup_factor": 1,
                "scheduler_milestones": [800],
            },
        ),
    ],
    ids=[
        "the factor of no warm-up",
        "steps as epochs where the rules count those",
        "its start",
        "the reference's words",
    ],
)
def test_a_schedule_is_logged_by(found, expected):
    assert {name: found[name] for name in expected} == expected


def test_one_rank_keeps_the_log_and_all_know_the_time():
    one, other = Logbook(keeps=True), Logbook(keeps=False)
    times = [book.note("run_start", None, status="x") for book in (one, other)]
    assert [event.time_ns for event in one.events] == times[:1]
    assert one.events[0].metadata == {"status": "x"}
    assert other.events == ()
