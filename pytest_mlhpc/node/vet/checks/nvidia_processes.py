"""NVIDIA: who else uses the devices, and DCGM's diagnosis as a second opinion."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.nvidia_devices import (
    NO_PERMISSION,
    NvidiaDevice,
    NvmlLibrary,
    unread,
    with_devices,
)
from pytest_mlhpc.node.vet.checks.nvidia_memory import is_split
from pytest_mlhpc.node.vet.finding import Origin
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable

#: Services that hold a context and compute nothing of their own (NVIDIA: Multi-Process Service, DCGM, driver persistence).
SERVICES = ("nvidia-cuda-mps", "nv-hostengine", "dcgm", "nvidia-persiste")

#: Most generations from a process to its oldest ancestor; more is a loop in what we read.
GENERATIONS = 64


def _judge_processes(exam: Examination, library: NvmlLibrary, devices: List[NvidiaDevice]) -> Optional[str]:
    """Judge who computes on the devices that we may use."""
    ours = [device for device in devices if is_ours(exam.machine, device)]
    for device in ours:
        _judge(exam, library, device)
    return "no other process uses the devices" if ours else None


def is_ours(machine: Machine, device: NvidiaDevice) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES leaves us this device; unset, it leaves all (CUDA programming guide).

    Numbers in it count in the order of PCI addresses, as NVML's do, which is what schedulers set.
    """
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if any(name.startswith("MIG-") for name in names):
        return True  # a slice does not say of which device
    return any(
        device.uuid.startswith(name) if name.startswith("GPU-") else name == str(device.index)
        for name in names
    )


