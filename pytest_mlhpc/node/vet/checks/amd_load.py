"""AMD devices under load: what slowed them down, their xGMI links, and their PCIe links."""

from __future__ import annotations

import re
import struct
from contextlib import closing
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.check import Examination, LoadWatch
from pytest_mlhpc.node.vet.checks.amd_devices import (
    AmdDevice,
    AmdSession,
    NotReported,
    applies,
    busy,
    entry,
    number,
    open_session,
)
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable

#: The widest PCIe link; sysfs writes 0, 63 or 255 for a link that there is not (MI300A).
MOST_LANES = 32

#: Lanes and rate, each with the most that there could be; the rate's unit does not matter.
Lanes = Tuple[int, int]
Rate = Tuple[float, float]


@dataclass
class LinkState:
    """``asks``: whether sysfs lacks PCIe rates of some device; ``down``: links that are down, by device; ``troubles``: why that is not known; ``lanes``, ``rates``: PCIe at its best."""

    accelerator: str = ""
    asks: bool = False
    devices: List[AmdDevice] = field(default_factory=list)
    up: Dict[str, int] = field(default_factory=dict)
    down: Dict[str, int] = field(default_factory=dict)
    troubles: Dict[str, str] = field(default_factory=dict)
    lanes: Dict[str, Lanes] = field(default_factory=dict)
    rates: Dict[str, Rate] = field(default_factory=dict)


def _start_links(machine: Machine, context: Context) -> Optional[LinkState]:
    """Return the links before the load."""
    state = LinkState(context.wanted.accelerator)
    return _read_links(machine, state, all_links=True) if applies(context) else None


def _observe_links(machine: Machine, state: LinkState) -> LinkState:
    """Look at PCIe, which is at its full rate only now."""
    for device in state.devices:
        _best(state, device.name, pcie(AmdSession(machine), device))
    return _read_links(machine, state, all_links=False) if state.asks else state


def _judge_links(exam: Examination, state: LinkState) -> Optional[str]:
    """Look again, and judge what the load has shown."""
    if not state.devices:
        return None
    _read_links(exam.machine, state, all_links=True)
    for device in state.devices:
        name = device.name
        if name in state.troubles:
            exam.unknown("amd.xgmi_down", f"{name}: {state.troubles[name]}", name)
        down = state.down.get(name, 0)
        text = f"{name} has {down} xGMI links that are down: reset it, and have the board checked if that does not help"
        exam.judge("amd.xgmi_down", down, text, name)
        if name in state.lanes:
            now, most = state.lanes[name]
            text = f"{name} has {now} PCIe lanes of {most}: it sits badly, or its slot has no more"
            exam.judge("amd.pcie_width", now / most, text, name)
        if name in state.rates:
            rate, best = state.rates[name]
            text = (
                f"{name} runs PCIe at {rate:g} under load where {best:g} could be: see the board's settings"
            )
            exam.judge("amd.pcie_speed", rate / best, text, name)
        if name in state.up:  # the same as that in its place on other nodes
            exam.fact("amd xgmi links", f"{state.up[name]} up", f"{device.model} {name}", name)
    return f"no link of {len(state.devices)} devices is down or slow"


def _read_links(machine: Machine, state: LinkState, *, all_links: bool) -> LinkState:
    with closing(open_session(machine, state.accelerator)) as session:
        for device in session.devices:
            if all(device.name != known.name for known in state.devices):
                state.devices.append(AmdDevice(device.name, device.model, device.folder))
                state.asks = state.asks or _rate_of_sysfs(session, device) is None
            _best(state, device.name, pcie(session, device))
            if all_links:
                _count(state, session, device)
    return state


def _count(state: LinkState, session: AmdSession, device: AmdDevice) -> None:
    """Count links; a link that was down once stays so. What a device never tells (MI200) is no trouble."""
    try:
        answer = session.ask("gpu_xgmi_link_status", device)
    except NotReported:
        return
    except Unreadable as error:
        if session.library is not None:
            state.troubles[device.name] = str(error)
        return
    status = entry(answer, "status")
    if not isinstance(status, list):
        state.troubles[device.name] = (
            f"amdsmi_get_gpu_xgmi_link_status says {str(answer)[:80]!r}, which makes no sense"
        )
        return
    state.up[device.name] = sum(one == "U" for one in status)
    state.down[device.name] = max(sum(one == "D" for one in status), state.down.get(device.name, 0))


