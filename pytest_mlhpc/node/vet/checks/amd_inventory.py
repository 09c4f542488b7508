"""AMD: whether all devices are there, of the right model, in the right mode and free; the ROCm Validation Suite in a deep vetting."""

from __future__ import annotations

import re
from collections import Counter
from typing import List, Optional

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.amd_devices import (
    EXPECTABLE,
    MODELS,
    NOT_OF_AMD,
    OF_TWO_DIES,
    TOLD,
    VENDOR,
    AmdDevice,
    AmdSession,
    busy,
    driver_version,
    is_as_expected,
    memory_mib,
    property_of,
    with_session,
)
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable, or_else

#: Modes in which one package shows as several devices (AMD Instinct documentation, compute partitioning).
PARTITIONED = ("CPX", "QPX", "TPX", "DPX")


def _judge(exam: Examination, session: AmdSession) -> Optional[str]:
    """Count devices, and name those that differ from the partition's description."""
    lost = _lost(session)
    if not session.devices and not lost and exam.wanted.accelerator == "auto":
        return None
    _judge_count(exam, session)
    for name in lost or [""]:
        text = (
            f"{name} is on the PCI bus, but no driver has taken it: its memory may have too many bad pages; see the "
            "kernel's log for amdgpu"
        )
        exam.judge("amd.not_initialised", int(bool(name)), text, name)
    for device in session.devices:
        _judge_device(exam, session, device)
    _judge_driver(exam, session)
    _tell_facts(exam, session)
    if session.without:
        exam.info(f"sysfs is read instead of amdsmi: {session.without}")
    return f"found {_models(session)}" if session.devices else None


def _judge_count(exam: Examination, session: AmdSession) -> None:
    found = len(session.devices)
    if not session.library:
        found = max(found, _computing(session.machine))
    least = exam.wanted.devices
    if least is None:
        least = 1 if exam.wanted.accelerator == "rocm" else found
    if found != least and _counted_otherwise(session, found, least):
        return
    there = f"there are {found} AMD devices ({_models(session) or 'none'}) where {least} are described"
    text = (
        f"{there}: see the kernel's log for amdgpu, and check that the "
        f"job was given all devices{'; ' + session.without if not found and session.without else ''}"
    )
    exam.judge("amd.devices_missing", max(least - found, 0), text)
    text = f"{there}: correct the description, or the partition mode"
    exam.judge("amd.devices_extra", max(found - least, 0), text)


def _judge_device(exam: Examination, session: AmdSession, device: AmdDevice) -> None:
    name, model = device.name, exam.wanted.device_model
    text = f"{name} is {device.model or 'of unknown model'} where {model or 'any model'} is described"
    exam.judge("amd.model", int(_bare(model) not in _bare(device.model)), text, name)
    for key in EXPECTABLE:
        if key in exam.wanted.expect:
            label = key.replace("_", " ")
            is_now = property_of(session, device, key)
            text = f"{name} has {label} {is_now} where {exam.wanted.expect[key]} is expected: correct either"
            if is_now:
                _judge_expected(exam, key, is_now, text, name)
            else:
                text = f"{name}: {label} is reported neither by amdsmi nor by sysfs"
                exam.unknown("amd.expectation", text, name)
    computing = busy(session, device)
    if computing is not None:
        text = f"{name} computes ({computing} %) before anything of ours does: end what an earlier job left"
        exam.judge("amd.busy", computing, text, name)


def _judge_expected(exam: Examination, key: str, is_now: str, text: str, device: str = "") -> None:
    differs = not is_as_expected(is_now, str(exam.wanted.expect[key]))
    exam.judge("amd.expectation", int(differs), text, device)


def _judge_driver(exam: Examination, session: AmdSession) -> None:
    """Compare the driver, and name what is expected and no check reads."""
    expect = exam.wanted.expect
    if not session.devices:
        return
    if exam.wanted.accelerator == "rocm":
        for key in (key for key in NOT_OF_AMD if key in expect):
            exam.unknown(
                "amd.expectation", f"no check can read {key} of AMD devices, which the partition expects"
            )
    if not expect.get("driver", ""):
        return
    is_now = driver_version(session)
    if is_now:
        text = f"the driver amdgpu is {is_now} where {expect['driver']} is expected: correct either"
        _judge_expected(exam, "driver", is_now, text)
    else:
        text = "neither amdsmi nor /sys/module/amdgpu/version reports the driver's version"
        exam.unknown("amd.expectation", text)


def _bare(model: str) -> str:
    return re.sub(r"[^a-z0-9]", "", model.lower())


def _lost(session: AmdSession) -> List[str]:
    """Return PCI addresses of accelerators that no driver has; virtual functions are their host's."""
    machine, known = session.machine, {device.name for device in session.devices}
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
    files = machine.names("/sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(or_else(machine.number, path, 0, Unreadable) != 0 for path in files)


def _counted_otherwise(session: AmdSession, found: int, least: int) -> bool:
    """Return whether both counts are right: packages of two dies, or of several partitions."""
    if not least or found < least or found % least:
        return False
    models = {device.model.rpartition(" ")[2] for device in session.devices}
    if models and models <= set(OF_TWO_DIES):
        return found == 2 * least
    modes = {property_of(session, device, "compute_partition") for device in session.devices}
    return bool(modes) and modes <= set(PARTITIONED)


def _tell_facts(exam: Examination, session: AmdSession) -> None:
    """Say what all nodes should have in common: the driver, and by model memory, firmware and modes."""
    driver = driver_version(session) if session.devices else ""
    if driver:
        exam.fact("amd driver", driver)
    for device in session.devices:
        properties = {key.replace("_", " "): property_of(session, device, key) for key in TOLD}
        size = memory_mib(session, device)
        properties["memory"] = f"{size} MiB" if size else ""
        for name, value in properties.items():
            if value:
                exam.fact(f"amd {name}", value, device.model, device.name)


def _models(session: AmdSession) -> str:
    counted = Counter(device.model or "unknown" for device in session.devices)
    return ", ".join(f"{count} x {model}" for model, count in sorted(counted.items()))


#: Levels are 1 to 5; 2 takes minutes (ROCm Validation Suite, README: ``rvs -r``).
LEVEL = "2"

#: The suite's place when it is not on the path.
PROGRAMS = ("rvs", "/opt/rocm/bin/rvs")

TIMEOUT_S = 300.0

#: How a line of ``[RESULT]`` says whether a test passed, or met its target.
RESULT = re.compile(r"\b(?:pass|met): *(TRUE|FALSE)\b")


def _judge_rvs(exam: Examination, session: AmdSession) -> Optional[str]:
    """Run the suite, and believe it only when it says what it has tested."""
    for program in PROGRAMS if session.devices else ():
        try:
            done = exam.machine.command([program, "-r", LEVEL], TIMEOUT_S)
        except Absent:
            continue
        results = [line.strip() for line in done.output.splitlines() if RESULT.search(line)]
        failed = [line for line in results if "FALSE" in RESULT.findall(line)]
        text = f"rvs: {len(failed)} of {len(results)} tests failed, first: {''.join(failed[:1])[:200]}"
        if not exam.judge("amd.rvs", len(failed), text) and (done.code or not results):
            last = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1]
            text = f"rvs tested nothing (exit code {done.code}), its output: {last[:200]}"
            exam.unknown("amd.rvs", text)
        return f"rvs passed {len(results)} tests"
    if session.devices:
        exam.info("the ROCm Validation Suite (rvs) is not installed")
    return None


CHECKS = (
    Check.named("amd_inventory", with_session(_judge)),
    Check.named("amd_rvs", with_session(_judge_rvs)),
)
