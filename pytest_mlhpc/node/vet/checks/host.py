"""The host: what it has against its partition's description, throttled processors, memory errors, devices on the PCI bus.

*Not there*: a file that this kernel or machine does not have (cpufreq in a VM, DMI on Arm, NUMA in a container) gives no fact; where
its property is *described*, the node does not have it: "none", and not as described. *There and unreadable*: UNKNOWN for what is
described, no fact for what is not. Cores and memory exist on every node: without their files, what is described is UNKNOWN.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination, LoadWatch
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable, numbers, or_else

_CPU = "/sys/devices/system/cpu"
_KIB = 1024


def _judge_inventory(exam: Examination) -> str:
    """Look at each, and compare with what is described."""
    _judge_cores(exam)
    _judge_memory(exam)
    _judge_swap(exam)
    _judge_clock(exam)
    _judge_expected(exam)
    for name, read in _FACTS.items():
        value = or_else(lambda _, read=read: read(exam.machine), name, "", Unreadable)  # type: ignore[misc]
        if value:
            exam.fact(name, value)
    said = {fact.name: fact.value for fact in exam.facts}
    names = [name for name in ("processors online", "memory", "NUMA nodes", "kernel") if name in said]
    return (
        ", ".join(f"{name} {said[name]}" for name in names)
        or "nothing of this node can be read, and nothing is described"
    )


def cores(machine: Machine) -> Tuple[int, int]:
    """Return processors that are online, and threads of each core.

    Raises:
        Unreadable: neither sysfs nor /proc/cpuinfo says.
    """
    try:
        count = len(numbers(machine.text(f"{_CPU}/online")))
    except Absent:
        lines = machine.text("/proc/cpuinfo").splitlines()
        count = sum(line.partition(":")[0].strip() == "processor" for line in lines)
    active = or_else(machine.text, f"{_CPU}/smt/active", "", Unreadable)
    return count, 2 if active == "1" else 1


def _judge_cores(exam: Examination) -> None:
    """A description may mean cores or threads: more than cores and fewer than threads is either, less a few."""
    wanted = exam.wanted.cores
    if wanted is None:
        return
    try:
        threads, of_core = cores(exam.machine)
    except Unreadable as error:
        exam.unknown("inventory.cores", error)
        return
    text = (
        f"{threads} processors are online, {wanted} are described; look for processors that are off or lost"
    )
    exam.judge("inventory.cores", max(0, wanted - threads), text)
    real = threads // of_core
    text = f"{real} cores with {threads} threads are online, {wanted} are described; if these are cores, some are lost"
    exam.judge("inventory.cores_smt", wanted - real if real < wanted < threads else 0, text)


def memory_info(machine: Machine, name: str) -> int:
    """Return what /proc/meminfo says by name, in bytes (a count of pages as it is).

    Raises:
        Unreadable: it does not say.
    """
    fields = machine.key_values("/proc/meminfo").get(name, "").split()
    if not fields:
        raise Absent(f"/proc/meminfo has no {name}")
    if not fields[0].isdecimal():
        raise Unreadable(f"/proc/meminfo holds {fields[0][:20]!r} for {name}, not a number")
    return int(fields[0]) * (_KIB if fields[-1] == "kB" else 1)


def _judge_memory(exam: Examination) -> None:
    wanted = exam.wanted.memory
    if not wanted:
        return
    try:
        total = memory_info(exam.machine, "MemTotal")
    except Unreadable as error:
        exam.unknown("inventory.memory", error)
        return
    text = f"Linux has {total / 2**30:.1f} GiB of memory, {wanted / 2**30:.1f} are described; look for a module that is lost"
    exam.judge("inventory.memory", total / wanted, text)


def _judge_swap(exam: Examination) -> None:
    try:
        names = ("SwapTotal", "SwapFree", "MemTotal")
        swap, free, total = (memory_info(exam.machine, name) for name in names)
    except Unreadable:
        return  # without swap nothing is swapped out
    used = swap - free
    text = f"{used / 2**30:.1f} GiB are swapped out; look for processes that are left behind"
    exam.judge("inventory.swap_used", used / max(1, total), text)


def _judge_clock(exam: Examination) -> None:
    """A clock that nobody is known to discipline says nothing of its error: chrony without rtcsync reads the same."""
    try:
        state = exam.machine.clock_state()
    except Unreadable:
        return
    if state.synced:
        text = f"the node's clock may be {state.error_s:.2g} s wrong; look at chrony or NTP"
        exam.judge("inventory.clock_error", state.error_s, text)


# -- properties by name ----------------------------------------------------------------------------------------------


def _numa(machine: Machine) -> str:
    machine.names_in("/sys/devices/system/node")  # Absent without it: a kernel that knows no NUMA
    return str(len(machine.numbered("/sys/devices/system/node", "node")))


def _governor(machine: Machine) -> str:
    """Return the governors of all processors; several are joined by commas."""
    files = (f"{_CPU}/{name}/cpufreq/scaling_governor" for name in machine.numbered(_CPU, "cpu"))
    found = {or_else(machine.text, file, "") for file in files} - {""}
    if not found:
        raise Absent("no processor has a governor")
    return ",".join(sorted(found))


def _hugepages(machine: Machine) -> str:
    return str(memory_info(machine, "HugePages_Total"))


def _cpu_field(name: str) -> Callable[[Machine], str]:
    def read(machine: Machine) -> str:
        value = machine.key_values("/proc/cpuinfo").get(name)
        if not value:
            raise Absent(f"/proc/cpuinfo has no {name}")
        return value

    return read


def _file(name: str) -> Callable[[Machine], str]:
    return lambda machine: machine.text(name)


def _chosen(name: str) -> Callable[[Machine], str]:
    """Return a reader of the chosen word of a file such as ``always [madvise] never``."""

    def read(machine: Machine) -> str:
        text = machine.text(name)
        return text.partition("[")[2].partition("]")[0] or text

    return read


def _rounded_memory(machine: Machine) -> str:
    """Return the memory to 16 GiB (1 GiB below 64): nodes of one kind differ by a few MiB."""
    gib = memory_info(machine, "MemTotal") / 2**30
    step = 16 if gib >= 64 else 1
    return f"{round(gib / step) * step} GiB"


def _synced(machine: Machine) -> str:
    return "yes" if machine.clock_state().synced else "no"


#: What ``expect:`` may name, and how it is read. ``driver`` and others belong to checks of their vendors.
EXPECTABLE: Dict[str, Callable[[Machine], str]] = {
    "numa": _numa,
    "governor": _governor,
    "hugepages": _hugepages,
    "kernel": _file("/proc/sys/kernel/osrelease"),
    "bios": _file("/sys/class/dmi/id/bios_version"),
}

#: What it may name besides, for the checks of devices. ``firmware`` is that of devices, and of the node where it has none.
OF_DEVICES = frozenset(
    {
        *("driver", "firmware", "vbios", "device_memory", "power_limit", "nvlinks", "ecc", "mig"),
        *("compute_partition", "memory_partition"),
    }
)

#: Facts by name.
_FACTS: Dict[str, Callable[[Machine], str]] = {
    **{("NUMA nodes" if name == "numa" else name): read for name, read in EXPECTABLE.items()},
    "processors online": lambda machine: str(cores(machine)[0]),
    "threads per core": lambda machine: str(cores(machine)[1]),
    "memory": _rounded_memory,
    "processor": _cpu_field("model name"),
    "microcode": _cpu_field("microcode"),
    "machine": _file("/sys/class/dmi/id/product_name"),
    "transparent huge pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
    "clock synchronised": _synced,
}


def _judge_expected(exam: Examination) -> None:
    names = ", ".join(sorted({*EXPECTABLE, *OF_DEVICES}))
    for name, wanted in exam.wanted.expect.items():
        firmware = (name, exam.wanted.accelerator) == ("firmware", "cpu")
        read = EXPECTABLE["bios"] if firmware else EXPECTABLE.get(name)
        if read is None:
            if name not in OF_DEVICES:
                text = f"{name} is expected to be {wanted}, and no check reads {name}; there are {names}"
                exam.unknown("inventory.expected", text)
            continue
        value: Optional[str] = None
        try:
            value = read(exam.machine)
        except Absent:
            pass
        except Unreadable as error:
            exam.unknown("inventory.expected", error)
            continue
        text = f"{name} is {value or 'none'}, {wanted} is described"
        exam.judge("inventory.expected", int(value != str(wanted)), text)


_COUNTS = ("core_throttle_count", "package_throttle_count")
_TIMES = ("core_throttle_total_time_ms", "package_throttle_total_time_ms")

#: A processor is busy that ran for this share of the time between two samples.
BUSY = 0.9

#: Most processors whose clock is read in one sample: on some kernels each takes 10 ms.
MOST_CLOCKS = 8

#: Least time between two reads of /proc/stat that says something, in its ticks (usually 10 ms each).
_TICKS = 10


@dataclass(frozen=True)
class ProcessorState:
    """Counters at the begin, by processor and name; when that was; busy and total ticks at the last sample; clocks as shares of the base clock."""

    counters: Mapping[Tuple[str, str], int]
    since: float
    ticks: Mapping[str, Tuple[int, int]]
    clocks: Tuple[float, ...] = field(default_factory=tuple)


def _start_throttle(machine: Machine, _context: Context) -> ProcessorState:
    return ProcessorState(_counters(machine), machine.clock(), _ticks(machine))


def _observe_throttle(machine: Machine, state: ProcessorState) -> ProcessorState:
    """Read the clocks of processors that were busy since the last sample."""
    ticks = _ticks(machine)
    busy = [name for name in sorted(ticks) if _busy(state.ticks.get(name), ticks[name])]
    step = max(1, len(busy) // MOST_CLOCKS)
    clocks = [_clock(machine, name) for name in busy[::step][:MOST_CLOCKS]]
    return replace(state, ticks=ticks, clocks=state.clocks + tuple(one for one in clocks if one is not None))


def _judge_throttle(exam: Examination, state: ProcessorState) -> Optional[str]:
    """Read the counters again, and judge what has changed."""
    elapsed = max(1.0, exam.machine.clock() - state.since)
    caps = _caps(exam.machine)
    after = _counters(exam.machine)
    known = _heat(exam, state.counters, after, elapsed)
    if state.clocks:
        middle = median(state.clocks)
        text = f"busy processors run at {middle:.0%} of their base clock; look at power limits, PROCHOT and cooling"
        exam.judge("cpu_throttle.clock", middle, text)
    if caps:
        text = f"the clock may not go beyond {min(caps):.0%} of the base clock (scaling_max_freq); lift the limit"
        exam.judge("cpu_throttle.cap", min(caps), text)
        exam.fact("lowest limit of the clock", f"{min(caps):.2f} x base")
    if not (known or state.clocks or caps):
        exam.info("this node shows neither temperature nor clocks of its processors")
        return None
    return f"not throttled in {elapsed:.0f} s; {len(state.clocks)} clocks of busy processors read"


def _heat(
    exam: Examination,
    before: Mapping[Tuple[str, str], int],
    after: Mapping[Tuple[str, str], int],
    elapsed: float,
) -> bool:
    """Judge the counters of heat, where there are some: the worst processor speaks for the node."""
    changes = {place: max(0, after[place] - before[place]) for place in before if place in after}
    events = {place: change for place, change in changes.items() if place[1] in _COUNTS}
    times = {place: change for place, change in changes.items() if place[1] in _TIMES}
    if events:
        (cpu, name), count = max(events.items(), key=lambda item: item[1])
        text = f"{cpu} was throttled for heat {count} times in {elapsed:.0f} s ({name}); look at cooling"
        exam.judge("cpu_throttle.events", count, text)
    if times:
        (cpu, name), spent = max(times.items(), key=lambda item: item[1])
        share = spent / 1e3 / elapsed
        text = (
            f"{cpu} was throttled for heat for {share:.0%} of {elapsed:.0f} s ({name}); have cooling repaired"
        )
        exam.judge("cpu_throttle.share", share, text)
    return bool(changes)


def _number(machine: Machine, name: str) -> Optional[int]:
    return or_else(machine.number, name, None)


def _counters(machine: Machine) -> Dict[Tuple[str, str], int]:
    found = {}
    for cpu in machine.numbered(_CPU, "cpu"):
        folder = f"{_CPU}/{cpu}/thermal_throttle"
        if not machine.exists(folder):
            continue
        for name in (*_COUNTS, *_TIMES):
            count = _number(machine, f"{folder}/{name}")
            if count is not None:
                found[cpu, name] = count
    return found


def _ticks(machine: Machine) -> Dict[str, Tuple[int, int]]:
    """Return each processor's ticks at work and in all (proc_stat(5)); nothing where nobody says."""
    lines = or_else(machine.text, "/proc/stat", "", Unreadable).splitlines()
    found = {}
    for line in lines:
        name, *fields = line.split()
        if (
            name[:3] == "cpu"
            and name[3:].isdecimal()
            and len(fields) >= 5
            and all(word.isdecimal() for word in fields[:8])
        ):
            values = [int(word) for word in fields[:8]]  # guest time is within user's
            found[name] = (sum(values) - values[3] - values[4], sum(values))
    return found


