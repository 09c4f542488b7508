"""PAYLOAD, no torch. The learning rate at every step, after the schedules of the MLPerf references.

A rate rises in a straight line from ``start`` during ``warmup`` and then follows its kind:

* ``constant``: nothing more;
* ``multistep``: the rate times ``factors[i]`` from ``milestones[i]`` on (of the full rate, not of the one before);
* ``cosine``: half a cosine from the full rate at the end of warm-up to ``end`` at ``length``, where it stays;
* ``poly``: ``(1 - progress) ** power`` between the same two.

``by`` says whether ``warmup``, ``milestones`` and ``length`` count training epochs, in which the rate changes only from
one epoch to the next, as CosmoFlow's reference has it, or single steps. All count from 0, the start of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Tuple

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
