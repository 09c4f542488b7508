"""AMD devices under load: what slowed them down, their xGMI links, and their PCIe links."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import (
    AmdDevice,
    AmdSession,
    NotReported,
    applies,
    busy,
    entry,
    judge,
    number,
    open_session,
    unknown,
)
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable, Watch

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


class AmdLinks:
    """Names devices with a link that is down, with fewer PCIe lanes than they could have, or with a slower rate."""

    name = "amd_links"
    level = "quick"
    cost_s = 1.0
    reads: Tuple[str, ...] = (
        "amdsmi",
        "/sys/class/drm/card*/device/current_link_width",
        "/sys/class/drm/card*/device/current_link_speed",
    )
    purpose = ""

    def begin(self, machine: Machine, context: Context) -> object:
        """Return the links before the load."""
        state = LinkState(context.wanted.accelerator)
        return self._read_links(machine, state, all_links=True) if applies(context) else state

    def sample(self, machine: Machine, state: object) -> object:
        """Look at PCIe, which is at its full rate only now."""
        assert isinstance(state, LinkState)  # noqa: S101 - what begin returned
        for device in state.devices:
            _best(state, device.name, pcie(machine, AmdSession(), device))
        if state.asks:
            self._read_links(machine, state, all_links=False)
        return state

    def end(self, machine: Machine, context: Context, state: object) -> CheckOutcome:
        """Look again, and say what the load has shown."""
        assert isinstance(state, LinkState)  # noqa: S101 - what begin returned
        if not state.devices:
            return CheckOutcome()
        self._read_links(machine, state, all_links=True)
        findings: List[Finding] = []
        for device in state.devices:
            findings += self._judge(context, state, device.name)
        if not findings:
            findings = [
                Finding(self.name, Severity.PASS, f"no link of {len(state.devices)} devices is down or slow")
            ]
        return CheckOutcome(tuple(findings), facts=_facts(state))

    def _read_links(self, machine: Machine, state: LinkState, *, all_links: bool) -> LinkState:
        seen = open_session(machine, state.accelerator)
        try:
            for device in seen.devices:
                if all(device.name != known.name for known in state.devices):
                    state.devices.append(AmdDevice(device.name, device.model, device.folder))
                    state.asks = state.asks or _rate_of_sysfs(machine, device) is None
                _best(state, device.name, pcie(machine, seen, device))
                if all_links:
                    _count(state, seen, device)
        finally:
            seen.close()
        return state

    def _judge(self, context: Context, state: LinkState, name: str) -> List[Finding]:
        findings: List[Finding] = []
        if name in state.troubles:
            findings.append(unknown(self.name, "amd.xgmi_down", Unreadable(state.troubles[name]), name))
        down = state.down.get(name, 0)
        reason = f"{name} has {down} xGMI links that are down: reset it, and have the board checked if that does not help"
        findings += judge(context, self.name, "amd.xgmi_down", down, reason, device=name, metric="links")
        if name in state.lanes:
            now, most = state.lanes[name]
            reason = f"{name} has {now} PCIe lanes of {most}: it sits badly, or its slot has no more"
            findings += judge(
                context, self.name, "amd.pcie_width", now / most, reason, device=name, metric="lanes"
            )
        if name in state.rates:
            rate, best = state.rates[name]
            reason = (
                f"{name} runs PCIe at {rate:g} under load where {best:g} could be: see the board's settings"
            )
            findings += judge(
                context, self.name, "amd.pcie_speed", rate / best, reason, device=name, metric="rate"
            )
        return findings


def _count(state: LinkState, seen: AmdSession, device: AmdDevice) -> None:
    """Count links; a link that was down once stays so. What a device never tells (MI200) is no trouble."""
    try:
        answer = seen.ask("gpu_xgmi_link_status", device)
    except NotReported:
        return
    except Unreadable as error:
        if seen.library is not None:
            state.troubles[device.name] = str(error)
        return
    told = entry(answer, "status")
    if not isinstance(told, list):
        state.troubles[device.name] = (
            f"amdsmi_get_gpu_xgmi_link_status says {str(answer)[:80]!r}, which makes no sense"
        )
        return
    state.up[device.name] = sum(one == "U" for one in told)
    state.down[device.name] = max(sum(one == "D" for one in told), state.down.get(device.name, 0))


def pcie(machine: Machine, seen: AmdSession, device: AmdDevice) -> Tuple[Optional[Lanes], Optional[Rate]]:
    """Return a device's PCIe lanes and rate now; None for what it does not have, or nobody tells.

    sysfs comes first: it costs nothing under load, and amdsmi reads the same.
    """
    lanes, rate = _lanes_of_sysfs(machine, device), _rate_of_sysfs(machine, device)
    if lanes and rate:
        return lanes, rate
    answer = seen.maybe("pcie_info", device)
    metric, static = entry(answer, "pcie_metric"), entry(answer, "pcie_static")
    width, widest = number(entry(metric, "pcie_width"), 16), number(entry(static, "max_pcie_width"), 16)
    speed, best = number(entry(metric, "pcie_speed"), 32), number(entry(static, "max_pcie_speed"), 32)
    return (
        lanes or ((width, widest) if width and widest else None),
        rate or ((float(speed), float(best)) if speed and best else None),
    )


def _lanes_of_sysfs(machine: Machine, device: AmdDevice) -> Optional[Lanes]:
    if not device.folder:
        return None
    try:
        found = tuple(machine.number(f"{device.folder}/{which}_link_width") for which in ("current", "max"))
    except Unreadable:
        return None
    return (found[0], found[1]) if all(0 < lanes <= MOST_LANES for lanes in found) else None


def _rate_of_sysfs(machine: Machine, device: AmdDevice) -> Optional[Rate]:
    """Read such as "32.0 GT/s PCIe"; "Unknown" where there is no link."""
    if not device.folder:
        return None
    found = []
    for which in ("current", "max"):
        try:
            match = re.match(
                r"([0-9]{1,6}(?:\.[0-9]{1,6})?) GT/s", machine.text(f"{device.folder}/{which}_link_speed")
            )
        except Unreadable:
            return None
        found.append(float(match[1]) if match else 0.0)
    return (found[0], found[1]) if all(found) else None


def _best(state: LinkState, name: str, now: Tuple[Optional[Lanes], Optional[Rate]]) -> None:
    """Keep the best that was seen: a link that was as wide and fast as it can be is well."""
    lanes, rate = now
    if lanes and lanes[0] / lanes[1] > _share(state.lanes.get(name)):
        state.lanes[name] = lanes
    if rate and rate[0] / rate[1] > _share(state.rates.get(name)):
        state.rates[name] = rate


def _share(known: Optional[Tuple[float, float]]) -> float:
    return known[0] / known[1] if known else 0.0


def _facts(state: LinkState) -> Tuple[Fact, ...]:
    """Return how many links each device has: the same as that in its place on other nodes."""
    return tuple(
        Fact(AmdLinks.name, "amd xgmi links", f"{state.up[name]} up", f"{device.model} {name}", name)
        for device in state.devices
        for name in (device.name,)
        if name in state.up
    )


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


def accumulators(machine: Machine, seen: AmdSession, device: AmdDevice) -> Accumulators:
    """Return the time spent at each limit, and all time as ``acc_counter``, in the firmware's units.

    Raises:
        Unreadable: neither this device's driver nor this release of ``amdsmi`` counts.
    """
    found = accumulators_of_sysfs(machine, device)
    if found is not None:
        return found
    answer = seen.ask("violation_status", device)
    counted = _complete({key: number(entry(answer, key)) for key in COUNTED})
    if counted is None:
        raise Unreadable("amdsmi does not count violations on this device")
    return counted


def accumulators_of_sysfs(machine: Machine, device: AmdDevice) -> Optional[Accumulators]:
    """Return them as gpu_metrics has them; None where it has none."""
    found = _unpacked(machine, device, COUNTS, COUNTS_AT)
    return _complete({key: number(value, 32) for key, value in zip(COUNTED, found)}) if found else None


def _complete(found: Mapping[str, Optional[int]]) -> Optional[Accumulators]:
    """Return what is told; None if that is too little to judge by."""
    counted = {key: value for key, value in found.items() if value is not None}
    return counted if "acc_counter" in counted and set(counted) & set(HEAT) else None


def bits(machine: Machine, seen: AmdSession, device: AmdDevice) -> int:
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
        raise Unreadable("neither amdsmi nor gpu_metrics reports what slows this device down")
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

    def add(self, machine: Machine, seen: AmdSession, device: AmdDevice) -> None:
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
                f"no reading shows what slowed it down under load: {self.trouble or 'it was never read'}"
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
        if not applies(context):
            return state
        seen = open_session(machine, state.accelerator)
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

    def _first(self, machine: Machine, seen: AmdSession, device: AmdDevice) -> WatchedDevice:
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
        seen = open_session(machine, state.accelerator) if state.asks else AmdSession()
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
            *judge(
                context,
                self.name,
                "amd.throttle_thermal",
                heat,
                f"{slowed} heat for {heat:.0%} of the load ({words}): see to its cooling",
                device=name,
                metric="throttled",
            ),
            *judge(
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


WATCHES: Tuple[Watch, ...] = (AmdLinks(), AmdThrottle())
