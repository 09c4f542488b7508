"""PAYLOAD. AMD: what slowed devices down while they computed.

MI300 and newer count, in firmware, the time spent at each limit (``amdsmi_get_violation_status``, from amdsmi 6.3 on). Reading that takes a
tenth of a second for each device, so it is done before and after the load only. MI100 and MI200 show by bits what holds now
(gpu_metrics 1.3, ``indep_throttle_status``); sysfs has the bits, amdsmi in most releases only whether there are any.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from pytest_mlhpc.vet.check import Context, Watch
from pytest_mlhpc.vet.checks.amd_devices import Device, Sight, said, sight, unknown, wanted
from pytest_mlhpc.vet.checks.amd_library import entry, number
from pytest_mlhpc.vet.finding import Finding, Outcome, Severity
from pytest_mlhpc.vet.machine import Machine, Unreadable

#: Accumulators of ``amdsmi_violation_status_t``: key -> words.
HEAT = {
    "acc_socket_thrm": "the package's temperature",
    "acc_hbm_thrm": "the memory's temperature",
    "acc_vr_thrm": "the voltage regulator's temperature",
}
OUTSIDE = {"acc_prochot_thrm": "PROCHOT"}
POWER = {"acc_ppt_pwr": "the power limit"}

#: Linux drivers/gpu/drm/amd/pm/swsmu/inc/amdgpu_smu.h, SMU_THROTTLER_*_BIT: 0-23 power and current, 32-43 temperatures,
#: 44 and 45 VRHOT, 46 and 47 PROCHOT.
HEAT_BITS = sum(1 << bit for bit in range(32, 44))
OUTSIDE_BITS = sum(1 << bit for bit in range(44, 48))

#: Where gpu_metrics 1.3 has indep_throttle_status (Linux drivers/gpu/drm/amd/include/kgd_pp_interface.h).
HEADER = struct.Struct("<HBB")
BITS_AT, BITS = 112, struct.Struct("<Q")

#: A sample that says that the device was slowed down, not why.
UNEXPLAINED = -1

Accumulators = Dict[str, int]


@dataclass
class Watched:
    """What is known of one device: accumulators at the start, or bits seen so far, or why neither."""

    device: Device
    start: Optional[Accumulators] = None
    samples: List[int] = field(default_factory=list)
    trouble: str = ""

    def add(self, machine: Machine, seen: Sight, device: Device) -> None:
        """Add the bits that hold now, or keep why they cannot be had."""
        try:
            self.samples.append(bits(machine, seen, device))
        except Unreadable as error:
            self.trouble = str(error)


@dataclass
class State:
    """All devices of a node; ``asks`` whether bits of some of them must be had from the library."""

    accelerator: str = ""
    asks: bool = False
    devices: List[Watched] = field(default_factory=list)


class AmdThrottle:
    """Judges by the share of the load's time in which a device was slowed down by heat, or from outside."""

    name = "amd_throttle"
    level = "quick"
    cost_s = 1.5
    reads: Tuple[str, ...] = ("amdsmi", "/sys/class/drm/card*/device/gpu_metrics")
    purpose = ""

    def begin(self, machine: Machine, context: Context) -> object:
        """Return what is to be watched."""
        state = State(context.wanted.accelerator)
        if not wanted(context):
            return state
        seen = sight(machine, state.accelerator)
        try:
            for device in seen.devices:
                watched = Watched(Device(device.name, device.model, device.folder))
                try:
                    watched.start = accumulators(seen, device)
                except Unreadable as error:
                    watched.trouble = str(error)
                    state.asks = state.asks or _bits_of_sysfs(machine, device) is None
                state.devices.append(watched)
        finally:
            seen.close()
        return state

    def sample(self, machine: Machine, state: object) -> object:
        """Add the bits that devices without accumulators show now."""
        assert isinstance(state, State)  # noqa: S101 - what begin returned
        watched = [one for one in state.devices if one.start is None]
        if not watched:
            return state
        seen = sight(machine, state.accelerator) if state.asks else Sight()
        try:
            handles = {device.name: device for device in seen.devices}
            for one in watched:
                one.add(machine, seen, handles.get(one.device.name, one.device))
        finally:
            seen.close()
        return state

    def end(self, machine: Machine, context: Context, state: object) -> Outcome:
        """Look again, and say what the load has shown."""
        assert isinstance(state, State)  # noqa: S101 - what begin returned
        if not state.devices:
            return Outcome()
        findings: List[Finding] = []
        counting = any(one.start is not None for one in state.devices)
        seen = sight(machine, state.accelerator) if counting else Sight()
        try:
            now = {device.name: device for device in seen.devices}
            for one in state.devices:
                findings += self._judge(context, seen, now.get(one.device.name, one.device), one)
        finally:
            seen.close()
        if not findings:
            findings.append(
                Finding(self.name, Severity.PASS, "no device was slowed down by heat or from outside")
            )
        return Outcome(tuple(findings))

    def _judge(self, context: Context, seen: Sight, device: Device, one: Watched) -> List[Finding]:
        name = device.name
        try:
            heat, outside, words = _shares(seen, device, one)
        except Unreadable as error:
            return [unknown(self.name, "amd.throttle_thermal", error, name)]
        advice = (
            "see to its cooling"
            if heat > outside
            else "see to its power supply, and to what the board reports"
        )
        return [
            *said(
                context,
                self.name,
                "amd.throttle_thermal",
                heat,
                f"{name} was slowed down by heat for {heat:.0%} of the load ({words}): {advice}",
                device=name,
                metric="throttled",
            ),
            *said(
                context,
                self.name,
                "amd.throttle_prochot",
                outside,
                f"{name} was slowed down by PROCHOT or VRHOT for {outside:.0%} of the load ({words}): {advice}",
                device=name,
                metric="throttled",
            ),
        ]