def _busy(before: Optional[Tuple[int, int]], now: Tuple[int, int]) -> bool:
    if before is None or now[1] - before[1] < _TICKS:
        return False
    return (now[0] - before[0]) / (now[1] - before[1]) >= BUSY


def _base(machine: Machine, cpu: str) -> Optional[int]:
    """Return a processor's base clock in kHz."""
    base = _number(machine, f"{_CPU}/{cpu}/cpufreq/base_frequency")
    if base:
        return base
    nominal = _number(machine, f"{_CPU}/{cpu}/acpi_cppc/nominal_freq")
    return nominal * 1000 if nominal else None


def _clock(machine: Machine, cpu: str) -> Optional[float]:
    now, base = _number(machine, f"{_CPU}/{cpu}/cpufreq/scaling_cur_freq"), _base(machine, cpu)
    return now / base if now and base else None


def _caps(machine: Machine) -> List[float]:
    """Return the highest clocks allowed, as shares of the base clock."""
    found = []
    for cpu in machine.numbered(_CPU, "cpu"):
        limit = _number(machine, f"{_CPU}/{cpu}/cpufreq/scaling_max_freq")
        base = _base(machine, cpu) if limit else None
        if limit and base:
            found.append(limit / base)
    return found


_EDAC_ROOT = "/sys/devices/system/edac/mc"
_DAY_S = 86400.0


