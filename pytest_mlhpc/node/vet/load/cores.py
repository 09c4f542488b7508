"""PAYLOAD. The node's cores: which there are for us, and work on all of them at once."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Callable, List, MutableMapping, Optional, Sequence, Tuple, TypeVar

T = TypeVar("T")

#: Settings by which users share a node between their ranks. Vetting uses the whole node, whatever they say.
_SHARES = (
    "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC", "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY", "KMP_HW_SUBSET", "KMP_ALL_THREADS", "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC",
    "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "ATEN_NUM_THREADS",
)  # fmt: skip

#: Longest wait for a thread at the place where all threads begin together, in seconds.
MEETING_S = 60.0


def forget_shares(environ: MutableMapping[str, str]) -> None:
    """Remove settings of thread counts and places. Libraries read them when they are loaded: call it before torch is."""
    for name in _SHARES:
        environ.pop(name, None)


def allowed_cores() -> Tuple[int, ...]:
    """Return the numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cores_of_quota(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Optional[int]:
    """Return how many cores the control group pays for (cgroup v2, ``cpu.max``), rounded up; None: without limit.

    A container that may run on 64 cores but is paid for 4 is stopped for most of each period by 64 threads.
    """
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    groups = [root / path, *(root / parent for parent in Path(path).parents)]
    limits = [limit for limit in map(_quota, groups) if limit is not None]
    return min(limits) if limits else None


def _quota(group: Path) -> Optional[int]:
    try:
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def at_once(count: int, work: Callable[[int, threading.Barrier], T], cores: Sequence[int] = ()) -> List[T]:
    """Call ``work(number, barrier)`` in *count* threads, each bound to its core where *cores* are given.

    The barrier is for all of them; it breaks when one raises, so that none waits for a dead one.

    Raises:
        BaseException: the first that a thread raised, but not the broken barriers that it caused.
    """
    barrier = threading.Barrier(count, timeout=MEETING_S)
    results: List[Optional[T]] = [None] * count
    errors: List[BaseException] = []

    def one(number: int) -> None:
        try:
            if cores:
                os.sched_setaffinity(0, {cores[number]})  # 0 is the calling thread
            results[number] = work(number, barrier)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0]
        )
    return results  # type: ignore[return-value]  # each thread has set its own
