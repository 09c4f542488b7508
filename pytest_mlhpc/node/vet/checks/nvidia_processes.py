"""NVIDIA: who else uses the devices, and DCGM's diagnosis as a second opinion."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

from pytest_mlhpc.node.vet.checks.nvidia_library import (
    NO_PERMISSION,
    FindingNotes,
    NvidiaDevice,
    NvmlLibrary,
    usable,
)
from pytest_mlhpc.node.vet.checks.nvidia_memory import is_split
from pytest_mlhpc.node.vet.finding import CheckOutcome, Origin
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable

#: Services that hold a context and compute nothing of their own (NVIDIA: Multi-Process Service, DCGM, driver persistence).
SERVICES = ("nvidia-cuda-mps", "nv-hostengine", "dcgm", "nvidia-persiste")

#: Most generations from a process to its oldest ancestor; more is a loop in what we read.
GENERATIONS = 64


class Processes:
    """Lists who computes on the devices that we may use."""

    name = "nvidia_processes"
    level = "quick"
    cost_s = 0.5
    reads = ("NVML: processes and used memory of each device", "/proc/PID/status", "CUDA_VISIBLE_DEVICES")
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Judge whose processes there are."""
        library = usable(machine, context)
        if library is None:
            return CheckOutcome()
        notes = FindingNotes(self.name, context)
        ours = [device for device in library.answering() if is_ours(machine, device)]
        for device in ours:
            _judge(notes, machine, library, device)
        if ours:
            notes.passed("no other process uses the devices")
        return CheckOutcome(tuple(notes.findings))


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


def _judge(notes: FindingNotes, machine: Machine, library: NvmlLibrary, device: NvidiaDevice) -> None:
    answer = library.ask("nvmlDeviceGetComputeRunningProcesses", device.handle)
    if answer.code == NO_PERMISSION and is_split(library, device):
        return  # of a device split by MIG only root may see all processes
    if not answer.ok:
        notes.unread("foreign_process", device, "who computes on it", answer)
        return
    foreign: List[int] = []
    left: List[int] = []
    unseen, held = 0, 0
    for process in answer.value:
        owner = _status(machine, process.pid, "Uid")
        if owner is None:
            unseen += 1
            continue
        held += process.usedGpuMemory or 0
        if _descends(machine, process.pid, _status(machine, "self", "PPid")):
            continue
        if not _is_service(machine, library, process.pid):
            (left if owner == _status(machine, "self", "Uid") else foreign).append(process.pid)
    _name_them(notes, machine, device, foreign, left)
    _judge_memory(notes, library, device, unseen, held)


def _name_them(
    notes: FindingNotes, machine: Machine, device: NvidiaDevice, foreign: List[int], left: List[int]
) -> None:
    def spelt(pids: List[int]) -> str:
        return ", ".join(f"{_status(machine, pid, 'Name') or '?'} ({pid})" for pid in pids[:5])

    text = f"another user computes on {device.place}: {spelt(foreign)}; use another node, and tell the site if it should be ours alone"
    notes.judge("foreign_process", len(foreign), text, device.label)
    text = f"processes of yours are still on {device.place}: {spelt(left)}; end them before you measure"
    notes.judge("own_process", len(left), text, device.label, Origin.USER)


def _judge_memory(
    notes: FindingNotes, library: NvmlLibrary, device: NvidiaDevice, unseen: int, held: int
) -> None:
    """Judge memory beside the *held* bytes of processes in sight: left over, or of processes outside of our container."""
    if device.model is not None and device.model.shared_memory:
        return  # the kernel puts pages of the host there
    memory = library.ask("nvmlDeviceGetMemoryInfo", device.handle)
    if not memory.ok or not memory.value.total:
        return
    rest = max(0, memory.value.used - held)
    share = rest / memory.value.total
    who = f"{unseen} processes that cannot be seen from here hold" if unseen else "no visible process holds"
    text = (
        f"{who} {rest / 2**30:.1f} GiB of {device.place}, {share:.0%} of its memory; "
        "look for other users of the node, else reset the device"
    )
    notes.judge("memory_in_use", share, text, device.label)


