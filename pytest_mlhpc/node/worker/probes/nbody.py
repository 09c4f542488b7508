"""Gravity between all pairs of bodies, summed directly; each rank moves its share and gathers the others'.

The initial state is a Plummer model in equilibrium (Aarseth, Henon and Wielen 1974, Astronomy and Astrophysics 37, 183), G,
total mass and Plummer radius being 1. Steps are leapfrog, which conserves energy; that is checked. One interaction counts as
20 operations, as in Nyland, Harris and Prins, "Fast N-Body Simulation with CUDA" (GPU Gems 3, 2007, chapter 31), which
also counts each pair twice and each body with itself.
"""

from __future__ import annotations

import math
from typing import List, Mapping, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.protocol.schema import Rate, TimedOperation
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import collective
from pytest_mlhpc.node.worker.probes.measure import ProbePlace

FLOP_PER_INTERACTION = 20.0

#: Softening length and step, in units in which half of the bodies lie within a radius of 1.3.
SOFTENING, STEP = 0.05, 1.0 / 256.0

#: Largest relative change of the total energy over a run. With this softening and step it is about 1e-7 over 40 steps.
ENERGY_DRIFT = 1e-4

#: Bodies farther out than this are drawn again: single ones far away would rule the energy.
_FARTHEST = 10.0

#: Pairs of one block: on CPUs an array of them stays in a core's cache, on devices it keeps all units busy.
_PAIRS_CPU, _PAIRS_DEVICE = 1 << 17, 1 << 24

TOLERANCE = 0.10


def plummer(bodies: int, seed: int) -> Tuple[Tensor, Tensor]:
    """Return positions and velocities, (bodies, 3) each in float64, at rest as a whole; the same on every machine."""
    source = torch.Generator().manual_seed(seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=source, dtype=torch.float64)

    def directions(lengths: Tensor) -> Tensor:
        height, angle = 2.0 * uniform(len(lengths)) - 1.0, 2.0 * math.pi * uniform(len(lengths))
        across = (1.0 - height.square()).sqrt()
        return lengths[:, None] * torch.stack((across * angle.cos(), across * angle.sin(), height), dim=1)

    inside = 1.0 / (1.0 + _FARTHEST**-2.0) ** 1.5  # share of the mass within the farthest radius
    radius = ((uniform(bodies) * inside).clamp_min(1e-10) ** (-2.0 / 3.0) - 1.0).rsqrt()
    # Speeds as shares of the speed of escape, distributed as q^2 (1 - q^2)^(7/2), by rejection.
    share = torch.empty(0, dtype=torch.float64)
    while len(share) < bodies:
        candidate, height = uniform(4 * bodies), 0.1 * uniform(4 * bodies)
        accepted = height < candidate.square() * (1.0 - candidate.square()) ** 3.5
        share = torch.cat((share, candidate[accepted]))
    speed = share[:bodies] * math.sqrt(2.0) * (1.0 + radius.square()) ** -0.25
    position, velocity = directions(radius), directions(speed)
    return position - position.mean(dim=0), velocity - velocity.mean(dim=0)


