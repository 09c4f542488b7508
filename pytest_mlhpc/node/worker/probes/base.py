"""What the worker needs to know of a workload that is no training: something repeated, timed, and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Protocol, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import TimedOperation
from pytest_mlhpc.node.worker import distributed
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group


@dataclass(frozen=True)
class ProbePlace:
    """Where a probe runs: one rank of a run, its device, and the directory of the plan."""

    run: RunPlan
    group: Group
    accelerator: Accelerator
    directory: Path

    def barrier(self) -> None:
        """Wait for the device, then for all ranks."""
        distributed.barrier(self.group, self.accelerator)

    def timed(self, repetitions: int, operation: Callable[[], object]) -> float:
        """Return the seconds that one *operation* takes, of several that are done one behind the other.

        All ranks start together.
        """
        accelerator = self.accelerator
        self.barrier()
        start = accelerator.mark()
        for _ in range(repetitions):
            operation()
        end = accelerator.mark()
        accelerator.wait(end)
        return accelerator.seconds(start, end) / repetitions


class Probe(Protocol):
    """One rank's part of a probe; the module of its workload makes it by ``probe(place: Place) -> Probe``.

    One that has ``figures() -> Tuple[Figure, ...]`` too is asked behind the window for what is no time of an operation, and
    may do there what would slow the window.

    ``operations`` are those that this rank times, each without its seconds. ``kernel_works`` says that much of the work is
    done by the kernel for this rank, so that its processor time cannot be told from other programs'.
    """

    operations: Tuple[TimedOperation, ...]
    kernel_works: bool

    def verify(self) -> None:
        """Check, outside the timed window, that what is measured does what it should.

        Raises:
            WorkerFailure: ``wrong_result``, it does not.
        """

    def repeat(self) -> Mapping[str, float]:
        """Do everything once and return the seconds of each of ``operations`` by name."""

    def cache(self) -> str:
        """Return the verified state of the page cache in which everything was read: cold, warm, or unknown."""

    def environment(self) -> Mapping[str, str]:
        """Return what belongs in a record: which file system, which library."""

    def close(self) -> None:
        """Leave nothing behind. Called whatever happened."""
