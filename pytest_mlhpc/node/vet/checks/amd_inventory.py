"""AMD: whether all devices are there, of the right model, in the right mode and free; the ROCm Validation Suite in a deep vetting."""

from __future__ import annotations

import re
from collections import Counter
from typing import List, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import (
    EXPECTABLE,
    MODELS,
    NOT_OF_AMD,
    OF_TWO_DIES,
    TOLD,
    VENDOR,
    AmdDevice,
    AmdSession,
    applies,
    busy,
    driver_version,
    is_as_expected,
    judge,
    memory_mib,
    open_session,
    property_of,
    property_or_empty,
    unknown,
)
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Done, Machine, Unreadable

#: Modes in which one package shows as several devices (AMD Instinct documentation, compute partitioning).
PARTITIONED = ("CPX", "QPX", "TPX", "DPX")


class AmdInventory:
    """Counts devices, and names those that differ from the partition's description."""

    name = "amd_inventory"
    level = "quick"
    cost_s = 0.5
    reads: Tuple[str, ...] = (
        "amdsmi",
        "/sys/class/drm/card*/device",
        "/sys/class/kfd/kfd/topology/nodes/*/gpu_id",
        "/sys/bus/pci/devices",
        "/sys/module/amdgpu/version",
    )
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look, and say what was seen."""
        if not applies(context):
            return CheckOutcome()
        seen = open_session(machine, context.wanted.accelerator)
        try:
            lost = _lost(machine, seen)
            if not seen.devices and not lost and context.wanted.accelerator == "auto":
                return CheckOutcome()
            findings = [*self._count(machine, context, seen), *self._lost(context, lost)]
            for device in seen.devices:
                findings += self._device(machine, context, seen, device)
            findings += self._driver(machine, context, seen)
            return CheckOutcome((*findings, *_summary(seen)), facts=_facts(machine, seen))
        finally:
            seen.close()

    def _count(self, machine: Machine, context: Context, seen: AmdSession) -> List[Finding]:
        found = len(seen.devices) if seen.library else max(len(seen.devices), _computing(machine))
        least = context.wanted.devices
        if least is None:
            least = 1 if context.wanted.accelerator == "rocm" else found
        models = _models(seen)
        if found != least and _counted_otherwise(machine, seen, found, least):
            return []
        there = f"{found} AMD devices ({models or 'none'})"
        return [
            *judge(
                context,
                self.name,
                "amd.devices_missing",
                max(least - found, 0),
                f"there are {there} where {least} are described: see the kernel's log for amdgpu, and check that the "
                f"job was given all devices{'; ' + seen.without if not found and seen.without else ''}",
                metric="devices",
            ),
            *judge(
                context,
                self.name,
                "amd.devices_extra",
                max(found - least, 0),
                f"there are {there} where {least} are described: correct the description, or the partition mode",
                metric="devices",
            ),
        ]

    def _lost(self, context: Context, lost: List[str]) -> List[Finding]:
        findings: List[Finding] = []
        for name in lost or [""]:
            findings += judge(
                context,
                self.name,
                "amd.not_initialised",
                bool(name),
                f"{name} is on the PCI bus, but no driver has taken it: its memory may have too many bad pages; see the "
                "kernel's log for amdgpu",
                device=name,
            )
        return findings

    def _device(
        self, machine: Machine, context: Context, seen: AmdSession, device: AmdDevice
    ) -> List[Finding]:
        findings: List[Finding] = []
        model = context.wanted.device_model
        differs = _bare(model) not in _bare(device.model)
        reason = (
            f"{device.name} is {device.model or 'of unknown model'} where {model or 'any model'} is described"
        )
        findings += judge(context, self.name, "amd.model", differs, reason, device=device.name)
        for key in EXPECTABLE:
            if key in context.wanted.expect:
                findings += self._property(machine, context, seen, device, key)
        computing = busy(machine, seen, device)
        if computing is not None:
            reason = f"{device.name} computes ({computing} %) before anything of ours does: end what an earlier job left"
            findings += judge(
                context, self.name, "amd.busy", computing, reason, device=device.name, metric="busy"
            )
        return findings

    def _property(
        self, machine: Machine, context: Context, seen: AmdSession, device: AmdDevice, key: str
    ) -> List[Finding]:
        expected = str(context.wanted.expect[key])
        try:
            is_now = property_of(machine, seen, device, key)
        except Unreadable as error:
            return [unknown(self.name, "amd.expectation", error, device.name)]
        differs = not is_as_expected(is_now, expected)
        reason = (
            f"{device.name} has {key.replace('_', ' ')} {is_now} where {expected} is expected: correct either"
        )
        return judge(context, self.name, "amd.expectation", differs, reason, device=device.name)

    def _driver(self, machine: Machine, context: Context, seen: AmdSession) -> List[Finding]:
        """Compare the driver, and name what is expected and nobody looks at."""
        expect, findings = context.wanted.expect, []
        if context.wanted.accelerator == "rocm" and seen.devices:
            for key in (key for key in NOT_OF_AMD if key in expect):
                error = Unreadable(f"nobody can look at {key} of AMD devices, which is described")
                findings.append(unknown(self.name, "amd.expectation", error, ""))
        expected = str(expect.get("driver", ""))
        if not expected or not seen.devices:
            return findings
        is_now = driver_version(machine, seen)
        if not is_now:
            error = Unreadable("neither amdsmi nor /sys/module/amdgpu/version reports the driver's version")
            return [*findings, unknown(self.name, "amd.expectation", error, "")]
        differs = not is_as_expected(is_now, expected)
        reason = f"the driver amdgpu is {is_now} where {expected} is expected: correct either"
        return [*findings, *judge(context, self.name, "amd.expectation", differs, reason)]


def _bare(model: str) -> str:
    return re.sub(r"[^a-z0-9]", "", model.lower())


def _lost(machine: Machine, seen: AmdSession) -> List[str]:
    """Return PCI addresses of accelerators that no driver has; virtual functions are their host's."""
    known = {device.name for device in seen.devices}
    lost = []
    for path in machine.names("/sys/bus/pci/devices/*/vendor"):
        folder = path[: -len("/vendor")]
        name = folder.rpartition("/")[2]
        try:
            is_ours = machine.number(path) == VENDOR and machine.number(f"{folder}/device") in MODELS
            if is_ours and name not in known and not machine.exists(f"{folder}/physfn"):
                lost += [] if machine.exists(f"{folder}/driver") else [name]
        except Unreadable:
            continue
    return lost


