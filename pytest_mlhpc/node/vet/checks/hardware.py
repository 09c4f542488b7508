"""Processors and memory: throttled or slow processors, errors that memory controllers count, accelerators on the PCI bus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine, Unreadable, Watch
from pytest_mlhpc.node.vet.policy import ExpectedNode, summed, unknown, weigh

_CPU = "/sys/devices/system/cpu"
_COUNTS = ("core_throttle_count", "package_throttle_count")
_TIMES = ("core_throttle_total_time_ms", "package_throttle_total_time_ms")

#: A processor is busy that ran for this share of the time between two samples.
BUSY = 0.9

#: Most processors whose clock is read in one sample: on some kernels each takes 10 ms.
MOST_CLOCKS = 8

#: Least time between two looks at /proc/stat that says something, in its ticks (usually 10 ms each).
_TICKS = 10


@dataclass(frozen=True)
class ProcessorState:
    """Counters at the begin, by processor and name; when that was; busy and total ticks at the last sample; clocks as shares of the base clock."""

    counters: Mapping[Tuple[str, str], int]
    since: float
    ticks: Mapping[str, Tuple[int, int]]
    clocks: Tuple[float, ...] = field(default_factory=tuple)


class CpuThrottle:
    """Watches the node's processors."""

    name = "cpu_throttle"
    level = "quick"
    cost_s = 0.3
    reads: Tuple[str, ...] = (
        f"{_CPU}/cpu*/thermal_throttle",
        f"{_CPU}/cpu*/cpufreq/{{scaling_cur_freq,scaling_max_freq,base_frequency}}",
        f"{_CPU}/cpu*/acpi_cppc/nominal_freq",
        "/proc/stat",
    )
    purpose = ""

    def begin(self, machine: Machine, _context: Context) -> ProcessorState:
        """Read all counters."""
        return ProcessorState(_counters(machine), machine.clock(), _ticks(machine))

    def sample(self, machine: Machine, state: object) -> ProcessorState:
        """Read the clocks of processors that were busy since the last sample."""
        assert isinstance(state, ProcessorState)  # noqa: S101 - what begin returned
        ticks = _ticks(machine)
        busy = [name for name in sorted(ticks) if _busy(state.ticks.get(name), ticks[name])]
        step = max(1, len(busy) // MOST_CLOCKS)
        clocks = [_clock(machine, name) for name in busy[::step][:MOST_CLOCKS]]
        return replace(
            state, ticks=ticks, clocks=state.clocks + tuple(one for one in clocks if one is not None)
        )

    def end(self, machine: Machine, context: Context, state: object) -> CheckOutcome:
        """Read the counters again, and weigh what has changed."""
        assert isinstance(state, ProcessorState)  # noqa: S101 - what begin returned
        elapsed = max(1.0, machine.clock() - state.since)
        caps = _caps(machine)
        found = [
            *_heat(context, state.counters, _counters(machine), elapsed),
            *_judge_clocks(context, state.clocks, caps),
        ]
        if not found:
            return CheckOutcome(
                (
                    Finding(
                        self.name,
                        Severity.INFO,
                        "this node shows neither temperature nor clocks of its processors",
                    ),
                )
            )
        facts = (Fact(self.name, "lowest limit of the clock", f"{min(caps):.2f} x base"),) if caps else ()
        passed = f"not throttled in {elapsed:.0f} s; {len(state.clocks)} clocks of busy processors read"
        return CheckOutcome(summed(self.name, found, passed), facts=facts)


def _heat(
    context: Context,
    before: Mapping[Tuple[str, str], int],
    after: Mapping[Tuple[str, str], int],
    elapsed: float,
) -> List[Finding]:
    """Return what the counters of heat come to: the worst processor speaks for the node."""
    changes = {place: max(0, after[place] - before[place]) for place in before if place in after}
    if not changes:
        return []
    events = {place: change for place, change in changes.items() if place[1] in _COUNTS}
    times = {place: change for place, change in changes.items() if place[1] in _TIMES}
    found = []
    if events:
        (cpu, name), count = max(events.items(), key=lambda item: item[1])
        text = f"{cpu} was throttled for heat {count} times in {elapsed:.0f} s ({name}); look at cooling"
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.events"], count, text))
    if times:
        (cpu, name), spent = max(times.items(), key=lambda item: item[1])
        share = spent / 1e3 / elapsed
        text = (
            f"{cpu} was throttled for heat for {share:.0%} of {elapsed:.0f} s ({name}); have cooling repaired"
        )
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.share"], share, text))
    return found


def _judge_clocks(context: Context, clocks: Tuple[float, ...], caps: List[float]) -> List[Finding]:
    found = []
    if clocks:
        middle = median(clocks)
        text = f"busy processors run at {middle:.0%} of their base clock; look at power limits, PROCHOT and cooling"
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.clock"], middle, text))
    if caps:
        text = f"the clock may not go beyond {min(caps):.0%} of the base clock (scaling_max_freq); lift the limit"
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.cap"], min(caps), text))
    return found


def _cpus(machine: Machine) -> List[str]:
    try:
        return [name for name in machine.names_in(_CPU) if name[:3] == "cpu" and name[3:].isdecimal()]
    except Absent:
        return []


def _number(machine: Machine, name: str) -> Optional[int]:
    """Return a number, None where there is none."""
    try:
        return machine.number(name)
    except Absent:
        return None


def _counters(machine: Machine) -> Dict[Tuple[str, str], int]:
    found = {}
    for cpu in _cpus(machine):
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
    try:
        lines = machine.text("/proc/stat").splitlines()
    except Unreadable:
        return {}
    found = {}
    for line in lines:
        name, *words = line.split()
        if (
            name[:3] == "cpu"
            and name[3:].isdecimal()
            and len(words) >= 5
            and all(word.isdecimal() for word in words[:8])
        ):
            values = [int(word) for word in words[:8]]  # guest time is within user's
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
    for cpu in _cpus(machine):
        limit = _number(machine, f"{_CPU}/{cpu}/cpufreq/scaling_max_freq")
        base = _base(machine, cpu) if limit else None
        if limit and base:
            found.append(limit / base)
    return found


WATCHES: Tuple[Watch, ...] = (CpuThrottle(),)


_EDAC_ROOT = "/sys/devices/system/edac/mc"
_DAY_S = 86400.0


class Edac:
    """Counts of corrected and uncorrected errors, by memory module where the driver knows it."""

    name = "edac"
    level = "quick"
    cost_s = 0.1
    reads: Tuple[str, ...] = (
        f"{_EDAC_ROOT}/mc*/{{ce,ue}}_count",
        f"{_EDAC_ROOT}/mc*/dimm*/dimm_{{ce,ue}}_count",
    )
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Read all counters, and weigh those of each module."""
        try:
            controllers = [
                name
                for name in machine.names_in(_EDAC_ROOT)
                if name.startswith("mc") and name[2:].isdecimal()
            ]
        except Absent:
            controllers = []
        if not controllers:
            text = "no driver counts memory errors on this node (EDAC), as in most VMs"
            return CheckOutcome((Finding(self.name, Severity.INFO, text),))
        found: List[Finding] = []
        for name in controllers:
            found += self._controller(machine, context, name)
        passed = f"no errors that count on {len(controllers)} memory controllers"
        return CheckOutcome(summed(self.name, found, passed))

    def _controller(self, machine: Machine, context: Context, name: str) -> List[Finding]:
        folder = f"{_EDAC_ROOT}/{name}"
        days = max(1.0, _age_s(machine, folder) / _DAY_S)
        left = {kind: _count(machine, f"{folder}/{kind}_count") for kind in ("ue", "ce")}
        places = []
        for dimm in machine.names_in(folder):
            if dimm.startswith("dimm") and dimm[4:].isdecimal():
                counts = {kind: _count(machine, f"{folder}/{dimm}/dimm_{kind}_count") for kind in left}
                places.append((f"{name}/{dimm}", _label(machine, f"{folder}/{dimm}"), counts))
                left = {kind: max(0, left[kind] - counts[kind]) for kind in left}
        places.append((name, "no module that it names", left))  # errors that no module owns to
        found = []
        for device, label, counts in places:
            bad, mended = counts["ue"], counts["ce"]
            text = f"{bad} uncorrected memory errors on {device} ({label}); have the module replaced"
            found.append(weigh(self.name, context.policy["edac.uncorrected"], bad, text, device=device))
            text = f"{mended} corrected memory errors on {device} ({label}), {mended / days:.0f} a day; watch the module"
            found.append(
                weigh(self.name, context.policy["edac.corrected"], mended / days, text, device=device)
            )
        return found


def _count(machine: Machine, name: str) -> int:
    """Return a counter; one that the driver does not have stands at 0."""
    try:
        return max(0, machine.number(name))
    except Absent:
        return 0


def _age_s(machine: Machine, folder: str) -> float:
    """Return since when a controller counts, in seconds; by default since boot, else a day."""
    try:
        return float(machine.number(f"{folder}/seconds_since_reset"))
    except Absent:
        pass
    try:
        return machine.up_s()
    except Absent:
        return _DAY_S


def _label(machine: Machine, folder: str) -> str:
    try:
        return machine.text(f"{folder}/dimm_label") or "no label"
    except Absent:
        return "no label"


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


class Pci:
    """Counts accelerators, and asks each whether it answers."""

    name = "pci"
    level = "quick"
    cost_s = 0.1
    reads: Tuple[str, ...] = (f"{_PCI_ROOT}/*/{{vendor,device,class,config,power_state}}",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look at every device of a vendor that makes accelerators."""
        try:
            names = machine.names_in(_PCI_ROOT)
        except Absent:
            text = "no PCI bus is visible; accelerators are known from their drivers alone"
            return CheckOutcome((Finding(self.name, Severity.INFO, text),))
        devices = [device for device in (_device(machine, name) for name in names) if device is not None]
        accelerators = [device for device in devices if device.kind]
        counted = Counter(device.model for device in accelerators)
        value = ", ".join(f"{count} x {model}" for model, count in sorted(counted.items())) or "none"
        found = self._missing(machine, context, accelerators, value) + self._dead(machine, context, devices)
        facts: Tuple[Fact, ...] = ()
        if context.wanted.accelerator != "cpu":
            facts = (Fact(self.name, "accelerators on PCI", value, severity=Severity.CRITICAL),)
        return CheckOutcome(summed(self.name, found, f"on the PCI bus: {value}"), facts=facts)

    def _missing(
        self, machine: Machine, context: Context, devices: List[PciDevice], value: str
    ) -> List[Finding]:
        wanted = context.wanted
        if not wanted.devices or wanted.accelerator not in _ON_BUS or _divided(machine):
            return []
        there = sum(_serves(device, wanted) for device in devices)
        missing = max(0, wanted.devices - there)
        text = f"{missing} of {wanted.devices} accelerators are not on the PCI bus (there: {value}); restart the node, or correct the number"
        return [weigh(self.name, context.policy["pci.missing"], missing, text)]

    def _dead(self, machine: Machine, context: Context, devices: List[PciDevice]) -> List[Finding]:
        found = []
        bound = context.policy["pci.dead"]
        for device in devices:
            try:
                dead = not _answers(machine, device.name)
            except Unreadable as error:
                found.append(unknown(self.name, bound, error, device=device.name))
                continue
            text = f"{device.model} at {device.name} does not answer on the PCI bus (it fell off); restart the node"
            found.append(weigh(self.name, bound, int(dead), text, device=device.name))
        return found


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


def _serves(device: PciDevice, wanted: ExpectedNode) -> bool:
    return wanted.accelerator in ("auto", device.kind)


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


CHECKS: Tuple[Check, ...] = (
    Edac(),
    Pci(),
)
