"""AMD: errors of device memory, pages that went bad, and whether errors are looked for at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import (
    AmdDevice,
    AmdSession,
    applies,
    entry,
    judge,
    number,
    open_session,
    unknown,
)
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine, Unreadable

#: amdsmi_memory_page_status_t, and the letters of sysfs.
RESERVED, PENDING, UNRESERVABLE = 0, 1, 2
LETTERS = {"R": RESERVED, "P": PENDING, "F": UNRESERVABLE}

#: Bytes for each of which older drivers allow one bad page (Linux amdgpu_ras.c, RAS_BAD_PAGE_COVER).
BYTES_PER_BAD_PAGE = 100 << 20


@dataclass(frozen=True)
class Errors:
    """Counts since the driver was loaded."""

    uncorrectable: int
    corrected: int
    deferred: int = 0


class AmdMemory:
    """Judges each device's ECC counts, bad pages, and RAS state."""

    name = "amd_memory"
    level = "quick"
    cost_s = 0.5
    reads: Tuple[str, ...] = (
        "amdsmi",
        "/sys/class/drm/card*/device/ras/*_err_count",
        "/sys/class/drm/card*/device/ras/gpu_vram_bad_pages",
        "/sys/class/drm/card*/device/ras/features",
    )
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look, and say what was seen."""
        if not applies(context):
            return CheckOutcome()
        seen = open_session(machine, context.wanted.accelerator)
        try:
            findings: List[Finding] = []
            for device in seen.devices:
                findings += self._errors(machine, context, seen, device)
                findings += self._pages(machine, context, seen, device)
                findings += self._guarded(machine, context, seen, device)
            if seen.devices and not findings:
                findings = [
                    Finding(self.name, Severity.PASS, f"the memory of {len(seen.devices)} devices is healthy")
                ]
            return CheckOutcome(tuple(findings))
        finally:
            seen.close()

    def _errors(
        self, machine: Machine, context: Context, seen: AmdSession, device: AmdDevice
    ) -> List[Finding]:
        try:
            errors = count_errors(machine, seen, device)
        except Unreadable as error:
            return [unknown(self.name, "amd.ecc_uncorrectable", error, device.name)]
        name = device.name
        return [
            *judge(
                context,
                self.name,
                "amd.ecc_uncorrectable",
                errors.uncorrectable,
                f"{name} has had {errors.uncorrectable} uncorrectable memory errors since its driver was loaded: reset "
                "it, and have it replaced if they return",
                device=name,
                metric="uncorrectable_errors",
            ),
            *judge(
                context,
                self.name,
                "amd.ecc_deferred",
                errors.deferred,
                f"{name} holds {errors.deferred} memory errors that no program has met yet: reset it soon",
                device=name,
                metric="deferred_errors",
            ),
            *judge(
                context,
                self.name,
                "amd.ecc_corrected",
                errors.corrected,
                f"{name} has corrected {errors.corrected} memory errors since its driver was loaded: watch it",
                device=name,
                metric="corrected_errors",
            ),
        ]

    def _pages(
        self, machine: Machine, context: Context, seen: AmdSession, device: AmdDevice
    ) -> List[Finding]:
        try:
            pages = bad_pages(machine, seen, device)
        except Unreadable as error:
            return [unknown(self.name, "amd.bad_pages_unreservable", error, device.name)]
        name, total = device.name, sum(pages.values())
        stuck, pending = pages.get(UNRESERVABLE, 0), pages.get(PENDING, 0)
        findings = [
            *judge(
                context,
                self.name,
                "amd.bad_pages_unreservable",
                stuck,
                f"{name} has {stuck} bad memory pages that cannot be taken out of use: restart the node",
                device=name,
                metric="pages",
            ),
            *judge(
                context,
                self.name,
                "amd.bad_pages_pending",
                pending,
                f"{name} has {pending} bad memory pages that are in use until it is reset",
                device=name,
                metric="pages",
            ),
        ]
        most = allowed_pages(machine, seen, device)
        if most:
            findings += judge(
                context,
                self.name,
                "amd.bad_pages_share",
                total / most,
                f"{name} has {total} bad memory pages of the {most} after which it must be replaced",
                device=name,
                metric="pages",
            )
        if total and not findings:
            reason = f"{name} has retired {total} memory pages"
            findings = [Finding(self.name, Severity.INFO, reason, name, metric="pages", value=float(total))]
        return findings

    def _guarded(
        self, machine: Machine, context: Context, seen: AmdSession, device: AmdDevice
    ) -> List[Finding]:
        """Say whether the memory controller's errors are counted; what nobody tells is no fault beside counts."""
        guarded = is_guarded(machine, seen, device)
        if guarded is None:
            return []
        reason = f"{device.name} does not look for memory errors (RAS of UMC is off): its counts mean nothing; switch it on"
        return judge(context, self.name, "amd.ras_disabled", not guarded, reason, device=device.name)