def _judge_edac(exam: Examination) -> Optional[str]:
    """Read all counters, and judge those of each module."""
    controllers = exam.machine.numbered(_EDAC_ROOT, "mc")
    if not controllers:
        exam.info("no driver counts memory errors on this node (EDAC), as in most VMs")
        return None
    for name in controllers:
        _judge_controller(exam, name)
    return f"no errors that count on {len(controllers)} memory controllers"


def _judge_controller(exam: Examination, name: str) -> None:
    machine, folder = exam.machine, f"{_EDAC_ROOT}/{name}"
    days = max(1.0, _age_s(machine, folder) / _DAY_S)
    left = {kind: _count(machine, f"{folder}/{kind}_count") for kind in ("ue", "ce")}
    places = []
    for dimm in machine.numbered(folder, "dimm"):
        counts = {kind: _count(machine, f"{folder}/{dimm}/dimm_{kind}_count") for kind in left}
        label = or_else(machine.text, f"{folder}/{dimm}/dimm_label", "") or "no label"
        places.append((f"{name}/{dimm}", label, counts))
        left = {kind: max(0, left[kind] - counts[kind]) for kind in left}
    places.append((name, "no module that it names", left))  # errors that no module owns to
    for device, label, counts in places:
        bad, mended = counts["ue"], counts["ce"]
        text = f"{bad} uncorrected memory errors on {device} ({label}); have the module replaced"
        exam.judge("edac.uncorrected", bad, text, device)
        text = f"{mended} corrected memory errors on {device} ({label}), {mended / days:.0f} a day; watch the module"
        exam.judge("edac.corrected", mended / days, text, device)