def pcie(session: AmdSession, device: AmdDevice) -> Tuple[Optional[Lanes], Optional[Rate]]:
    """Return a device's PCIe lanes and rate now; None for what it does not have, or nobody tells.

    sysfs comes first: it costs nothing under load, and amdsmi reads the same.
    """
    lanes, rate = _lanes_of_sysfs(session, device), _rate_of_sysfs(session, device)
    if lanes and rate:
        return lanes, rate
    answer = session.maybe("pcie_info", device)
    metric, static = entry(answer, "pcie_metric"), entry(answer, "pcie_static")
    width, widest = number(entry(metric, "pcie_width"), 16), number(entry(static, "max_pcie_width"), 16)
    speed, best = number(entry(metric, "pcie_speed"), 32), number(entry(static, "max_pcie_speed"), 32)
    return (
        lanes or ((width, widest) if width and widest else None),
        rate or ((float(speed), float(best)) if speed and best else None),
    )


def _lanes_of_sysfs(session: AmdSession, device: AmdDevice) -> Optional[Lanes]:
    now, most = (session.number(device, f"{which}_link_width") or 0 for which in ("current", "max"))
    return (now, most) if 0 < now <= MOST_LANES and 0 < most <= MOST_LANES else None


def _rate_of_sysfs(session: AmdSession, device: AmdDevice) -> Optional[Rate]:
    """Read such as "32.0 GT/s PCIe"; "Unknown" where there is no link."""
    found = []
    for which in ("current", "max"):
        text = session.text(device, f"{which}_link_speed")
        match = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) GT/s", text)
        found.append(float(match[1]) if match else 0.0)
    return (found[0], found[1]) if all(found) else None


def _best(state: LinkState, name: str, now: Tuple[Optional[Lanes], Optional[Rate]]) -> None:
    """Keep the best reading: a link that was as wide and fast as it can be is well."""
    lanes, rate = now
    if lanes and lanes[0] / lanes[1] > _share(state.lanes.get(name)):
        state.lanes[name] = lanes
    if rate and rate[0] / rate[1] > _share(state.rates.get(name)):
        state.rates[name] = rate


def _share(known: Optional[Tuple[float, float]]) -> float:
    return known[0] / known[1] if known else 0.0


#: Accumulators of ``amdsmi_violation_status_t``: key -> text.
HEAT = {
    "acc_socket_thrm": "the package's temperature",
    "acc_hbm_thrm": "the memory's temperature",
    "acc_vr_thrm": "the voltage regulator's temperature",
}
OUTSIDE = {"acc_prochot_thrm": "PROCHOT"}

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

#: Shares of time slowed down by heat and from outside, and the worst cause as text.
Shares = Tuple[float, float, str]


def accumulators(session: AmdSession, device: AmdDevice) -> Accumulators:
    """Return the time spent at each limit, and all time as ``acc_counter``, in the firmware's units.

    Raises:
        Unreadable: neither this device's driver nor this release of ``amdsmi`` counts.
    """
    found = accumulators_of_sysfs(session, device)
    if found is not None:
        return found
    answer = session.ask("violation_status", device)
    counted = _complete({key: number(entry(answer, key)) for key in COUNTED})
    if counted is None:
        raise Unreadable("amdsmi does not count violations on this device")
    return counted


def accumulators_of_sysfs(session: AmdSession, device: AmdDevice) -> Optional[Accumulators]:
    """Return them as gpu_metrics has them; None where it has none."""
    found = _unpacked(session, device, COUNTS, COUNTS_AT)
    return _complete({key: number(value, 32) for key, value in zip(COUNTED, found)}) if found else None


def _complete(found: Mapping[str, Optional[int]]) -> Optional[Accumulators]:
    """Return what is reported; None if that is too little to judge by."""
    counted = {key: value for key, value in found.items() if value is not None}
    return counted if "acc_counter" in counted and set(counted) & set(HEAT) else None


