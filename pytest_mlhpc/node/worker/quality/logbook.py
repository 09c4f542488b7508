"""PAYLOAD, no torch. What happened when, in the words of MLPerf's logs: events of rank 0, and the facts that rules ask for."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.protocol.schema import Event
from pytest_mlhpc.node.worker.quality.schedule import Schedule

#: Kind of schedule -> its word in DeepCAM's logs (mlperf-logging, ``closed_deepcam.yaml``).
_SCHEDULER = {
    "multistep": "multistep",
    "cosine": "cosine_annealing",
    "constant": "constant",
    "poly": "polynomial",
}


class Logbook:
    """Collects events. All but rank 0 keep none, as one log tells of one run."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._events: List[Event] = []

    def note(self, key: str, value: Any = None, **metadata: Any) -> int:
        """Note that *key* happened now, and return the time (ns UTC)."""
        now = time.time_ns()
        if self._keeps:
            self._events.append(Event(key, now, value, metadata))
        return now

    def facts(self, values: Mapping[str, Any]) -> None:
        """Note several values at once."""
        for key, value in values.items():
            self.note(key, value)

    @property
    def events(self) -> Tuple[Event, ...]:
        """All that happened, in order."""
        return tuple(self._events)


def hyperparameters(
    workload: str, optimizer: Mapping[str, Any], schedule: Schedule, steps_per_epoch: int, accumulate: int
) -> Dict[str, Any]:
    """Return what the rules of *workload* want told of its optimizer and schedule; nothing for workloads without such rules.

    *optimizer* holds the options that it really has (``param_groups``).
    """
    if workload == "cosmoflow":
        return _cosmoflow(optimizer, schedule, steps_per_epoch)
    if workload == "deepcam":
        return _deepcam(optimizer, schedule, steps_per_epoch, accumulate)
    return {"opt_base_learning_rate": schedule.rate}


def _cosmoflow(optimizer: Mapping[str, Any], schedule: Schedule, steps_per_epoch: int) -> Dict[str, Any]:
    per_epoch = 1 if schedule.by == "epochs" else steps_per_epoch
    return {
        "opt_base_learning_rate": schedule.rate,
        "opt_learning_rate_warmup_epochs": schedule.warmup / per_epoch,
        "opt_learning_rate_warmup_factor": schedule.rate / schedule.start if schedule.start else 1.0,
        # the reference's boundary is the last epoch with the rate before
        "opt_learning_rate_decay_boundary_epochs": [place / per_epoch - 1 for place in schedule.milestones],
        "opt_learning_rate_decay_factor": list(schedule.factors),
        "opt_weight_decay": float(optimizer.get("weight_decay", 0.0)),
        **({"opt_momentum": optimizer["momentum"]} if "momentum" in optimizer else {}),
    }


def _deepcam(
    optimizer: Mapping[str, Any], schedule: Schedule, steps_per_epoch: int, accumulate: int
) -> Dict[str, Any]:
    per_step = steps_per_epoch if schedule.by == "epochs" else 1
    warmup = round(schedule.warmup * per_step)
    found: Dict[str, Any] = {
        "opt_lr": schedule.start
        or schedule.rate,  # the reference's start_lr: warm-up multiplies it by its factor
        "opt_weight_decay": float(optimizer.get("weight_decay", 0.0)),
        "scheduler_type": _SCHEDULER[schedule.kind],
        "scheduler_lr_warmup_steps": warmup,
        "scheduler_lr_warmup_factor": schedule.rate / schedule.start if warmup and schedule.start else 1.0,
        "gradient_accumulation_frequency": accumulate,
        "batchnorm_group_size": 1,  # every rank normalises its own micro-batch
    }
    if "betas" in optimizer:
        found.update(opt_betas=list(optimizer["betas"]), opt_eps=optimizer["eps"])
    if "max_norm" in optimizer:  # LAMB, node/worker/workloads/optimizers.py
        found.update(
            opt_max_grad_norm=optimizer["max_norm"], opt_bias_correction=True, opt_grad_averaging=True
        )
    if schedule.kind == "multistep":
        # after warm-up the reference counts from its end, and decays one step later
        before = warmup + 1 if warmup else 0
        found["scheduler_milestones"] = [round(place * per_step) - before for place in schedule.milestones]
        found["scheduler_decay_rate"] = schedule.factors[0]
    if schedule.kind == "cosine":
        found["scheduler_t_max"] = round(schedule.length * per_step) - warmup
        found["scheduler_eta_min"] = schedule.end
    return found