class NBody:
    """This rank's bodies, and all positions."""

    kernel_works = False

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        parameters, group, device = place.run.parameters, place.group, place.accelerator.device
        self._bodies = int(parameters["bodies"])
        self._each, rest = divmod(self._bodies, group.world)
        if rest:
            text = f"{self._bodies} bodies do not divide over {group.world} ranks"
            raise WorkerFailure("worker_exit", text)
        self._type = torch.float64 if parameters["precision"] == "fp64" else torch.float32
        position, velocity = plummer(self._bodies, int(parameters["seed"] or 0))
        own = slice(group.rank * self._each, (group.rank + 1) * self._each)
        self._all = position.to(device, self._type)
        self._own = self._all[own].clone()
        self._velocity = velocity[own].to(device, self._type)
        pairs = _PAIRS_CPU if device.type == "cpu" else _PAIRS_DEVICE
        self._rows = max(1, pairs // self._bodies)
        self._way = (
            collective.way_of("all_gather", group, place.accelerator) if group.world > 1 else "one rank"
        )
        self._parts: List[Tensor] = list(self._all.chunk(group.world))
        self._acceleration = torch.zeros_like(self._own)
        self._accelerate()
        self._energy = self._total_energy()
        interactions = float(self._bodies) ** 2
        rates = (
            Rate("interaction_rate", "items/s", interactions, together=True, tolerance=TOLERANCE),
            Rate("achieved_flops", "FLOP/s", FLOP_PER_INTERACTION * interactions, together=True),
        )
        self.operations: Tuple[TimedOperation, ...] = (TimedOperation("step", (), rates, ("step_time",)),)

    def verify(self) -> None:
        """Compare the total energy with that at the start, and what the ranks know of all positions.

        Raises:
            WorkerFailure: ``wrong_result``, energy is not conserved, or ranks differ.
        """
        self._compare_positions()
        energy = self._total_energy()
        drift = abs(energy - self._energy) / abs(self._energy)
        if not drift <= ENERGY_DRIFT:
            text = (
                f"the energy of {self._bodies} bodies went from {self._energy:.6g} to {energy:.6g}, by {drift:.2g} of it; "
                f"at most {ENERGY_DRIFT:g} is right: arithmetic or exchange of this device gives wrong results"
            )
            raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Move all bodies by one step."""
        return {"step": self._place.timed(1, self._step)}

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return how positions are exchanged."""
        return {"all_gather": self._way}

    def close(self) -> None:
        """Leave the memory to the end of the process."""

    def _step(self) -> None:
        """Kick, drift, kick."""
        self._velocity.add_(self._acceleration, alpha=STEP / 2)
        self._own.add_(self._velocity, alpha=STEP)
        self._gather()
        self._accelerate()
        self._velocity.add_(self._acceleration, alpha=STEP / 2)

    def _gather(self) -> None:
        if self._place.group.world == 1:
            self._all.copy_(self._own)
        elif self._way == "all_gather_into_tensor":
            dist.all_gather_into_tensor(self._all, self._own)
        else:
            dist.all_gather(self._parts, self._own)

    def _compare_positions(self) -> None:
        if self._place.group.world == 1:
            return
        total = self._all.double().cpu().sum().to(self._place.accelerator.device)
        least, most = total.clone(), total.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        own = slice(self._place.group.rank * self._each, (self._place.group.rank + 1) * self._each)
        if float(least) != float(most) or not torch.equal(self._all[own], self._own):
            text = f"{self._way}: after an exchange of positions the ranks differ in where the bodies are"
            raise WorkerFailure("wrong_result", text)

    def _differences(self, first: int) -> Tuple[List[Tensor], Tensor]:
        """Return x, y and z from some own bodies to all, and softened distances squared, each (rows, bodies)."""
        rows = self._own[first : first + self._rows]
        apart = [self._all[:, axis][None, :] - rows[:, axis][:, None] for axis in range(3)]
        squared = apart[0].square()
        squared.addcmul_(apart[1], apart[1]).addcmul_(apart[2], apart[2]).add_(SOFTENING**2)
        return apart, squared

    def _accelerate(self) -> None:
        """Sum the pull of all bodies, each of mass 1/bodies, on this rank's; that of a body on itself is zero."""
        for first in range(0, self._each, self._rows):
            apart, squared = self._differences(first)
            weight = squared.rsqrt()
            weight = weight.mul_(weight.square())
            for axis in range(3):
                pull = apart[axis].mul_(weight).sum(dim=1)
                self._acceleration[first : first + self._rows, axis] = pull
        self._acceleration.div_(self._bodies)

    def _total_energy(self) -> float:
        """Return kinetic and potential energy of all ranks' bodies. Sums of rows are in float64 on the host."""
        mass = 1.0 / self._bodies
        kinetic = 0.5 * mass * float(self._velocity.double().square().sum().item())
        inverse = 0.0
        for first in range(0, self._each, self._rows):
            _, squared = self._differences(first)
            inverse += float(squared.rsqrt_().sum(dim=1).cpu().double().sum().item())
        inverse -= self._each / SOFTENING  # each body with itself
        own = kinetic - 0.5 * mass * mass * inverse
        if self._place.group.world == 1:
            return own
        total = torch.tensor([own], dtype=torch.float64, device=self._place.accelerator.device)
        dist.all_reduce(total)
        return float(total.item())


#: A rank's part, by its ProbePlace.
probe = NBody
