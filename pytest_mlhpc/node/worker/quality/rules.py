"""The rules of a run to a quality target: what was asked for, the schedule of the learning rate, events in MLPerf's terms. No torch."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RunEvent
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields import quality as fields

#: Workload -> what is measured, its better direction, and the target of its benchmark.
#:
#: cosmoflow, deepcam: MLPerf HPC v3.0 (mlcommons/training_policies, ``hpc_training_rules.adoc``). resnet50: MLPerf Training
#: until v4.0. language_model: log-perplexity of Llama 3.1 8B in MLPerf Training v5.1, for its own tokens: for bytes it is
#: an easy one.
TARGETS: Mapping[str, Tuple[str, str, float]] = {
    "cosmoflow": ("eval_error", "lower", 0.124),
    "deepcam": ("eval_accuracy", "higher", 0.82),
    "resnet50": ("eval_accuracy", "higher", 0.759),
    "language_model": ("eval_error", "lower", 3.3),
}

#: Workload -> training epochs between evaluations where it is not 1 (MLPerf Training rules for ResNet-50).
_EVERY = {"resnet50": 4}

#: Share of the run's time limit in which the target must be reached: failing with the curve beats being killed.
_SHARE_OF_LIMIT = 0.9

#: Files that one rank copies at a time: parallel file systems answer one file slowly and several at once.
_STAGING_WORKERS = 4


@dataclass(frozen=True)
class QualityTarget:
    """A quality to reach: ``key`` is its word in MLPerf's logs, eval_error or eval_accuracy."""

    key: str
    better: str
    value: float

    def reached(self, quality: float) -> bool:
        """Whether *quality* is as good as the target, or better."""
        return quality <= self.value if self.better == "lower" else quality >= self.value


@dataclass(frozen=True)
class Staging:
    """How samples get to the node: ``how`` is files or archives, ``share`` all or node."""

    how: str
    path: str
    share: str
    workers: int


