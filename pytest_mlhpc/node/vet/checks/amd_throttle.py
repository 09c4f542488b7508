"""AMD under load: what slowed devices down, as firmware and driver report it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import (
    AmdDevice,
    Sight,
    busy,
    entry,
    number,
    said,
    sight,
    unknown,
    wanted,
)
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable, Watch

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

#: How /sys/class/drm/card*/device/gpu_metrics begins: size, format, revision of its content; and where it has, by both, the bits,
#: or accumulators in the order of ``COUNTED`` (Linux drivers/gpu/drm/amd/include/kgd_pp_interface.h, gpu_metrics_v1_3 to v1_8).
HEADER = struct.Struct("<HBB")
BITS, BITS_AT = struct.Struct("<Q"), {(1, 3): 112}
COUNTS, COUNTS_AT = struct.Struct("<6I"), {(1, 6): 32, (1, 7): 40, (1, 8): 40}
COUNTED = ("acc_counter", "acc_prochot_thrm", "acc_ppt_pwr", "acc_socket_thrm", "acc_vr_thrm", "acc_hbm_thrm")

#: A sample that says that the device was slowed down, not why.
UNEXPLAINED = -1

Accumulators = Dict[str, int]

#: Shares of time slowed down by heat and from outside, and the worst cause in words.
Shares = Tuple[float, float, str]


def accumulators(machine: Machine, seen: Sight, device: AmdDevice) -> Accumulators:
    """Return the time spent at each limit, and all time as ``acc_counter``, in the firmware's units.

    Raises:
        Unreadable: neither this device's driver nor this release of ``amdsmi`` counts.
    """
    found = accumulators_of_sysfs(machine, device)
    if found is not None:
        return found
    answer = seen.ask("violation_status", device)
    counted = _told({key: number(entry(answer, key)) for key in COUNTED})
    if counted is None:
        raise Unreadable("amdsmi does not count violations on this device")
    return counted


def accumulators_of_sysfs(machine: Machine, device: AmdDevice) -> Optional[Accumulators]:
    """Return them as gpu_metrics has them; None where it has none."""
    found = _unpacked(machine, device, COUNTS, COUNTS_AT)
    return _told({key: number(value, 32) for key, value in zip(COUNTED, found)}) if found else None


def _told(found: Mapping[str, Optional[int]]) -> Optional[Accumulators]:
    """Return what is told; None if that is too little to judge by."""
    counted = {key: value for key, value in found.items() if value is not None}
    return counted if "acc_counter" in counted and set(counted) & set(HEAT) else None


def bits(machine: Machine, seen: Sight, device: AmdDevice) -> int:
    """Return the bits that hold now, or ``UNEXPLAINED``.

    Raises:
        Unreadable: neither sysfs nor ``amdsmi`` tells.
    """
    found = bits_of_sysfs(machine, device)
    if found is not None:
        return found
    told = entry(seen.ask("gpu_metrics_info", device), "indep_throttle_status")
    if isinstance(told, bool):
        return UNEXPLAINED if told else 0
    counted = number(told)
    if counted is None:
        raise Unreadable("neither amdsmi nor gpu_metrics tells what slows this device down")
    return counted


def bits_of_sysfs(machine: Machine, device: AmdDevice) -> Optional[int]:
    """Return the bits as gpu_metrics has them; None where it has none."""
    found = _unpacked(machine, device, BITS, BITS_AT)
    return number(found[0]) if found else None


def _unpacked(
    machine: Machine, device: AmdDevice, layout: struct.Struct, places: Mapping[Tuple[int, int], int]
) -> Tuple[int, ...]:
    """Return the values at the place that a format of gpu_metrics has for them; nothing in formats without."""
    if not device.folder:
        return ()
    try:
        data = machine.head(f"{device.folder}/gpu_metrics", 4096)
    except Unreadable:
        return ()
    if len(data) < HEADER.size:
        return ()
    _, form, content = HEADER.unpack_from(data)
    place = places.get((form, content))
    if place is None or len(data) < place + layout.size:
        return ()
    return tuple(int(value) for value in layout.unpack_from(data, place))


def by_time(points: Sequence[Tuple[Accumulators, bool]]) -> Shares:
    """Return shares of the time in which the device was busy, of all time if it never was.

    Points are accumulators, and whether the device was busy up to then.

    Raises:
        Unreadable: they went back.
    """
    steps: List[Tuple[Accumulators, bool]] = []
    for (before, _), (after, loaded) in zip(points, points[1:]):
        passed = {key: after[key] - before[key] for key in before if key in after}
        if min(passed.values()) < 0:
            raise Unreadable(
                "its counters went back during the load: it was reset, or its driver was loaded anew"
            )
        steps.append((passed, loaded))
    chosen = [passed for passed, busy in steps if busy] or [passed for passed, _ in steps]
    whole = max(sum(passed.get("acc_counter", 0) for passed in chosen), 1)
    shares = {
        key: min(sum(passed.get(key, 0) for passed in chosen) / whole, 1.0) for key in (*HEAT, *OUTSIDE)
    }
    worst = max(shares, key=lambda key: shares[key])
    return max(shares[key] for key in HEAT), max(shares[key] for key in OUTSIDE), {**HEAT, **OUTSIDE}[worst]


def by_samples(samples: Sequence[Tuple[int, bool]]) -> Shares:
    """Return shares of the samples in which the device was busy, of all samples if it never was.

    Raises:
        Unreadable: some of them do not say why it was slowed down.
    """
    chosen = [bits for bits, busy in samples if busy] or [bits for bits, _ in samples]
    if UNEXPLAINED in chosen:
        raise Unreadable(
            "amdsmi says that it was slowed down, but not why: a power limit is normal, heat is not; gpu_metrics of sysfs "
            "would tell"
        )
    return (
        sum(bool(bits & HEAT_BITS) for bits in chosen) / len(chosen),
        sum(bool(bits & OUTSIDE_BITS) for bits in chosen) / len(chosen),
        "bits " + ", ".join(f"{bits:#x}" for bits in sorted(set(chosen))),
    )


#: A device that computes at least so much of the time, in per cent, is under load.
BUSY = 50


@dataclass
class WatchedDevice:
    """What is known of one device: accumulators, or bits, each with whether it was busy; and why there is nothing new."""

    device: AmdDevice
    points: List[Tuple[Accumulators, bool]] = field(default_factory=list)
    samples: List[Tuple[int, bool]] = field(default_factory=list)
    trouble: str = ""

    def add(self, machine: Machine, seen: Sight, device: AmdDevice) -> None:
        """Add what is told now, of the kind that was told first."""
        under_load = (busy(machine, seen, device) or 0) >= BUSY
        try:
            if self.points:
                self.points.append((accumulators(machine, seen, device), under_load))
            else:
                self.samples.append((bits(machine, seen, device), under_load))
            self.trouble = ""
        except Unreadable as error:
            self.trouble = str(error)

    def shares(self) -> Shares:
        """Return what it all comes to.

        Raises:
            Unreadable: nobody can tell.
        """
        if len(self.points) > 1 and not self.trouble:
            return by_time(self.points)
        if not self.samples:
            raise Unreadable(
                f"nothing tells what slowed it down under load: {self.trouble or 'it was never looked at'}"
            )
        return by_samples(self.samples)


@dataclass
class ThrottleState:
    """All devices of a node; ``asks`` whether the library is needed to watch them."""

    accelerator: str = ""
    asks: bool = False
    devices: List[WatchedDevice] = field(default_factory=list)


class AmdThrottle:
    """Judges by the share of the time under load in which a device was slowed down by heat, or from outside."""

    name = "amd_throttle"
    level = "quick"
    cost_s = 1.5
    reads: Tuple[str, ...] = ("amdsmi", "/sys/class/drm/card*/device/gpu_metrics")
    purpose = ""

    def begin(self, machine: Machine, context: Context) -> object:
        """Return what is to be watched."""
        state = ThrottleState(context.wanted.accelerator)
        if not wanted(context):
            return state
        seen = sight(machine, state.accelerator)
        try:
            for device in seen.devices:
                state.devices.append(self._first(machine, seen, device))
                by_sysfs = (
                    accumulators_of_sysfs(machine, device) or bits_of_sysfs(machine, device) is not None
                )
                state.asks = state.asks or not by_sysfs
        finally:
            seen.close()
        return state

    def _first(self, machine: Machine, seen: Sight, device: AmdDevice) -> WatchedDevice:
        watched = WatchedDevice(AmdDevice(device.name, device.model, device.folder))
        try:
            watched.points.append((accumulators(machine, seen, device), False))
        except Unreadable as error:
            watched.trouble = str(error)
        return watched

    def sample(self, machine: Machine, state: object) -> object:
        """Add what is told now."""
        assert isinstance(state, ThrottleState)  # noqa: S101 - what begin returned
        if state.devices:
            self._add(machine, state, state.devices)
        return state

    def _add(self, machine: Machine, state: ThrottleState, devices: List[WatchedDevice]) -> None:
        seen = sight(machine, state.accelerator) if state.asks else Sight()
        try:
            now = {device.name: device for device in seen.devices}
            for one in devices:
                one.add(machine, seen, now.get(one.device.name, one.device))
        finally:
            seen.close()

    def end(self, machine: Machine, context: Context, state: object) -> CheckOutcome:
        """Look again at accumulators, not at bits, as the load is over; and say what it has shown."""
        assert isinstance(state, ThrottleState)  # noqa: S101 - what begin returned
        if not state.devices:
            return CheckOutcome()
        counting = [one for one in state.devices if one.points]
        if counting:
            self._add(machine, state, counting)
        findings: List[Finding] = []
        for one in state.devices:
            findings += self._judge(context, one)
        if not findings:
            reason = "no device was slowed down by heat or from outside"
            findings = [Finding(self.name, Severity.PASS, reason)]
        return CheckOutcome(tuple(findings))

    def _judge(self, context: Context, one: WatchedDevice) -> List[Finding]:
        name = one.device.name
        try:
            heat, outside, words = one.shares()
        except Unreadable as error:
            return [unknown(self.name, "amd.throttle_thermal", error, name)]
        slowed = f"{name} was slowed down by"
        return [
            *said(
                context,
                self.name,
                "amd.throttle_thermal",
                heat,
                f"{slowed} heat for {heat:.0%} of the load ({words}): see to its cooling",
                device=name,
                metric="throttled",
            ),
            *said(
                context,
                self.name,
                "amd.throttle_prochot",
                outside,
                f"{slowed} PROCHOT or VRHOT for {outside:.0%} of the load ({words}): see to its power supply, and to what "
                "the board reports",
                device=name,
                metric="throttled",
            ),
        ]


WATCHES: Tuple[Watch, ...] = (AmdThrottle(),)
