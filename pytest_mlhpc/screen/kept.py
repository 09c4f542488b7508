"""Samples of nodes that are looked at for long: as many as memory holds, spread over the whole time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pytest_mlhpc.node.telemetry.samples import Sample

#: Processes in all samples that are kept: each takes some 640 bytes (CPython 3.11).
MOST_PROCESSES = 1_000_000

#: Samples of one node that are never let go: fewer would not tell one rank from another.
LEAST_OF_NODE = 16


def halved(samples: Sequence[Sample]) -> list[Sample]:
    """Return every other sample, the first among them; each with what it cost to take those before it that are gone."""
    costs = [0.0, *(one.cost_s for one in samples[1::2])]
    return [replace(one, cost_s=one.cost_s + cost) for one, cost in zip(samples[::2], costs, strict=False)]


@dataclass
class Kept:
    """Takes samples in. Of more than *most* processes, every other sample of each node is let go, and of those to come."""

    most: int = MOST_PROCESSES
    _of: dict[str, list[Sample]] = field(default_factory=dict)  #: host -> its samples
    _passed: dict[str, list[float]] = field(
        default_factory=dict
    )  #: host -> costs of those since the last that was kept
    _every: int = 1
    _processes: int = 0

    def add(self, sample: Sample) -> None:
        """Keep it, or what it cost."""
        passed = self._passed.setdefault(sample.node.host, [])
        samples = self._of.setdefault(sample.node.host, [])
        passed.append(sample.cost_s)
        if samples and len(passed) < self._every:
            return
        samples.append(replace(sample, cost_s=sum(passed)))
        passed.clear()
        self._processes += len(sample.processes)
        if self._processes > self.most:
            self._thin()

    def samples(self) -> list[Sample]:
        """Return what is kept, node by node."""
        return [sample for samples in self._of.values() for sample in samples]

    def _thin(self) -> None:
        long = {host: samples for host, samples in self._of.items() if len(samples) >= 2 * LEAST_OF_NODE}
        if not long:
            return  # it is the number of nodes that takes the memory
        for host, samples in long.items():
            if len(samples) % 2 == 0:  # the last goes as well, and what it cost goes to the next
                self._passed[host].append(samples[-1].cost_s)
            self._of[host] = halved(samples)
        self._every *= 2
        self._processes = sum(len(sample.processes) for sample in self.samples())
