"""PAYLOAD, no torch. The learning rate at every step, after the schedules of the MLPerf references.

A rate rises in a straight line from ``rate / warmup_factor`` (from 0 where the factor is 0) during ``warmup`` and then
follows its kind:

* ``constant``: nothing more;
* ``multistep``: the rate times ``factors[i]`` after ``milestones[i]`` (of the full rate, not of the one before);
* ``cosine``: half a cosine from the full rate at the end of warm-up to ``end`` at ``length``;
* ``poly``: ``(1 - progress) ** power`` between the same two.

``by`` says whether ``warmup``, ``milestones`` and ``length`` count training epochs, in which the rate changes only from
one epoch to the next, as CosmoFlow's reference has it, or single steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Schedule:
    """What the module's text says; ``rate`` is the full one (field ``learning_rate``), ``end`` an absolute rate."""

    rate: float
    kind: str = "constant"
    by: str = "epochs"
    warmup: float = 0.0
    warmup_factor: float = 0.0
    milestones: Tuple[float, ...] = ()
    factors: Tuple[float, ...] = ()
    length: float = 0.0
    end: float = 0.0
    power: float = 2.0

    def at(self, step: int, steps_per_epoch: int) -> float:
        """Return the rate of step *step* of the whole run, the first being 0."""
        place = float(step if self.by == "steps" else step // steps_per_epoch)
        if place < self.warmup:
            start = self.rate / self.warmup_factor if self.warmup_factor else 0.0
            # a rate of zero would waste the first step or epoch, so a warm-up from zero is counted from its end
            done = place / self.warmup if start else min(1.0, (place + 1) / self.warmup)
            return start + done * (self.rate - start)
        if self.kind == "multistep":
            passed = [
                factor for milestone, factor in zip(self.milestones, self.factors) if place >= milestone
            ]
            return self.rate * (passed[-1] if passed else 1.0)
        if self.kind in ("cosine", "poly"):
            progress = min(1.0, (place - self.warmup) / (self.length - self.warmup))
            left = (
                (1 + math.cos(math.pi * progress)) / 2
                if self.kind == "cosine"
                else (1 - progress) ** self.power
            )
            return self.end + (self.rate - self.end) * left
        return self.rate


#: Workload -> schedule of its reference.
#:
#: cosmoflow: mlcommons/hpc, ``cosmoflow/configs/cosmo.yaml`` and ``utils/optimizers.py``: four epochs of warm-up from the
#: rate of a batch of 64, a quarter after 32 epochs, an eighth after 64. deepcam: mlcommons/hpc, ``deepcam/README.md``.
#: resnet50: mlcommons/training, ``retired_benchmarks/resnet-tf2``: polynomial of power 2, to 1e-4 in 37 epochs of which two
#: warm up. language_model: linear warm-up, cosine to a tenth (Llama 3, arXiv 2407.21783, section 3.4.1), shortened.
REFERENCES: Mapping[str, Mapping[str, Any]] = {
    "cosmoflow": {
        "kind": "multistep", "warmup": 4, "warmup_factor": "batch/64", "milestones": (32, 64), "factors": (0.25, 0.125),
    },
    "deepcam": {"kind": "multistep", "by": "steps", "warmup": 400, "warmup_factor": 1, "milestones": (800,),
                "factors": (0.1,)},
    "resnet50": {"kind": "poly", "warmup": 2, "length": 37, "end": 1e-4, "power": 2.0},
    "language_model": {"kind": "cosine", "by": "steps", "warmup": 100, "length": 10_000, "end": "rate/10"},
}  # fmt: skip


def schedule_of(workload: str, parameters: Mapping[str, Any], batch: int) -> Schedule:
    """Return the schedule that *parameters* name, or the reference's of *workload* for *batch* samples in a step.

    CosmoFlow's starts at the rate of a batch of 64 and rises in proportion to the batch; a smaller batch starts at the
    full rate.
    """
    rate = float(parameters["learning_rate"])
    given: Optional[Mapping[str, Any]] = parameters.get("schedule")
    values = dict(REFERENCES.get(workload, {}) if given is None else given)
    if values.get("warmup_factor") == "batch/64":
        values["warmup_factor"] = max(1.0, batch / 64)
    if values.get("end") == "rate/10":
        values["end"] = rate / 10
    for name in ("milestones", "factors"):
        values[name] = tuple(float(value) for value in values.get(name, ()))
    return Schedule(rate=rate, **values)