def _computing(machine: Machine) -> int:
    """Return how many devices the compute driver (KFD) has, partitions included; processors have the id 0."""
    return sum(
        _number(machine, path) != 0 for path in machine.names("/sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    )


def _number(machine: Machine, path: str) -> int:
    try:
        return machine.number(path)
    except Unreadable:
        return 0


def _counted_otherwise(machine: Machine, seen: AmdSession, found: int, least: int) -> bool:
    """Return whether both counts are right: packages of two dies, or of several partitions."""
    if not least or found < least or found % least:
        return False
    models = {device.model.rpartition(" ")[2] for device in seen.devices}
    if models and models <= set(OF_TWO_DIES):
        return found == 2 * least
    modes = {property_or_empty(machine, seen, device, "compute_partition") for device in seen.devices}
    return bool(modes) and modes <= set(PARTITIONED)


def _facts(machine: Machine, seen: AmdSession) -> Tuple[Fact, ...]:
    """Return what all nodes should have in common: the driver, and by model memory, firmware and modes."""
    check = AmdInventory.name
    driver = driver_version(machine, seen) if seen.devices else ""
    facts = [Fact(check, "amd driver", driver)] if driver else []
    for device in seen.devices:
        told = {f"amd {key.replace('_', ' ')}": property_or_empty(machine, seen, device, key) for key in TOLD}
        told["amd memory"] = _memory(machine, seen, device)
        facts += [
            Fact(check, name, value, device.model, device.name) for name, value in told.items() if value
        ]
    return tuple(facts)


def _memory(machine: Machine, seen: AmdSession, device: AmdDevice) -> str:
    try:
        return f"{memory_mib(machine, seen, device)} MiB"
    except Unreadable:
        return ""


def _models(seen: AmdSession) -> str:
    counted = Counter(device.model or "unknown" for device in seen.devices)
    return ", ".join(f"{count} x {model}" for model, count in sorted(counted.items()))


def _summary(seen: AmdSession) -> List[Finding]:
    check = AmdInventory.name
    found = [Finding(check, Severity.PASS, f"found {_models(seen)}")] if seen.devices else []
    if seen.without:
        found.append(Finding(check, Severity.INFO, f"sysfs is read instead of amdsmi: {seen.without}"))
    return found


#: Levels are 1 to 5; 2 takes minutes (ROCm Validation Suite, README: ``rvs -r``).
LEVEL = "2"

#: The suite's place when it is not on the path.
PROGRAMS = ("rvs", "/opt/rocm/bin/rvs")

TIMEOUT_S = 300.0

#: How a line of ``[RESULT]`` says whether a test passed, or met its target.
RESULT = re.compile(r"\b(?:pass|met): *(TRUE|FALSE)\b")


class AmdRvs:
    """Runs the suite, and believes it only when it says what it has tested."""

    name = "amd_rvs"
    level = "deep"
    cost_s = 150.0
    reads: Tuple[str, ...] = (f"rvs -r {LEVEL}",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look, and say what was seen."""
        if not applies(context):
            return CheckOutcome()
        seen = open_session(machine, context.wanted.accelerator)
        seen.close()
        if not seen.devices:
            return CheckOutcome()
        for program in PROGRAMS:
            try:
                done = machine.command([program, "-r", LEVEL], TIMEOUT_S)
            except Absent:
                continue
            return CheckOutcome(tuple(self._judge(context, done)))
        return CheckOutcome(
            (Finding(self.name, Severity.INFO, "the ROCm Validation Suite (rvs) is not installed"),)
        )

    def _judge(self, context: Context, done: Done) -> List[Finding]:
        results = [line.strip() for line in done.output.splitlines() if RESULT.search(line)]
        failed = [line for line in results if "FALSE" in RESULT.findall(line)]
        reason = f"rvs: {len(failed)} of {len(results)} tests failed, first: {''.join(failed[:1])[:200]}"
        findings = judge(context, self.name, "amd.rvs", len(failed), reason, metric="tests")
        if findings:
            return findings
        if done.code or not results:
            last = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1]
            reason = f"rvs tested nothing (exit code {done.code}), it says: {last[:200]}"
            return [Finding(self.name, Severity.UNKNOWN, reason, rule="amd.rvs")]
        return [Finding(self.name, Severity.PASS, f"rvs passed {len(results)} tests")]


CHECKS: Tuple[Check, ...] = (
    AmdInventory(),
    AmdRvs(),
)