@dataclass(frozen=True)
class QualitySettings:
    """All of it. ``train_samples`` and ``eval_samples`` None: as many as the set has."""

    target: QualityTarget
    max_epochs: int
    max_seconds: float
    every: int
    train_samples: Optional[int]
    eval_samples: Optional[int]
    staging: Optional[Staging]
    whole: bool = True  #: whether these samples must be there; of a node's share of archives nobody knows how many it has

    @property
    def by_node(self) -> bool:
        """Whether each node has a share of the samples only."""
        return self.staging is not None and self.staging.share == "node"

    def of_share(self, nodes: int) -> QualitySettings:
        """Return what is asked of the share of one of so many nodes; of one node all of it."""
        if nodes == 1:
            return self
        train, evaluated = (
            None if wanted is None else -(-wanted // nodes)
            for wanted in (self.train_samples, self.eval_samples)
        )
        return dataclasses.replace(self, train_samples=train, eval_samples=evaluated, whole=False)


def settings_of(run: RunPlan) -> QualitySettings:
    """Return what *run* asks for.

    Raises:
        WorkerFailure: ``not_supported``, nobody has said what the quality of this workload is.
    """
    parameters = run.parameters
    if run.workload not in TARGETS:
        text = f"{run.workload} has no measure of quality; until='quality' is for {', '.join(TARGETS)}"
        raise WorkerFailure("not_supported", text)
    own = QualityTarget(*TARGETS[run.workload])
    asked = parameters.get("target")
    made = run.data_path is None
    train, evaluated = parameters.get("train_samples"), parameters.get("eval_samples")
    return QualitySettings(
        target=own if asked is None else QualityTarget(own.key, own.better, float(asked)),
        max_epochs=int(parameters.get("max_epochs") or fields.MAX_EPOCHS),
        max_seconds=float(parameters.get("max_seconds") or _SHARE_OF_LIMIT * run.time_limit_s),
        every=int(parameters.get("evaluate_every") or _EVERY.get(run.workload, 1)),
        train_samples=int(train or fields.MADE_TRAINING) if made or train else None,
        eval_samples=int(evaluated or fields.MADE_EVALUATION) if made or evaluated else None,
        staging=_staging(parameters),
    )


def _staging(parameters: Mapping[str, Any]) -> Optional[Staging]:
    if parameters.get("staging") is None:
        return None
    return Staging(
        how=str(parameters["staging"]),
        path=str(parameters.get("staging_path") or "$TMPDIR"),
        share=str(parameters.get("staging_share") or "all"),
        workers=int(parameters.get("staging_workers") or _STAGING_WORKERS),
    )


#: Key of a run's event that names one of the ``departures`` of its schedule.
DEPARTURE = "schedule_departure"


@dataclass(frozen=True)
class Schedule:
    """What the module's text says; ``rate`` is the full one, ``end`` and ``start`` are absolute rates.

    ``start`` None: a warm-up from zero that is counted from its end, as a rate of zero would waste the first step or epoch.
    """

    rate: float
    kind: str = "constant"
    by: str = "epochs"
    warmup: float = 0.0
    start: Optional[float] = None
    milestones: Tuple[float, ...] = ()
    factors: Tuple[float, ...] = ()
    length: float = 0.0
    end: float = 0.0
    power: float = 2.0

    def at(self, step: int, steps_per_epoch: int) -> float:
        """Return the rate of step *step* of the whole run, the first being 0."""
        place = float(step if self.by == "steps" else step // steps_per_epoch)
        if place < self.warmup:
            return self._rising(place)
        full = self.full
        if self.kind == "multistep":
            passed = [
                factor for milestone, factor in zip(self.milestones, self.factors) if place >= milestone
            ]
            return full * (passed[-1] if passed else 1.0)
        if self.kind in ("cosine", "poly"):
            progress = min(1.0, (place - self.warmup) / (self.length - self.warmup))
            left = (
                (1 + math.cos(math.pi * progress)) / 2
                if self.kind == "cosine"
                else (1 - progress) ** self.power
            )
            return self.end + (full - self.end) * left
        return full

    def _rising(self, place: float) -> float:
        if self.start is None:
            return self.rate * min(1.0, (place + 1) / self.warmup)
        return self.start + place / self.warmup * (self.rate - self.start)

    @property
    def full(self) -> float:
        """Return the rate after warm-up.

        DeepCAM's reference (``MultiStepLRWarmup``, ``CosineAnnealingLRWarmup``) keeps that of the last step of warm-up, which
        is one step short of ``rate``: 0.00548625 after 400 steps to 0.0055.
        """
        if self.by == "steps" and self.warmup and self.start is not None:
            return self._rising(math.ceil(self.warmup) - 1)
        return self.rate


#: Workload -> schedule of its reference, as a test would write it.
#:
#: cosmoflow: mlcommons/hpc, ``cosmoflow/configs/cosmo.yaml`` and ``utils/optimizers.py``: four epochs of warm-up from the
#: rate of a batch of 64, a quarter from epoch 33 on, an eighth from 65 (its rule is ``boundary < epoch``). deepcam: the same,
#: ``deepcam/src/deepCam/run_scripts/run_training.sh`` (400 steps of warm-up from zero, milestone 800) and
#: ``utils/schedulers.py``, which counts milestones from the end of warm-up and decays one step later: 400 + 800 + 1.
#: resnet50: mlcommons/training, ``retired_benchmarks/resnet-tf2``: polynomial of power 2, to 1e-4 in 37 epochs of which two
#: warm up. language_model: linear warm-up, cosine to a tenth (Llama 3, arXiv 2407.21783, section 3.4.1), shortened.
REFERENCES: Mapping[str, Mapping[str, Any]] = {
    "cosmoflow": {
        "kind": "multistep", "warmup": 4, "base_batch": 64, "milestones": (33, 65), "factors": (0.25, 0.125),
    },
    "deepcam": {"kind": "multistep", "by": "steps", "warmup": 400, "warmup_factor": 1, "milestones": (1201,),
                "factors": (0.1,)},
    "resnet50": {"kind": "poly", "warmup": 2, "length": 37, "end": 1e-4, "power": 2.0},
    "language_model": {"kind": "cosine", "by": "steps", "warmup": 100, "length": 10_000, "end": "rate/10"},
}  # fmt: skip


def schedule_of(workload: str, parameters: Mapping[str, Any], batch: int) -> Schedule:
    """Return the schedule that *parameters* name, or the reference's of *workload* for *batch* samples in a step.

    The field ``learning_rate`` is the full rate; with ``base_batch`` it is that of so many samples, from which the rate rises
    in warm-up in proportion to *batch*. A ``warmup_factor`` of 1 starts at zero, as DeepCAM's reference does; another one at
    the full rate over it.
    """
    rate = float(parameters["learning_rate"])
    given: Optional[Mapping[str, Any]] = parameters.get("schedule")
    values = dict(REFERENCES.get(workload, {}) if given is None else given)
    base, factor = values.pop("base_batch", None), values.pop("warmup_factor", None)
    start = None if not factor else 0.0 if factor == 1 else rate / factor
    if base:
        rate, start = rate * batch / base, rate
    if values.get("end") == "rate/10":
        values["end"] = rate / 10
    for name in ("milestones", "factors"):
        values[name] = tuple(float(value) for value in values.get(name, ()))
    return Schedule(rate=rate, start=start, **values)


def departures(workload: str, schedule: Schedule) -> List[str]:
    """Return how *schedule* differs from all that the MLPerf reference of *workload* can be set to; nothing without one."""
    if workload == "cosmoflow":
        return _beyond_cosmoflow(schedule)
    return _beyond_deepcam(schedule) if workload == "deepcam" else []


def _beyond_cosmoflow(schedule: Schedule) -> List[str]:
    texts = []
    if schedule.kind not in ("constant", "multistep"):
        texts.append(f"a {schedule.kind} schedule; the reference decays at boundaries")
    if schedule.by == "steps" and (schedule.warmup or schedule.kind != "constant"):
        texts.append(
            "the learning rate changes at single steps; the reference changes it between training epochs"
        )
    if schedule.warmup and not schedule.start:
        texts.append("warm-up from zero; the reference starts at the rate of its base batch size")
    return texts


def _beyond_deepcam(schedule: Schedule) -> List[str]:
    texts = []
    if schedule.kind not in ("multistep", "cosine"):
        texts.append(f"a {schedule.kind} schedule; the reference has multistep and cosine_annealing")
    if schedule.by == "epochs" and (schedule.warmup or schedule.kind != "multistep"):
        texts.append(
            "the learning rate changes between training epochs; the reference changes it at every step"
        )
    if schedule.warmup and schedule.start is None:
        texts.append(
            "warm-up counts from its end; the reference's first step has a learning rate of zero: warmup_factor=1"
        )
    factors, first = schedule.factors, schedule.factors[:1]
    if not all(math.isclose(factor, first[0] ** power) for power, factor in enumerate(factors, 1)):
        texts.append(
            f"factors {list(factors)}; the reference multiplies by one decay rate at every milestone"
        )
    if schedule.warmup and any(place <= schedule.warmup for place in schedule.milestones):
        texts.append("a milestone within warm-up; the reference counts milestones from its end")
    return texts


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
        self._events: List[RunEvent] = []

    def note(self, key: str, value: Any = None, **metadata: Any) -> int:
        """Note that *key* happened now, and return the time (ns UTC)."""
        now = time.time_ns()
        if self._keeps:
            self._events.append(RunEvent(key, now, value, metadata))
        return now

    def facts(self, values: Mapping[str, Any]) -> None:
        """Note several values at once."""
        for key, value in values.items():
            self.note(key, value)

    @property
    def events(self) -> Tuple[RunEvent, ...]:
        """All that happened, in order."""
        return tuple(self._events)


def hyperparameters(
    workload: str, optimizer: Mapping[str, Any], schedule: Schedule, steps_per_epoch: int, accumulate: int
) -> Dict[str, Any]:
    """Return what the rules of *workload* demand to know of its optimizer and schedule; nothing for workloads without such rules.

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
        "batchnorm_group_size": 1,  # unless the field batch_norm_group says otherwise
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