def _count(machine: Machine, name: str) -> int:
    """Return a counter; one that the driver does not have stands at 0."""
    return max(0, or_else(machine.number, name, 0))


def _age_s(machine: Machine, folder: str) -> float:
    """Return since when a controller counts, in seconds; by default since boot, else a day."""
    counted = _number(machine, f"{folder}/seconds_since_reset")
    return float(counted) if counted is not None else or_else(lambda _: machine.up_s(), folder, _DAY_S)


_PCI_ROOT = "/sys/bus/pci/devices"

#: Vendor -> kind of accelerator, and the classes (first four digits) of those that compute (pci.ids, appendix C): 0300 VGA,
#: 0302 3D, 0380 other display, 1200 processing accelerator. Intel's 0300 are integrated graphics.
_VENDORS = {
    "0x10de": ("cuda", ("0x0300", "0x0302")),
    "0x1002": ("rocm", ("0x0300", "0x0302", "0x0380", "0x1200")),
    "0x8086": ("xpu", ("0x0380",)),
}

#: NVIDIA's bridges are NVSwitches: no accelerators, but they must answer.
_SWITCH = ("0x10de", "0x0680")

#: Kinds that lie on the bus of their node; Graphcore's and Cerebras' do not.
_ON_BUS = ("auto", "cuda", "rocm", "xpu")


