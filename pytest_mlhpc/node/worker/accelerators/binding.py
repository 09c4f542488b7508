"""No torch. Which cores a rank computes on, and with how many threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterable, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker.environment import WorkerFailure

#: Where Linux tells which core and socket a processor belongs to (Documentation/admin-guide/cputopology.rst).
TOPOLOGY = Path("/sys/devices/system/cpu")


def threads_of(run: RunPlan) -> int:
    """Return how many threads a rank computes with: what the test says, what the environment's variables say, its cores.

    A partition may know of cores that cannot be used whole, as where nodes share them: threads that spin for each
    other there cost many times what they save.

    Raises:
        WorkerFailure: ``too_few_devices``, the test asks for more threads than the node has processors.
    """
    asked = run.parameters.get("threads")
    if asked is not None:
        here = os.cpu_count() or 1
        if int(asked) > here:
            text = f"threads={asked}, but this node has {here} processors; ask for at most as many"
            raise WorkerFailure("too_few_devices", text)
        return int(asked)
    said = run.variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested regions
    return int(said) if said.isascii() and said.isdigit() and int(said) > 0 else run.cores_per_rank


def bind(run: RunPlan, environ: Mapping[str, str]) -> None:
    """Keep this process, and all threads and processes that it starts, on cores of its own, if the run asks for that.

    To be called before torch is imported: OpenMP reads where it may run when it is loaded. Memory follows, as Linux
    gives a page on the socket of the thread that first writes it.

    Raises:
        WorkerFailure: ``too_few_devices``, there are fewer processors than ranks; ``not_supported``, this is not Linux.
    """
    if run.parameters.get("binding") is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise WorkerFailure("not_supported", "binding: only Linux lets a process choose its cores")
    here = in_order(os.sched_getaffinity(0))
    ranks = max(1, run.ranks // max(1, run.nodes))
    os.sched_setaffinity(0, share(here, int(environ.get("LOCAL_RANK", "0")), ranks, run.cores_per_rank))


def in_order(processors: Iterable[int], topology: Path = TOPOLOGY) -> List[int]:
    """Return processors by socket, then by core, so that threads of one core and cores of one socket are neighbours."""

    def place(processor: int) -> Tuple[int, int, int]:
        folder = topology / f"cpu{processor}" / "topology"
        return _number(folder / "physical_package_id"), _number(folder / "core_id"), processor

    return sorted(processors, key=place)


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not told: in the order of their numbers
        return 0


def share(processors: List[int], local_rank: int, ranks: int, cores_per_rank: int) -> List[int]:
    """Return the processors of one of the *ranks* of a node; all of them where a launcher has chosen already.

    Raises:
        WorkerFailure: ``too_few_devices``.
    """
    if ranks > 1 and len(processors) <= cores_per_rank:  # bound by srun, mpirun or a container
        return processors
    each = len(processors) // ranks
    if each < 1 or not 0 <= local_rank < ranks:
        text = (
            f"binding=cores: rank {local_rank} of {ranks} on this node finds {len(processors)} processors; "
            "each rank needs one of its own"
        )
        raise WorkerFailure("too_few_devices", text)
    return processors[local_rank * each : (local_rank + 1) * each]


def described(run: RunPlan) -> Mapping[str, str]:
    """Return what a record says of the binding; nothing where none was asked for."""
    if run.parameters.get("binding") is None:
        return {}
    return {"bound_to": ranges(os.sched_getaffinity(0))}


def ranges(processors: Iterable[int]) -> str:
    """Return processors as Linux writes lists of them: ``0-3,8``."""
    parts: List[str] = []
    first: Optional[int] = None
    last = -2
    for processor in [*sorted(processors), -1]:
        if processor == last + 1:
            last = processor
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = processor
    return ",".join(parts)
