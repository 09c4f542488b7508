"""NVIDIA: errors of device memory, NVLinks, and the fabric of NVSwitches."""

from __future__ import annotations

import ctypes
from typing import Any, List

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.nvidia_devices import (
    INVALID_ARGUMENT,
    Answer,
    LinkStates,
    NvidiaDevice,
    NvmlLibrary,
    link_states,
    unread,
    with_devices,
)

#: nvmlGpuFabricState_t (NVML API reference, Fabric definitions).
FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}
COMPLETED, UNREGISTERED = 3, (1, 2)


def is_split(library: NvmlLibrary, device: NvidiaDevice) -> bool:
    """Return whether MIG is on: then NVLinks and memory's rows are out of sight."""
    mode = library.ask("nvmlDeviceGetMigMode", device.handle)
    return bool(mode.ok and mode.value[0])


def _judge_all_links(exam: Examination, library: NvmlLibrary, devices: List[NvidiaDevice]) -> str:
    """Judge the links of devices of which we know how many they have."""
    states = {
        device.index: link_states(library, device)
        for device in devices
        if device.model is not None and device.model.links and not is_split(library, device)
    }
    linked = any(state.up for state in states.values())
    for device in devices:
        if device.model is None or device.index not in states:
            continue
        alone = not linked and (len(devices) == 1 or device.model.optional)
        _judge_links(exam, device, states[device.index], alone=alone)
        if device.model.fabric:
            _judge_fabric(exam, library, device)
    return "NVLinks are up, as far as the devices have some"


def _judge_links(exam: Examination, device: NvidiaDevice, states: LinkStates, *, alone: bool) -> None:
    """Judge one device's links; *alone*: none may lead anywhere, as there is no other device or no link between them."""
    if states.trouble is not None:
        essential = not alone or not states.trouble.absent  # NVLink may be switched off in the driver
        unread(
            exam,
            "nvidia.nvlinks_down",
            device,
            "whether an NVLink is up",
            states.trouble,
            essential=essential,
        )
    if alone and not states.up:
        exam.info(f"no NVLink leads from {device.place} to another device", device.label)
        return
    model = device.model
    key = "nvidia.nvlinks_partly" if model and model.direct and states.up else "nvidia.nvlinks_down"
    links = states.up + states.down
    fixed = model is not None and not model.direct and not model.optional and states.trouble is None
    most = (
        max(links, model.links) if model and fixed else links
    )  # links that NVML does not show at all are missing
    text = (
        f"{most - states.up} of {most} NVLinks of {device.place} are down; reset the device, "
        "and restart the fabric manager where there is one"
    )
    exam.judge(key, most - states.up, text, device.label)


