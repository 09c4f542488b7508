"""PAYLOAD. Memory errors that the memory controllers' drivers count (Linux, Documentation/admin-guide/RAS).

*Not there*: no ``edac`` folder, or no ``mc*`` in it, is a node whose controllers have no driver, as in every VM; nothing can be
faulty in what does not exist, so that is said and passes (the kernel log still tells of machine checks). Folders ``dimm*``
and ``seconds_since_reset`` are missing with old drivers. *There and unreadable* (no right, no number): UNKNOWN.
"""

from __future__ import annotations

from typing import List, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine
from pytest_mlhpc.node.vet.policy import summed, weigh

_ROOT = "/sys/devices/system/edac/mc"
_DAY_S = 86400.0


class Edac:
    """Counts of corrected and uncorrected errors, by memory module where the driver knows it."""

    name = "edac"
    level = "quick"
    cost_s = 0.1
    reads: Tuple[str, ...] = (f"{_ROOT}/mc*/{{ce,ue}}_count", f"{_ROOT}/mc*/dimm*/dimm_{{ce,ue}}_count")
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Read all counters, and weigh those of each module."""
        try:
            controllers = [
                name for name in machine.names_in(_ROOT) if name.startswith("mc") and name[2:].isdecimal()
            ]
        except Absent:
            controllers = []
        if not controllers:
            text = "no driver counts memory errors on this node (EDAC), as in most VMs"
            return Outcome((Finding(self.name, Severity.INFO, text),))
        found: List[Finding] = []
        for name in controllers:
            found += self._controller(machine, context, name)
        passed = f"no errors that count on {len(controllers)} memory controllers"
        return Outcome(summed(self.name, found, passed))

    def _controller(self, machine: Machine, context: Context, name: str) -> List[Finding]:
        folder = f"{_ROOT}/{name}"
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


CHECKS: Tuple[Check, ...] = (Edac(),)