def accumulators(seen: Sight, device: Device) -> Accumulators:
    """Return the time spent at each limit, and all time as ``acc_counter``, in the firmware's units.

    Raises:
        Unreadable: this device, or this release of ``amdsmi``, does not count.
    """
    answer = seen.ask("violation_status", device)
    found = {key: number(entry(answer, key)) for key in ("acc_counter", *HEAT, *OUTSIDE, *POWER)}
    counted = {key: value for key, value in found.items() if value is not None}
    if "acc_counter" not in counted or not set(counted) & set(HEAT):
        raise Unreadable("amdsmi does not count violations on this device")
    return counted


def bits(machine: Machine, seen: Sight, device: Device) -> int:
    """Return the bits that hold now, or ``UNEXPLAINED``.

    Raises:
        Unreadable: neither sysfs nor ``amdsmi`` tells.
    """
    found = _bits_of_sysfs(machine, device)
    if found is not None:
        return found
    told = entry(seen.ask("gpu_metrics_info", device), "indep_throttle_status")
    if isinstance(told, bool):
        return UNEXPLAINED if told else 0
    counted = number(told)
    if counted is None:
        raise Unreadable("neither amdsmi nor gpu_metrics tells what slows this device down")
    return counted


def _bits_of_sysfs(machine: Machine, device: Device) -> Optional[int]:
    if not device.folder:
        return None
    try:
        data = machine.head(f"{device.folder}/gpu_metrics", 4096)
    except Unreadable:
        return None
    if len(data) < BITS_AT + BITS.size or HEADER.unpack_from(data)[1:] != (1, 3):
        return None
    (found,) = BITS.unpack_from(data, BITS_AT)
    return None if found == (1 << 64) - 1 else int(found)


def _shares(seen: Sight, device: Device, one: Watched) -> Tuple[float, float, str]:
    """Return the shares of the load's time slowed down by heat and from outside, and the worst cause in words.

    Raises:
        Unreadable: they cannot be told.
    """
    if one.start is not None:
        return _by_time(one.start, accumulators(seen, device))
    if not one.samples:
        raise Unreadable(
            f"nothing tells what slowed it down under load: {one.trouble or 'it was never looked at'}"
        )
    if UNEXPLAINED in one.samples:
        raise Unreadable(
            "amdsmi says that it was slowed down, but not why: a power limit is normal, heat is not; gpu_metrics of sysfs "
            "would tell"
        )
    return (
        sum(bool(sample & HEAT_BITS) for sample in one.samples) / len(one.samples),
        sum(bool(sample & OUTSIDE_BITS) for sample in one.samples) / len(one.samples),
        "bits " + ", ".join(f"{sample:#x}" for sample in sorted(set(one.samples))),
    )


def _by_time(start: Accumulators, end: Accumulators) -> Tuple[float, float, str]:
    passed = {key: end[key] - start[key] for key in start if key in end}
    if min(passed.values()) < 0:
        raise Unreadable(
            "its counters went back during the load: it was reset, or its driver was loaded anew"
        )
    whole = max(passed.get("acc_counter", 0), 1)
    shares = {key: min(passed.get(key, 0) / whole, 1.0) for key in (*HEAT, *OUTSIDE)}
    heat, outside = max(shares[key] for key in HEAT), max(shares[key] for key in OUTSIDE)
    worst = max(shares, key=lambda key: shares[key])
    return heat, outside, {**HEAT, **OUTSIDE}[worst]


WATCHES: Tuple[Watch, ...] = (AmdThrottle(),)