def _judge(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    machine = exam.machine
    answer = library.ask("nvmlDeviceGetComputeRunningProcesses", device.handle)
    if answer.code == NO_PERMISSION and is_split(library, device):
        return  # of a device split by MIG only root may see all processes
    if not answer.ok:
        unread(exam, "nvidia.foreign_process", device, "who computes on it", answer)
        return
    foreign: List[int] = []
    left: List[int] = []
    unseen, used = 0, 0
    for process in answer.value:
        owner = machine.status(process.pid, "Uid")
        if owner is None:
            unseen += 1
            continue
        used += process.usedGpuMemory or 0
        if _descends(machine, process.pid, machine.status("self", "PPid")):
            continue
        if not _is_service(machine, library, process.pid):
            (left if owner == machine.status("self", "Uid") else foreign).append(process.pid)
    _name_them(exam, device, foreign, left)
    _judge_memory(exam, library, device, unseen, used)


def _name_them(exam: Examination, device: NvidiaDevice, foreign: List[int], left: List[int]) -> None:
    def spelt(pids: List[int]) -> str:
        return ", ".join(f"{exam.machine.status(pid, 'Name') or '?'} ({pid})" for pid in pids[:5])

    text = f"another user computes on {device.place}: {spelt(foreign)}; use another node, and tell the site if it should be ours alone"
    exam.judge("nvidia.foreign_process", len(foreign), text, device.label)
    text = f"processes of yours are still on {device.place}: {spelt(left)}; end them before you measure"
    exam.judge("nvidia.own_process", len(left), text, device.label, Origin.USER)


def _judge_memory(
    exam: Examination, library: NvmlLibrary, device: NvidiaDevice, unseen: int, used: int
) -> None:
    """Judge memory beside the *used* bytes of processes in sight: left over, or of processes outside of our container."""
    if device.model is not None and device.model.shared_memory:
        return  # the kernel puts pages of the host there
    memory = library.ask("nvmlDeviceGetMemoryInfo", device.handle)
    if not memory.ok or not memory.value.total:
        return
    rest = max(0, memory.value.used - used)
    share = rest / memory.value.total
    who = f"{unseen} processes that cannot be seen from here hold" if unseen else "no visible process holds"
    text = (
        f"{who} {rest / 2**30:.1f} GiB of {device.place}, {share:.0%} of its memory; "
        "look for other users of the node, else reset the device"
    )
    exam.judge("nvidia.memory_in_use", share, text, device.label)


def _descends(machine: Machine, pid: int, ancestor: Optional[str]) -> bool:
    """Return whether *ancestor* started this process, or one that did."""
    current: Optional[str] = str(pid)
    for _ in range(GENERATIONS):
        if current is None or current == "0" or ancestor is None:
            return False
        if current == ancestor:
            return True
        current = machine.status(current, "PPid")
    return False


def _is_service(machine: Machine, library: NvmlLibrary, pid: int) -> bool:
    named = library.ask("nvmlSystemGetProcessName", pid)
    names = (named.value.rpartition("/")[2] if named.ok else "", machine.status(pid, "Name") or "")
    return any(name.startswith(SERVICES) for name in names)


#: Longest run of level 1, in seconds, less than what kills this check; some releases hang (NVIDIA/DCGM issue 247).
LIMIT_S = 45.0

#: DCGM_ERROR_ISOLATE and DCGM_ERROR_RESET (DCGM, Diagnostic Errors).
GRAVE = frozenset({2, 6})

#: Tests of release 3, which gives no severity, that speak of settings (DCGM, dcgmi diag).
SETTINGS = frozenset(
    {"persistence mode", "environment variables", "graphics processes", "page retirement/row remap"}
)


@dataclass(frozen=True)
class Result:
    """One test's result on one device (empty: on all): status in lower case, its warnings, their worst severity."""

    test: str
    status: str
    device: str = ""
    warnings: Tuple[str, ...] = ()
    severities: Tuple[int, ...] = ()


def _judge_dcgm(exam: Examination, _library: NvmlLibrary, _devices: List[NvidiaDevice]) -> None:
    """Judge what NVIDIA's own diagnostics say; without them nothing is said."""
    try:
        done = exam.machine.command(["dcgmi", "diag", "-r", "1", "-j"], LIMIT_S)
    except Absent:
        return
    except Unreadable as error:
        text = f"dcgmi diag gave no result: {error}; skip it, or check its host engine"
        exam.judge("nvidia.dcgm_no_proof", 1, text)
        return
    if "unable to establish a connection" in (done.output + done.errors).lower():
        exam.info("dcgmi is installed, but its host engine does not run; not used")
        return
    results = list(read(done.output))
    for result in results:
        _judge_test(exam, result)
    if not any(result.status in ("pass", "fail", "warn") for result in results):
        text = f"dcgmi diag gave no result: it ended with {done.code} and no result; skip it, or check its host engine"
        exam.judge("nvidia.dcgm_no_proof", 1, text)
    if not exam.findings:
        exam.info(f"dcgmi diag passed {len(results)} tests of level 1, which proves little")


def read(text: str) -> Iterator[Result]:
    """Yield all results in what ``dcgmi diag -j`` printed, of release 3 or 4; nothing where there are none."""
    start = text.find("{")
    try:
        data, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except ValueError:
        return
    root = next(
        (data[key] for key in ("DCGM Diagnostic", "DCGM GPU Diagnostic") if key in _table(data)), None
    )
    for category in _list(_table(root).get("test_categories")):
        for test in _list(_table(category).get("tests")):
            for result in _list(_table(test).get("results")):
                yield _result(str(_table(test).get("name", "?")), _table(result))


def _table(value: Any) -> Dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []


def _result(test: str, result: Dict[str, Any]) -> Result:
    entity: Optional[Any] = result.get("entity_id") if result.get("entity_group") == "GPU" else None
    found = _list(result.get("warnings"))
    warnings = [str(_table(one).get("warning", "")) if isinstance(one, dict) else str(one) for one in found]
    grades = [_table(one).get("error_severity") for one in found]
    return Result(
        test,
        str(result.get("status", "")).strip().lower(),
        "" if entity is None else f"GPU {entity}",
        tuple(warnings),
        tuple(grade for grade in grades if isinstance(grade, int)),
    )


def _judge_test(exam: Examination, result: Result) -> None:
    warnings = " ".join(result.warnings) or "without a reason"
    what = f"dcgmi diag: {result.test}" + (f" on {result.device}" if result.device else "")
    failed = result.status == "fail"
    grave = bool(GRAVE.intersection(result.severities))
    if not result.severities:
        grave = result.test.lower() not in SETTINGS
    text = f"{what} failed: {warnings}; leave the node out and have it checked"
    exam.judge("nvidia.dcgm_failed", int(failed and grave), text, result.device)
    text = f"{what} failed: {warnings}; look at that setting"
    exam.judge("nvidia.dcgm_setting", int(failed and not grave), text, result.device)
    empty = result.status == "pass" and "alloc" in warnings.lower()
    text = f"{what} passed without having run: {warnings}; free the device, and run it again"
    exam.judge("nvidia.dcgm_no_proof", int(empty), text, result.device)
    if result.status == "warn":
        exam.info(f"{what} warns: {warnings}", result.device)


CHECKS = (
    Check.named("nvidia_processes", with_devices(_judge_processes)),
    Check.named("nvidia_dcgm", with_devices(_judge_dcgm)),
)
