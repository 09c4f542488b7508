"""PAYLOAD. Are all NVLinks up, and is each device registered with the fabric of NVSwitches?

dcgmi diag passes nodes whose NVLinks are all down (NVIDIA/DCGM issue 198); a job on them runs, several times too slow.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Optional

from pytest_mlhpc.node.vet.checks.nvidia_library import NOT_SUPPORTED, Answer, Device, Library, Notes, usable
from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.machine import Context, Machine

#: Most NVLinks of a device that we know (Hopper; NVIDIA H100 data sheet), for models that we do not know.
MOST_LINKS = 18

#: States in which a link carries data or would at once: active, asleep (NVML API reference, NVML_NVLINK_STATE).
UP = (1, 2)

#: nvmlDeviceGetNvLinkState of a link that the device does not have (NVML API reference).
INVALID_ARGUMENT = 2

#: nvmlGpuFabricState_t (NVML API reference, Fabric definitions).
FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}
COMPLETED, UNREGISTERED = 3, (1, 2)


@dataclass(frozen=True)
class LinkStates:
    """How many NVLinks are up and down; ``trouble`` is the first that could not be read, or why there are none."""

    up: int = 0
    down: int = 0
    trouble: Optional[Answer] = None


def link_states(library: Library, device: Device) -> LinkStates:
    """Return the states of all NVLinks that the device has."""
    model = device.model
    up = down = 0
    trouble: Optional[Answer] = None
    none: Optional[Answer] = None
    for link in range((model and model.links) or MOST_LINKS):
        answer = library.ask("nvmlDeviceGetNvLinkState", device.handle, link)
        if answer.ok:
            up += answer.value in UP
            down += answer.value not in UP
        elif answer.absent or answer.code == INVALID_ARGUMENT:
            none = Answer(code=NOT_SUPPORTED, words=answer.words)
        else:
            trouble = trouble or answer
            if answer.lost:
                break
    return LinkStates(up, down, trouble or (None if up or down else none))


def is_split(library: Library, device: Device) -> bool:
    """Return whether MIG is on: then NVLinks and memory's rows are out of sight."""
    mode = library.ask("nvmlDeviceGetMigMode", device.handle)
    return bool(mode.ok and mode.value[0])


class Links:
    """Counts NVLinks that are down, and asks for the fabric."""

    name = "nvidia_links"
    level = "quick"
    cost_s = 1.0
    reads = ("NVML: state of each NVLink, state of the fabric",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Judge the links of devices of which we know how many they have."""
        library = usable(machine, context)
        if library is None:
            return Outcome()
        notes = Notes(self.name, context)
        devices = library.answering()
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
            _judge_links(notes, device, states[device.index], alone=alone)
            if device.model.fabric:
                _judge_fabric(notes, library, device)
        if devices:
            notes.passed("NVLinks are up, as far as the devices have some")
        return Outcome(tuple(notes.findings))


def _judge_links(notes: Notes, device: Device, states: LinkStates, *, alone: bool) -> None:
    """Judge one device's links; *alone*: none may lead anywhere, as there is no other device or no link between them."""
    if states.trouble is not None:
        essential = not alone or not states.trouble.absent  # NVLink may be switched off in the driver
        notes.unread("nvlinks_down", device, "whether an NVLink is up", states.trouble, essential=essential)
    if alone and not states.up:
        notes.info(f"no NVLink leads from {device.place} to another device", device.label)
        return
    model = device.model
    key = "nvlinks_partly" if model and model.direct and states.up else "nvlinks_down"
    seen = states.up + states.down
    fixed = model is not None and not model.direct and not model.optional and states.trouble is None
    most = (
        max(seen, model.links) if model and fixed else seen
    )  # links that NVML does not show at all are missing
    text = (
        f"{most - states.up} of {most} NVLinks of {device.place} are down; reset the device, "
        "and restart the fabric manager where there is one"
    )
    notes.judge(key, most - states.up, text, device.label)


def _judge_fabric(notes: Notes, library: Library, device: Device) -> None:
    """Ask for the registration with the fabric: until it is completed, CUDA does not start (error 802)."""
    make = getattr(library.module, "c_nvmlGpuFabricInfo_v2_t", None)
    if make is None:
        return
    info = make()
    answer = library.ask("nvmlDeviceGetGpuFabricInfoV", device.handle, ctypes.byref(info))
    if not answer.ok:
        notes.unread("fabric", device, "whether it is in the fabric", answer)
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
    notes.judge("fabric", int(failed or info.state in UNREGISTERED), text, device.label)


CHECKS = (Links(),)