@dataclass(frozen=True)
class PciDevice:
    """A device: sysfs name, kind (empty: a switch), and vendor:device."""

    name: str
    kind: str
    model: str


def _judge_pci(exam: Examination) -> Optional[str]:
    """Count the accelerators, and ask every device of a vendor that makes some whether it answers."""
    machine, wanted = exam.machine, exam.wanted
    try:
        names = machine.names_in(_PCI_ROOT)
    except Absent:
        exam.info("no PCI bus is visible; accelerators are known from their drivers alone")
        return None
    devices = [device for device in (_device(machine, name) for name in names) if device is not None]
    accelerators = [device for device in devices if device.kind]
    counted = Counter(device.model for device in accelerators)
    value = ", ".join(f"{count} x {model}" for model, count in sorted(counted.items())) or "none"
    if wanted.devices and wanted.accelerator in _ON_BUS and not _divided(machine):
        there = sum(wanted.accelerator in ("auto", device.kind) for device in accelerators)
        missing = max(0, wanted.devices - there)
        text = f"{missing} of {wanted.devices} accelerators are not on the PCI bus (there: {value}); restart the node, or correct the number"
        exam.judge("pci.missing", missing, text)
    for device in devices:
        text = (
            f"{device.model} at {device.name} does not answer on the PCI bus (it fell off); restart the node"
        )
        try:
            exam.judge("pci.dead", int(not _answers(machine, device.name)), text, device.name)
        except Unreadable as error:
            exam.unknown("pci.dead", error, device.name)
    if wanted.accelerator != "cpu":
        exam.fact("accelerators on PCI", value, severity=Severity.CRITICAL)
    return f"on the PCI bus: {value}"


def _device(machine: Machine, name: str) -> Optional[PciDevice]:
    """Return an accelerator or switch; virtual functions are parts of another, and read as all ones."""
    try:
        vendor, kind = (
            machine.text(f"{_PCI_ROOT}/{name}/vendor").lower(),
            machine.text(f"{_PCI_ROOT}/{name}/class").lower(),
        )
        model = machine.text(f"{_PCI_ROOT}/{name}/device").lower()
    except Absent:
        return None  # it went while we looked: it will be missed
    accelerator, classes = _VENDORS.get(vendor, ("", ()))
    switch = (vendor, kind[:6]) == _SWITCH
    if (kind[:6] not in classes and not switch) or machine.exists(f"{_PCI_ROOT}/{name}/physfn"):
        return None
    return PciDevice(name, "" if switch else accelerator, f"{vendor[2:]}:{model[2:]}")


def _divided(machine: Machine) -> bool:
    """Return whether NVIDIA GPUs are divided into instances (MIG), which only NVML counts."""
    return bool(machine.names("/proc/driver/nvidia/capabilities/gpu*/mig/gi*"))


def _answers(machine: Machine, name: str) -> bool:
    """Return whether a device answers when its vendor is asked for; one that sleeps without power need not."""
    try:
        if machine.head(f"{_PCI_ROOT}/{name}/config", 4) != b"\xff\xff\xff\xff":
            return True
        return machine.text(f"{_PCI_ROOT}/{name}/power_state") == "D3cold"
    except Absent:
        return machine.exists(f"{_PCI_ROOT}/{name}/vendor") and not machine.exists(
            f"{_PCI_ROOT}/{name}/config"
        )


CHECKS = (
    Check.named("inventory", _judge_inventory),
    Check.named("edac", _judge_edac),
    Check.named("pci", _judge_pci),
)


WATCHES = (LoadWatch.named("cpu_throttle", _start_throttle, _observe_throttle, _judge_throttle),)