def count_errors(machine: Machine, seen: AmdSession, device: AmdDevice) -> Errors:
    """Return a device's counts over all blocks.

    Raises:
        Unreadable: neither ``amdsmi`` nor sysfs tells.
    """
    try:
        answer = seen.ask("gpu_total_ecc_count", device)
    except Unreadable as error:
        return _counts_of_sysfs(machine, device, error)
    uncorrectable, corrected = (
        number(entry(answer, key)) for key in ("uncorrectable_count", "correctable_count")
    )
    if uncorrectable is None or corrected is None:
        refused = Unreadable(f"amdsmi does not report this device's memory errors: {answer}")
        return _counts_of_sysfs(machine, device, refused)
    return Errors(uncorrectable, corrected, number(entry(answer, "deferred_count")) or 0)


def _counts_of_sysfs(machine: Machine, device: AmdDevice, before: Unreadable) -> Errors:
    """Add up the files of all blocks; newer drivers have ``aca_umc`` in the place of ``umc_err_count``."""
    if not device.folder:
        raise Unreadable(f"memory errors cannot be counted: {before}")
    files = machine.names(f"{device.folder}/ras/*_err_count") or machine.names(f"{device.folder}/ras/aca_*")
    if not any("umc" in file for file in files):
        raise Absent(
            f"memory errors cannot be counted: {before}, and {device.folder}/ras does not count them either"
        )
    total = {"ue": 0, "ce": 0, "de": 0}
    for file in files:
        counted = machine.key_values(file)
        for key in total:
            word = counted.get(key, "0" if key == "de" else "")
            if not word.isdigit():
                raise Unreadable(f"{file} holds {machine.text(file)[:40]!r} instead of counts")
            total[key] += int(word)
    return Errors(total["ue"], total["ce"], total["de"])


def bad_pages(machine: Machine, seen: AmdSession, device: AmdDevice) -> Dict[int, int]:
    """Return how many bad pages a device has in each state.

    Raises:
        Unreadable: neither ``amdsmi`` nor sysfs tells.
    """
    try:
        answer = seen.ask("gpu_bad_page_info", device)
        if isinstance(answer, str):  # early releases have a sentence in the place of an empty list
            answer = []
        states = [number(entry(page, "status")) for page in answer] if isinstance(answer, list) else [None]
    except Unreadable as error:
        if not device.folder:
            raise Unreadable(f"bad pages cannot be counted: {error}") from error
        lines = machine.text(f"{device.folder}/ras/gpu_vram_bad_pages").splitlines()
        states = [LETTERS.get(line.rpartition(":")[2].strip()) for line in lines if line.strip()]
    counted: Dict[int, int] = {}
    for state in states:
        if state is None or state not in LETTERS.values():
            raise Unreadable("the list of bad pages makes no sense")
        counted[state] = counted.get(state, 0) + 1
    return counted


def allowed_pages(machine: Machine, seen: AmdSession, device: AmdDevice) -> Optional[int]:
    """Return after how many bad pages the driver gives a device up; None if nobody can tell."""
    told = number(seen.maybe("gpu_bad_page_threshold", device), 32)
    if told:
        return told
    size = number(entry(seen.maybe("gpu_vram_info", device), "vram_size", "vram_size_mb"))
    if size:
        return (size << 20) // BYTES_PER_BAD_PAGE
    try:
        return (
            machine.number(f"{device.folder}/mem_info_vram_total") // BYTES_PER_BAD_PAGE
            if device.folder
            else None
        )
    except Unreadable:
        return None


def is_guarded(machine: Machine, seen: AmdSession, device: AmdDevice) -> Optional[bool]:
    """Return whether the memory controller's errors are looked for; None if nobody tells."""
    answer = seen.maybe("gpu_ras_block_features_enabled", device)
    for block in answer if isinstance(answer, list) else ():
        if entry(block, "block") == "UMC":
            return str(entry(block, "status")) == "ENABLED"
    if not device.folder:
        return None
    try:
        mask = re.search(r"0x([0-9a-fA-F]+)", machine.text(f"{device.folder}/ras/features"))
    except Unreadable:
        return None
    return bool(int(mask[1], 16) & 1) if mask else None


CHECKS: Tuple[Check, ...] = (AmdMemory(),)
