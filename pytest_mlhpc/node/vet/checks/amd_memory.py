"""AMD: errors of device memory, pages that went bad, and whether errors are looked for at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Optional

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.amd_devices import (
    AmdDevice,
    AmdSession,
    entry,
    memory_mib,
    number,
    with_session,
)
from pytest_mlhpc.node.vet.machine import Absent, Unreadable

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


def _judge(exam: Examination, session: AmdSession) -> Optional[str]:
    for device in session.devices:
        _judge_errors(exam, session, device)
        _judge_pages(exam, session, device)
        if is_guarded(session, device) is not None:  # what nobody tells is no fault beside counts
            text = f"{device.name} does not look for memory errors (RAS of UMC is off): its counts mean nothing; switch it on"
            exam.judge("amd.ras_disabled", int(not is_guarded(session, device)), text, device.name)
    return f"the memory of {len(session.devices)} devices is healthy" if session.devices else None


def _judge_errors(exam: Examination, session: AmdSession, device: AmdDevice) -> None:
    name = device.name
    try:
        errors = count_errors(session, device)
    except Unreadable as error:
        exam.unknown("amd.ecc_uncorrectable", f"{name}: {error}", name)
        return
    text = (
        f"{name} has had {errors.uncorrectable} uncorrectable memory errors since its driver was loaded: reset "
        "it, and have it replaced if they return"
    )
    exam.judge("amd.ecc_uncorrectable", errors.uncorrectable, text, name)
    text = f"{name} holds {errors.deferred} memory errors that no program has met yet: reset it soon"
    exam.judge("amd.ecc_deferred", errors.deferred, text, name)
    text = f"{name} has corrected {errors.corrected} memory errors since its driver was loaded: watch it"
    exam.judge("amd.ecc_corrected", errors.corrected, text, name)


def _judge_pages(exam: Examination, session: AmdSession, device: AmdDevice) -> None:
    name = device.name
    try:
        pages = bad_pages(session, device)
    except Unreadable as error:
        exam.unknown("amd.bad_pages_unreservable", f"{name}: {error}", name)
        return
    stuck, pending, total = pages.get(UNRESERVABLE, 0), pages.get(PENDING, 0), sum(pages.values())
    text = f"{name} has {stuck} bad memory pages that cannot be taken out of use: restart the node"
    bad = exam.judge("amd.bad_pages_unreservable", stuck, text, name)
    text = f"{name} has {pending} bad memory pages that are in use until it is reset"
    bad = exam.judge("amd.bad_pages_pending", pending, text, name) or bad
    most = allowed_pages(session, device)
    if most:
        text = f"{name} has {total} bad memory pages of the {most} after which it must be replaced"
        bad = exam.judge("amd.bad_pages_share", total / most, text, name) or bad
    if total and not bad:
        exam.info(f"{name} has retired {total} memory pages", name, metric="pages", value=float(total))


def count_errors(session: AmdSession, device: AmdDevice) -> Errors:
    """Return a device's counts over all blocks.

    Raises:
        Unreadable: neither ``amdsmi`` nor sysfs tells.
    """
    try:
        answer = session.ask("gpu_total_ecc_count", device)
    except Unreadable as error:
        return _counts_of_sysfs(session, device, error)
    uncorrectable, corrected = (
        number(entry(answer, key)) for key in ("uncorrectable_count", "correctable_count")
    )
    if uncorrectable is None or corrected is None:
        refused = Unreadable(f"amdsmi does not report this device's memory errors: {answer}")
        return _counts_of_sysfs(session, device, refused)
    return Errors(uncorrectable, corrected, number(entry(answer, "deferred_count")) or 0)


def _counts_of_sysfs(session: AmdSession, device: AmdDevice, before: Unreadable) -> Errors:
    """Add up the files of all blocks; newer drivers have ``aca_umc`` in the place of ``umc_err_count``."""
    if not device.folder:
        raise Unreadable(f"memory errors cannot be counted: {before}")
    machine = session.machine
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


def bad_pages(session: AmdSession, device: AmdDevice) -> Dict[int, int]:
    """Return how many bad pages a device has in each state.

    Raises:
        Unreadable: neither ``amdsmi`` nor sysfs tells.
    """
    try:
        answer = session.ask("gpu_bad_page_info", device)
        if isinstance(answer, str):  # early releases have a sentence in the place of an empty list
            answer = []
        states = [number(entry(page, "status")) for page in answer] if isinstance(answer, list) else [None]
    except Unreadable as error:
        if not device.folder:
            raise Unreadable(f"bad pages cannot be counted: {error}") from error
        lines = session.machine.text(f"{device.folder}/ras/gpu_vram_bad_pages").splitlines()
        states = [LETTERS.get(line.rpartition(":")[2].strip()) for line in lines if line.strip()]
    counted: Dict[int, int] = {}
    for state in states:
        if state is None or state not in LETTERS.values():
            raise Unreadable("the list of bad pages makes no sense")
        counted[state] = counted.get(state, 0) + 1
    return counted


def allowed_pages(session: AmdSession, device: AmdDevice) -> int:
    """Return after how many bad pages the driver gives a device up; 0 if nobody can tell."""
    threshold = number(session.maybe("gpu_bad_page_threshold", device), 32)
    return threshold or (memory_mib(session, device) << 20) // BYTES_PER_BAD_PAGE


def is_guarded(session: AmdSession, device: AmdDevice) -> Optional[bool]:
    """Return whether the memory controller's errors are looked for; None if nobody tells."""
    answer = session.maybe("gpu_ras_block_features_enabled", device)
    for block in answer if isinstance(answer, list) else ():
        if entry(block, "block") == "UMC":
            return str(entry(block, "status")) == "ENABLED"
    mask = re.search(r"0x([0-9a-fA-F]+)", session.text(device, "ras/features"))
    return bool(int(mask[1], 16) & 1) if mask else None


CHECKS = (Check.named("amd_memory", with_session(_judge)),)
