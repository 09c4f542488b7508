"""Does a device compute what it should? Loss and gradients of one step, against the same step on the CPU in float64.

Both have the same weights and samples; dropout is off, as each device draws its own. What is compared is before any update, so
that no difference can grow from step to step. How much rounding may differ depends on the model more than on the
precision: small batches before a normalisation raise it ten thousand times. So the CPU does the step in the run's precision too, and
the device may be a few times as far from float64 as it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, Mapping, Tuple

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.protocol.schema import Figure, TimedOperation
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import autocast
from pytest_mlhpc.node.worker.probes import measure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace

#: A device may be this many times as far from float64 as a CPU in the same precision: orders of summation differ. Of less than
#: the floor (a few units of the last place of float32) nothing is said.
FACTOR, FLOOR = 4.0, 1e-6

#: What the CPU computes in where it has no such arithmetic: TF32 has as many bits of mantissa as fp16.
_ON_CPU = {"tf32": "fp16"}

#: How far times of equal runs differ where cores are shared.
TOLERANCE = 0.10


class Agreement:
    """One training on this rank alone, and its twin in float64 on the host; neither is ever updated."""

    kernel_works = False

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        self._inside = measure.build(place)
        _without_dropout(self._inside.trainer.model)
        self._expected = _on_cpu(self._inside, "fp64")
        self._errors = (math.nan, math.nan)
        self._bound = float(place.run.parameters.get("bound") or self._usual())
        self.operations: Tuple[TimedOperation, ...] = (
            TimedOperation("gradient", (), (), ("gradient_time",), (), TOLERANCE),
        )

    def _usual(self) -> float:
        precision = self._inside.trainer.precision
        there = max(errors(_on_cpu(self._inside, _ON_CPU.get(precision, precision)), self._expected))
        if not FACTOR * there < 1:
            text = (
                f"in {precision} the gradients of this step are mostly rounding: those of a CPU differ from float64 by "
                f"{there:.2g}, so no device can be judged; use a larger batch or size, or fp32"
            )
            raise WorkerFailure("not_supported", text)
        return FACTOR * max(FLOOR, there)

    def verify(self) -> None:
        """Compare loss and gradients with those in float64.

        Raises:
            WorkerFailure: ``wrong_result``, they differ by more than the precision explains.
        """
        trainer = self._inside.trainer
        trainer.forget()
        loss = trainer.loss(self._inside.inputs, self._inside.targets)
        trainer.backward(loss)
        scale = 1.0 if trainer.scaler is None else float(trainer.scaler.get_scale())
        self._errors = errors(
            StepResult(float(loss.detach()), _gradients_of(trainer.model, scale)), self._expected
        )
        if not all(error <= self._bound for error in self._errors):  # NaN is no agreement either
            text = (
                f"{self._place.accelerator.model} computes a step of {self._inside.run.workload} otherwise than a CPU in float64: the loss differs by "
                f"{self._errors[0]:.2g} of itself, the gradients by {self._errors[1]:.2g}, at most {self._bound:.2g} was expected of "
                f"{trainer.precision}; run it on another device of its kind: if that agrees, this one computes wrongly"
            )
            raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Compute gradients once."""
        return {"gradient": self._place.timed(1, self._inside.gradients)}

    def figures(self) -> Tuple[Figure, ...]:
        """Return how far loss and gradients were from those in float64, each relative to these."""
        return (
            Figure("loss_error", self._errors[0], "1", "none", "max"),
            Figure("gradient_error", self._errors[1], "1", "none", "max"),
        )

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return the samples of a step, and the bound that was met."""
        return {"samples_of_a_step": str(self._inside.batch), "gradient_bound": f"{self._bound:g}"}

    def close(self) -> None:
        """Leave the memory to the end of the process."""


@dataclass(frozen=True)
class StepResult:
    """The loss of one step, and its gradients by parameter, in float64 on the host."""

    loss: float
    gradients: Mapping[str, Tensor]


def errors(found: StepResult, expected: StepResult) -> Tuple[float, float]:
    """Return how far loss and gradients are from what is expected, each relative to it.

    Gradients are taken together, by their norm: single ones that vanish (of a bias before a normalisation) are rounding alone.
    """
    apart = sum(
        float((found.gradients[name] - one).square().sum()) for name, one in expected.gradients.items()
    )
    whole = sum(float(one.square().sum()) for one in expected.gradients.values())
    of_loss = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-30)
    return of_loss, math.sqrt(apart) / max(math.sqrt(whole), 1e-30)


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d, nn.Dropout3d)):
            module.p = 0.0


def _gradients_of(model: nn.Module, scale: float = 1.0) -> Dict[str, Tensor]:
    return {
        name: parameter.grad.detach().to("cpu", torch.float64) / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _on_cpu(one: measure.Inside, precision: str) -> StepResult:
    """Return the step as a CPU does it in *precision* (``fp64`` too), of weights that are those of the device."""
    task = prepare.load_task(one.run)
    twin = task.model().train()
    twin.load_state_dict(
        {name: value.detach().to("cpu") for name, value in one.trainer.model.state_dict().items()}
    )
    _without_dropout(twin)
    wide = precision == "fp64"
    twin = twin.double() if wide else twin
    with autocast("cpu", precision):
        ready, wanted = task.prepare(one.inputs.to("cpu"), one.targets.to("cpu"))
        loss = task.loss(twin(_wide(ready) if wide else ready), _wide(wanted) if wide else wanted)
    loss.backward()  # type: ignore[no-untyped-call,unused-ignore]  # older torch has no types here
    return StepResult(float(loss.detach()), _gradients_of(twin))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


#: A rank's part, by its ProbePlace.
probe = Agreement
