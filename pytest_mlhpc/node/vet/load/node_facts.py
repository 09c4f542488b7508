"""What the child reads and sets without torch: the node's cores, what the kernel says of it, the log of NCCL and RCCL."""

from __future__ import annotations

import math
import os
import re
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, MutableMapping, Optional, Sequence, Tuple, TypeVar

from pytest_mlhpc.node.vet.checks import job_network
from pytest_mlhpc.node.vet.checks.job_network import Transport

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


def unused_devices(torch_version: str, root: Path = Path("/")) -> str:
    """Return a sentence if the kernel shows accelerators that torch does not find, else nothing."""
    signs = {"NVIDIA": ("dev", "nvidia[0-9]*"), "AMD": ("sys/class/kfd/kfd/topology/nodes", "*/gpu_id")}
    for vendor, (folder, pattern) in signs.items():
        for path in (root / folder).glob(pattern):
            if vendor == "AMD" and _text(path) in ("", "0"):  # 0: a processor
                continue
            return (
                f"this node shows {vendor} devices, but torch {torch_version} finds none: they are not computed on; use an "
                "environment whose torch is built for them, and check driver and allocation"
            )
    return ""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> Tuple[str, ...]:
    """Return what the first processor says that it can do (x86: flags, arm64: Features)."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(cpuinfo), re.MULTILINE)
    return tuple(match.group(1).split()) if match else ()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


#: The process's one log; set by :func:`prepare` in the environment, where NCCL itself reads it.
FILE, LEVEL, SUBSYSTEMS = "NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"

#: Most bytes of the log that are read.
MOST = 4 << 20

#: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read" (transport/p2p.cc, shm.cc, net.cc).
_VIA = re.compile(r"Channel \d+[^\r\n]*? via ([A-Z][\w]*(?:/[\w:.-]+)*)")

#: "NVLS multicast support is available on dev 0" (nvls.cc).
_NVLS = re.compile(r"NVLS multicast support is available")
_VERSION = re.compile(r"(?:NCCL|RCCL) version ([\w.+-]+)")


@dataclass(frozen=True)
class ChosenTransport:
    """What a communication library chose.

    ``library`` is nccl, rccl or gloo; ``network`` its own word for what joins nodes (``IB``, ``Socket``, ``AWS Libfabric``), empty
    where it did not say; ``interfaces`` the ports or interfaces; ``inside`` what joins devices of a node (``P2P/CUMEM``);
    ``observed`` all that the log says of the network.
    """

    library: str
    network: str = ""
    interfaces: Tuple[str, ...] = ()
    inside: Tuple[str, ...] = ()
    provider: str = ""
    version: str = ""
    nvls: bool = False
    observed: Transport = field(default_factory=Transport)

    @property
    def sockets(self) -> bool:
        """Return whether nodes would be joined by TCP sockets."""
        return self.network == "TCP" or self.observed.kind == "sockets"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Have NCCL write its log where :func:`text` reads it, in place of what the user set for it."""
    environ[LEVEL], environ[SUBSYSTEMS] = "INFO", "INIT,NET,ENV,GRAPH,P2P,SHM,NVLS"
    environ[FILE] = _new_file()


def _new_file() -> str:
    """Return a path that leads to memory; where the kernel has none, to a file without a name."""
    create = getattr(os, "memfd_create", None)
    if create is not None:
        return f"/proc/self/fd/{create('nccl-log')}"
    descriptor, path = tempfile.mkstemp(prefix="mlhpc-nccl-")
    os.unlink(path)  # noqa: PTH108 - the descriptor is what counts
    return f"/proc/self/fd/{descriptor}"


def log_text(environ: MutableMapping[str, str]) -> str:
    """Return what was logged so far."""
    try:
        with open(environ.get(FILE, ""), "rb") as file:  # noqa: PTH123 - a path of /proc, which Path adds nothing to
            return file.read(MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def parse_log(log: str, library: str) -> ChosenTransport:
    """Return what a log says."""
    observed, version = job_network.parse(log), _VERSION.search(log)
    return ChosenTransport(
        library,
        observed.network,
        observed.devices,
        tuple(sorted(set(_VIA.findall(log)))),
        observed.provider,
        version.group(1) if version else "",
        bool(_NVLS.search(log)),
        observed,
    )