def bits(session: AmdSession, device: AmdDevice) -> int:
    """Return the bits that hold now, or ``UNEXPLAINED``.

    Raises:
        Unreadable: neither sysfs nor ``amdsmi`` tells.
    """
    found = bits_of_sysfs(session, device)
    if found is not None:
        return found
    status = entry(session.ask("gpu_metrics_info", device), "indep_throttle_status")
    if isinstance(status, bool):
        return UNEXPLAINED if status else 0
    counted = number(status)
    if counted is None:
        raise Unreadable("neither amdsmi nor gpu_metrics reports what slows this device down")
    return counted


def bits_of_sysfs(session: AmdSession, device: AmdDevice) -> Optional[int]:
    """Return the bits as gpu_metrics has them; None where it has none."""
    found = _unpacked(session, device, BITS, BITS_AT)
    return number(found[0]) if found else None


def _unpacked(
    session: AmdSession, device: AmdDevice, layout: struct.Struct, places: Mapping[Tuple[int, int], int]
) -> Tuple[int, ...]:
    """Return the values at the place that a format of gpu_metrics has for them; nothing in formats without."""
    if not device.folder:
        return ()
    try:
        data = session.machine.head(f"{device.folder}/gpu_metrics", 4096)
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

    def add(self, session: AmdSession, device: AmdDevice) -> None:
        """Add what is reported now, of the kind that was reported first."""
        under_load = (busy(session, device) or 0) >= BUSY
        try:
            if self.points:
                self.points.append((accumulators(session, device), under_load))
            else:
                self.samples.append((bits(session, device), under_load))
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
                f"no reading shows what slowed it down under load: {self.trouble or 'it was never read'}"
            )
        return by_samples(self.samples)


@dataclass
class ThrottleState:
    """All devices of a node; ``asks`` whether the library is needed to watch them."""

    accelerator: str = ""
    asks: bool = False
    devices: List[WatchedDevice] = field(default_factory=list)


def _start_throttle(machine: Machine, context: Context) -> Optional[ThrottleState]:
    """Return what is to be watched."""
    if not applies(context):
        return None
    state = ThrottleState(context.wanted.accelerator)
    with closing(open_session(machine, state.accelerator)) as session:
        for device in session.devices:
            watched = WatchedDevice(AmdDevice(device.name, device.model, device.folder))
            state.devices.append(watched)
            try:
                watched.points.append((accumulators(session, device), False))
            except Unreadable as error:
                watched.trouble = str(error)
            by_sysfs = accumulators_of_sysfs(session, device) or bits_of_sysfs(session, device) is not None
            state.asks = state.asks or not by_sysfs
    return state


def _observe_throttle(machine: Machine, state: ThrottleState) -> ThrottleState:
    _add(machine, state, state.devices)
    return state


def _add(machine: Machine, state: ThrottleState, devices: List[WatchedDevice]) -> None:
    if not devices:
        return
    with closing(open_session(machine, state.accelerator) if state.asks else AmdSession(machine)) as session:
        now = {device.name: device for device in session.devices}
        for one in devices:
            one.add(session, now.get(one.device.name, one.device))


def _judge_throttle(exam: Examination, state: ThrottleState) -> Optional[str]:
    """Look again at accumulators, not at bits, as the load is over; and judge what it has shown."""
    _add(exam.machine, state, [one for one in state.devices if one.points])
    for one in state.devices:
        name = one.device.name
        try:
            heat, outside, shares = one.shares()
        except Unreadable as error:
            exam.unknown("amd.throttle_thermal", f"{name}: {error}", name)
            continue
        slowed = f"{name} was slowed down by"
        text = f"{slowed} heat for {heat:.0%} of the load ({shares}): see to its cooling"
        exam.judge("amd.throttle_thermal", heat, text, name)
        text = (
            f"{slowed} PROCHOT or VRHOT for {outside:.0%} of the load ({shares}): see to its power supply, and to what "
            "the board reports"
        )
        exam.judge("amd.throttle_prochot", outside, text, name)
    return "no device was slowed down by heat or from outside" if state.devices else None


WATCHES = (
    LoadWatch.named("amd_links", _start_links, _observe_links, _judge_links),
    LoadWatch.named("amd_throttle", _start_throttle, _observe_throttle, _judge_throttle),
)