def _judge_fabric(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    """Ask for the registration with the fabric: until it is completed, CUDA does not start (error 802)."""
    make = getattr(library.module, "c_nvmlGpuFabricInfo_v2_t", None)
    if make is None:
        return
    info = make()
    answer = library.ask("nvmlDeviceGetGpuFabricInfoV", device.handle, ctypes.byref(info))
    if not answer.ok:
        unread(exam, "nvidia.fabric", device, "whether it is in the fabric", answer)
        return
    failed = info.state == COMPLETED and info.status != 0
    state = (
        f"ended with error {info.status}"
        if failed
        else f"is {FABRIC_STATES.get(info.state, 'not supported')}"
    )
    text = (
        f"the registration of {device.place} with the NVLink fabric {state}, so that CUDA cannot start; "
        "restart the fabric manager"
    )
    exam.judge("nvidia.fabric", int(failed or info.state in UNREGISTERED), text, device.label)


#: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, and nvmlDeviceGpuRecoveryAction_t (NVML API reference).
RECOVERY_ACTION = 230
ACTIONS = {
    1: "reset the device",
    2: "restart the node",
    3: "end all work that uses peer access",
    4: "end all work that uses peer access, and reset the device",
    5: "recover the IMEX domain",
    6: "reset the device's PCIe bus",
    7: "restart the system",
}

#: nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t, nvmlPageRetirementCause_t (NVML API reference).
CORRECTED, UNCORRECTED = 0, 1
VOLATILE = 0
DRAM, SRAM = 2, 7
CAUSES = (0, 1)

#: nvmlValueType_t -> member of nvmlValue_t.
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def _judge_memory(exam: Examination, library: NvmlLibrary, devices: List[NvidiaDevice]) -> str:
    for device in devices:
        _judge_action(exam, library, device)
        _judge_rows(exam, library, device)
        _judge_errors(exam, library, device)
        _judge_threshold(exam, library, device)
    return "no device's memory has had errors that matter"


def field(library: NvmlLibrary, handle: Any, ident: int) -> Answer:
    """Return the value of one NVML field."""
    answer = library.ask("nvmlDeviceGetFieldValues", handle, [ident])
    if not answer.ok:
        return answer
    found = answer.value[0]
    if found.nvmlReturn:
        code = 3 if found.nvmlReturn == INVALID_ARGUMENT else found.nvmlReturn
        return Answer(code=code, text=f"field {ident} gives error {found.nvmlReturn}")
    member = MEMBERS.get(found.valueType)
    if member is None:
        return Answer(code=999, text=f"field {ident} is of the unknown type {found.valueType}")
    return Answer(getattr(found.value, member))


def _judge_action(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    action = field(library, device.handle, RECOVERY_ACTION)
    if not action.ok:
        unread(exam, "nvidia.recovery_action", device, "what it needs to recover", action)
        return
    asked = ACTIONS.get(int(action.value), f"do what is action {action.value} of a newer NVML")
    text = f"the driver asks for {device.place}: {asked}; leave the node out until that is done"
    exam.judge("nvidia.recovery_action", int(action.value), text, device.label)


def _judge_rows(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    """Judge remapped rows, from Ampere on, or retired pages before."""
    if device.model is not None and not device.model.rows:
        _judge_pages(exam, library, device)
        return
    rows = library.ask("nvmlDeviceGetRemappedRows", device.handle)
    if not rows.ok:
        hidden = is_split(library, device) or not has_ecc(library, device)
        known = device.model is not None and not hidden
        unread(exam, "nvidia.remap_failure", device, "whether rows could be remapped", rows, essential=known)
        return
    _, uncorrectable, pending, failed = rows.value
    text = f"a row of {device.place} could not be remapped ({uncorrectable} were); have the board replaced"
    if not exam.judge("nvidia.remap_failure", failed, text, device.label):
        text = f"a row of {device.place} waits to be remapped; reset the device when it is free"
        exam.judge("nvidia.remap_pending", pending, text, device.label)


def _judge_pages(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    answers = [library.ask("nvmlDeviceGetRetiredPages", device.handle, cause) for cause in CAUSES]
    pending = library.ask("nvmlDeviceGetRetiredPagesPendingStatus", device.handle)
    for answer in [*answers, pending]:
        if not answer.ok:
            essential = has_ecc(library, device)
            unread(
                exam,
                "nvidia.retired_pages",
                device,
                "how many pages are retired",
                answer,
                essential=essential,
            )
            return
    count = sum(len(answer.value) for answer in answers)
    text = f"{count} pages of {device.place} are retired; have the board replaced before it fails"
    exam.judge("nvidia.retired_pages", count, text, device.label)
    text = f"a page of {device.place} is to be retired and still in use; reset the device or restart the node"
    exam.judge("nvidia.retired_pending", pending.value, text, device.label)


def has_ecc(library: NvmlLibrary, device: NvidiaDevice) -> bool:
    """Return whether ECC is on, as far as the device says it (``nvidia_modes`` judges that)."""
    mode = library.ask("nvmlDeviceGetEccMode", device.handle)
    return bool(not mode.ok and not mode.absent) or bool(mode.ok and mode.value[0])


def _judge_errors(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    """Judge errors since the driver was loaded. The total leaves SRAM out on some devices, hence its own counter."""
    total = library.ask("nvmlDeviceGetTotalEccErrors", device.handle, UNCORRECTED, VOLATILE)
    places = [_counter(library, device, UNCORRECTED, place) for place in (DRAM, SRAM)]
    if not total.ok:
        known = device.model is not None and has_ecc(library, device)
        unread(
            exam, "nvidia.uncorrectable", device, "how many errors were not corrected", total, essential=known
        )
    count = max([one.value for one in (total, *places) if one.ok], default=0)
    text = f"{device.place} has had {count} uncorrectable memory errors since its driver was loaded; reset it, and replace it if they return"
    exam.judge("nvidia.uncorrectable", count, text, device.label)
    for key, place, word in (
        ("nvidia.dram_corrected", DRAM, "DRAM"),
        ("nvidia.sram_corrected", SRAM, "SRAM"),
    ):
        corrected = _counter(library, device, CORRECTED, place)
        if corrected.ok:
            text = f"{device.place} has had {corrected.value} corrected errors in {word} since its driver was loaded; watch it"
            exam.judge(key, corrected.value, text, device.label)


def _counter(library: NvmlLibrary, device: NvidiaDevice, kind: int, place: int) -> Answer:
    return library.ask("nvmlDeviceGetMemoryErrorCounter", device.handle, kind, VOLATILE, place)


def _judge_threshold(exam: Examination, library: NvmlLibrary, device: NvidiaDevice) -> None:
    make = getattr(library.module, "c_nvmlEccSramErrorStatus_v1_t", None)
    if make is None:
        return
    status = make()
    if library.ask("nvmlDeviceGetSramEccErrorStatus", device.handle, ctypes.byref(status)).ok:
        text = f"SRAM of {device.place} has had more uncorrectable errors than NVIDIA tolerates; have the board replaced"
        exam.judge("nvidia.sram_threshold", status.bThresholdExceeded, text, device.label)


CHECKS = (
    Check.named("nvidia_memory", with_devices(_judge_memory)),
    Check.named("nvidia_links", with_devices(_judge_all_links)),
)