def _status(machine: Machine, pid: object, key: str) -> Optional[str]:
    """Return a value of ``/proc/PID/status``, of several the first (of Uid: the real one); None: it cannot be seen."""
    try:
        values = machine.key_values(f"/proc/{pid}/status").get(key, "").split()
    except Unreadable:
        return None
    return values[0] if values else None


def _descends(machine: Machine, pid: int, ancestor: Optional[str]) -> bool:
    """Return whether *ancestor* started this process, or one that did."""
    current: Optional[str] = str(pid)
    for _ in range(GENERATIONS):
        if current is None or current == "0" or ancestor is None:
            return False
        if current == ancestor:
            return True
        current = _status(machine, current, "PPid")
    return False


def _is_service(machine: Machine, library: NvmlLibrary, pid: int) -> bool:
    named = library.ask("nvmlSystemGetProcessName", pid)
    names = (named.value.rpartition("/")[2] if named.ok else "", _status(machine, pid, "Name") or "")
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


class Dcgm:
    """Runs level 1 of NVIDIA's own diagnostics."""

    name = "nvidia_dcgm"
    level = "deep"
    cost_s = 15.0
    reads = ("dcgmi diag -r 1 -j",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Judge what it says; without it nothing is said."""
        if usable(machine, context) is None:
            return CheckOutcome()
        notes = FindingNotes(self.name, context)
        try:
            done = machine.command(["dcgmi", "diag", "-r", "1", "-j"], LIMIT_S)
        except Absent:
            return CheckOutcome()
        except Unreadable as error:
            notes.judge(
                "dcgm_no_proof",
                1,
                f"dcgmi diag gave no result: {error}; skip it, or check its host engine",
            )
            return CheckOutcome(tuple(notes.findings))
        if "unable to establish a connection" in (done.output + done.errors).lower():
            notes.info("dcgmi is installed, but its host engine does not run; not used")
            return CheckOutcome(tuple(notes.findings))
        results = list(read(done.output))
        for result in results:
            _judge_test(notes, result)
        if not any(result.status in ("pass", "fail", "warn") for result in results):
            text = f"dcgmi diag gave no result: it ended with {done.code} and no result; skip it, or check its host engine"
            notes.judge("dcgm_no_proof", 1, text)
        if not notes.findings:
            notes.info(f"dcgmi diag passed {len(results)} tests of level 1, which proves little")
        return CheckOutcome(tuple(notes.findings))


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
    words = [str(_table(one).get("warning", "")) if isinstance(one, dict) else str(one) for one in found]
    grades = [_table(one).get("error_severity") for one in found]
    return Result(
        test,
        str(result.get("status", "")).strip().lower(),
        "" if entity is None else f"GPU {entity}",
        tuple(words),
        tuple(grade for grade in grades if isinstance(grade, int)),
    )


def _judge_test(notes: FindingNotes, result: Result) -> None:
    words = " ".join(result.warnings) or "without a reason"
    what = f"dcgmi diag: {result.test}" + (f" on {result.device}" if result.device else "")
    failed = result.status == "fail"
    grave = bool(GRAVE.intersection(result.severities))
    if not result.severities:
        grave = result.test.lower() not in SETTINGS
    text = f"{what} failed: {words}; leave the node out and have it checked"
    notes.judge("dcgm_failed", int(failed and grave), text, result.device)
    text = f"{what} failed: {words}; look at that setting"
    notes.judge("dcgm_setting", int(failed and not grave), text, result.device)
    empty = result.status == "pass" and "alloc" in words.lower()
    text = f"{what} passed without having run: {words}; free the device, and run it again"
    notes.judge("dcgm_no_proof", int(empty), text, result.device)
    if result.status == "warn":
        notes.info(f"{what} warns: {words}", result.device)


CHECKS = (
    Processes(),
    Dcgm(),
)
