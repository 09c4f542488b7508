"""PAYLOAD. Accelerators on the PCI bus, whatever their drivers say: one that fell off is missed here without any driver.

*Not there*: no PCI bus at all (some containers and VMs) leaves nothing to look at, and drivers' own checks count devices: said,
and passes. A device's ``power_state`` and ``physfn`` are missing where they do not apply. *There and unreadable*: a bus that may
not be listed is UNKNOWN, and so is a device whose configuration space may not be read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import List, Optional, Tuple

from pytest_mlhpc.node.vet.finding import Fact, Finding, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine, Unreadable
from pytest_mlhpc.node.vet.policy import Wanted, summed, unknown, weigh

_ROOT = "/sys/bus/pci/devices"

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
class Device:
    """A device: sysfs name, kind (empty: a switch), and vendor:device."""

    name: str
    kind: str
    model: str


class Pci:
    """Counts accelerators, and asks each whether it answers."""

    name = "pci"
    level = "quick"
    cost_s = 0.1
    reads: Tuple[str, ...] = (f"{_ROOT}/*/{{vendor,device,class,config,power_state}}",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look at every device of a vendor that makes accelerators."""
        try:
            names = machine.names_in(_ROOT)
        except Absent:
            text = "no PCI bus to look at; drivers alone tell which accelerators there are"
            return Outcome((Finding(self.name, Severity.INFO, text),))
        devices = [device for device in (_device(machine, name) for name in names) if device is not None]
        accelerators = [device for device in devices if device.kind]
        counted = Counter(device.model for device in accelerators)
        value = ", ".join(f"{count} x {model}" for model, count in sorted(counted.items())) or "none"
        found = self._missing(machine, context, accelerators, value) + self._dead(machine, context, devices)
        facts: Tuple[Fact, ...] = ()
        if context.wanted.accelerator != "cpu":
            facts = (Fact(self.name, "accelerators on PCI", value, severity=Severity.CRITICAL),)
        return Outcome(summed(self.name, found, f"on the PCI bus: {value}"), facts=facts)

    def _missing(
        self, machine: Machine, context: Context, devices: List[Device], value: str
    ) -> List[Finding]:
        wanted = context.wanted
        if not wanted.devices or wanted.accelerator not in _ON_BUS or _divided(machine):
            return []
        there = sum(_serves(device, wanted) for device in devices)
        missing = max(0, wanted.devices - there)
        text = f"{missing} of {wanted.devices} accelerators are not on the PCI bus (there: {value}); restart the node, or correct the number"
        return [weigh(self.name, context.policy["pci.missing"], missing, text)]

    def _dead(self, machine: Machine, context: Context, devices: List[Device]) -> List[Finding]:
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


def _device(machine: Machine, name: str) -> Optional[Device]:
    """Return an accelerator or switch; virtual functions are parts of another, and read as all ones."""
    try:
        vendor, kind = (
            machine.text(f"{_ROOT}/{name}/vendor").lower(),
            machine.text(f"{_ROOT}/{name}/class").lower(),
        )
        model = machine.text(f"{_ROOT}/{name}/device").lower()
    except Absent:
        return None  # it went while we looked: it will be missed
    accelerator, classes = _VENDORS.get(vendor, ("", ()))
    switch = (vendor, kind[:6]) == _SWITCH
    if (kind[:6] not in classes and not switch) or machine.exists(f"{_ROOT}/{name}/physfn"):
        return None
    return Device(name, "" if switch else accelerator, f"{vendor[2:]}:{model[2:]}")


def _serves(device: Device, wanted: Wanted) -> bool:
    return wanted.accelerator in ("auto", device.kind)


def _divided(machine: Machine) -> bool:
    """Return whether NVIDIA GPUs are divided into instances (MIG), which only NVML counts."""
    return bool(machine.names("/proc/driver/nvidia/capabilities/gpu*/mig/gi*"))


def _answers(machine: Machine, name: str) -> bool:
    """Return whether a device answers when its vendor is asked for; one that sleeps without power need not."""
    try:
        if machine.head(f"{_ROOT}/{name}/config", 4) != b"\xff\xff\xff\xff":
            return True
        return machine.text(f"{_ROOT}/{name}/power_state") == "D3cold"
    except Absent:
        return machine.exists(f"{_ROOT}/{name}/vendor") and not machine.exists(f"{_ROOT}/{name}/config")


CHECKS: Tuple[Check, ...] = (Pci(),)
