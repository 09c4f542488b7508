"""What updates the weights: torch's own optimisers, and LARS and LAMB, which torch lacks."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.worker.environment import WorkerFailure


def optimizer_of(
    parameters: Mapping[str, Any],
    *,
    weight_decay: float = 0.0,
    betas: Tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what builds the optimiser that *parameters* name (fields ``optimizer`` and ``learning_rate``).

    ``adam`` adds the decay to the gradient, ``adamw`` and ``lamb`` keep it apart, as their papers say. SGD and LARS
    have momentum 0.9, as every MLPerf reference that uses them.

    Raises:
        ValueError: the optimiser is not one of ours.
    """
    name, rate = parameters["optimizer"], float(parameters["learning_rate"])
    adaptive: Dict[str, Any] = {"lr": rate, "weight_decay": weight_decay, "betas": betas, "eps": eps}
    momentum: Dict[str, Any] = {"lr": rate, "weight_decay": weight_decay, "momentum": 0.9}
    asked = parameters.get("fused_optimizer")
    fused = {} if asked is None else {"fused": bool(asked)}
    # In a graph the count of steps has to lie on the device; SGD counts none.
    adam = {**adaptive, **fused, **({"capturable": True} if parameters.get("cuda_graphs") else {})}
    builders: Dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "sgd": lambda model: _of_torch(torch.optim.SGD, model, {**momentum, **fused}),
        "adam": lambda model: _of_torch(torch.optim.Adam, model, adam),
        "adamw": lambda model: _of_torch(torch.optim.AdamW, model, adam),
        "lars": lambda model: Lars(model.parameters(), **momentum),
        "lamb": lambda model: Lamb(model.parameters(), **adaptive),
    }
    if name not in builders:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(builders)}")
    return builders[name]


def _of_torch(kind: Any, model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build one of torch's optimizers, which learnt to be fused one by one, and on one device after another."""
    try:
        optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    except (TypeError, RuntimeError) as error:
        if not options.get("fused"):
            raise
        text = f"fused_optimizer: torch {torch.__version__} has no fused {kind.__name__} for this device: {error}"
        raise WorkerFailure("not_supported", f"{text}; set fused_optimizer=False") from error
    return optimizer


def _trust(weight: Tensor, update: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``scale * |weight| / |update|``, 1 where either is zero. Stays on the device: no synchronisation."""
    norm, update_norm = weight.norm(), update.norm()
    ratio = scale * norm / update_norm
    return torch.where((norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


class _LayerWise(torch.optim.Optimizer):
    """Walks the parameters that have a gradient; a subclass says what one of them does."""

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]  # torch overloads it
        """Update every weight once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            self.update(weights, group)
        return loss

    def update(self, weights: List[nn.Parameter], group: Dict[str, Any]) -> None:
        """Update the weights of one group."""
        raise NotImplementedError


class Lars(_LayerWise):
    """Layer-wise adaptive rate scaling: You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.

    Vectors (biases, normalisation) are neither scaled nor decayed, as in the MLPerf ResNet reference.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    def update(self, weights: List[nn.Parameter], group: Dict[str, Any]) -> None:
        """Scale each layer's decayed gradient to its weights, then apply momentum."""
        for weight in weights:
            gradient = weight.grad
            if gradient is None:
                continue
            if weight.ndim > 1:
                gradient = gradient + group["weight_decay"] * weight
                gradient = gradient * _trust(weight, gradient, group["trust"])
            state = self.state[weight]
            if "velocity" not in state:
                state["velocity"] = torch.zeros_like(weight)
            velocity = state["velocity"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
            weight.sub_(velocity)


class Lamb(_LayerWise):
    """Layer-wise Adam: You et al., arXiv 1904.00962, algorithm 2, with gradients clipped to a global norm.

    Every tensor is scaled to its norm, vectors too, as the optimiser of the MLPerf DeepCAM reference does (apex
    ``FusedLAMB`` with a weight decay; without one it scales none, against the paper). ``max_norm`` 1 is the reference's.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        *,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "max_norm": max_norm,
                "step": 0,
            },
        )

    def update(self, weights: List[nn.Parameter], group: Dict[str, Any]) -> None:
        """Take Adam's bias-corrected direction, decay it, and scale it to each layer's weights."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if not gradients:
            return
        total = torch.stack([gradient.norm() for gradient in gradients]).norm()
        clip = group["max_norm"] / total.clamp(min=group["max_norm"])
        group["step"] += 1
        first_rate, second_rate = group["betas"]
        for weight, raw in zip(weights, gradients):
            gradient = raw * clip
            state = self.state[weight]
            if not state:
                state["first"], state["second"] = torch.zeros_like(weight), torch.zeros_like(weight)
            first = state["first"].mul_(first_rate).add_(gradient, alpha=1 - first_rate)
            second = state["second"].mul_(second_rate).addcmul_(gradient, gradient, value=1 - second_rate)
            unbiased = first / (1 - first_rate ** group["step"])
            spread = (second / (1 - second_rate ** group["step"])).sqrt().add_(group["eps"])
            direction = unbiased / spread + group["weight_decay"] * weight
            weight.sub_(group["lr"] * _trust(weight, direction) * direction)
