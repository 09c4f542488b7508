"""AMD: xGMI links between devices, and PCIe under load, at rest of which links are slowed down to save power."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import (
    AmdDevice,
    Sight,
    Untold,
    entry,
    number,
    said,
    sight,
    unknown,
    wanted,
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
        return self._look(machine, state, all_links=True) if wanted(context) else state

    def sample(self, machine: Machine, state: object) -> object:
        """Look at PCIe, which is at its full rate only now."""
        assert isinstance(state, LinkState)  # noqa: S101 - what begin returned
        for device in state.devices:
            _best(state, device.name, pcie(machine, Sight(), device))
        if state.asks:
            self._look(machine, state, all_links=False)
        return state

    def end(self, machine: Machine, context: Context, state: object) -> CheckOutcome:
        """Look again, and say what the load has shown."""
        assert isinstance(state, LinkState)  # noqa: S101 - what begin returned
        if not state.devices:
            return CheckOutcome()
        self._look(machine, state, all_links=True)
        findings: List[Finding] = []
        for device in state.devices:
            findings += self._judge(context, state, device.name)
        if not findings:
            findings = [
                Finding(self.name, Severity.PASS, f"no link of {len(state.devices)} devices is down or slow")
            ]
        return CheckOutcome(tuple(findings), facts=_facts(state))

    def _look(self, machine: Machine, state: LinkState, *, all_links: bool) -> LinkState:
        seen = sight(machine, state.accelerator)
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
        reason = f"{name} has {down} xGMI links that are down: reset it, and have the board looked at if that does not help"
        findings += said(context, self.name, "amd.xgmi_down", down, reason, device=name, metric="links")
        if name in state.lanes:
            now, most = state.lanes[name]
            reason = f"{name} has {now} PCIe lanes of {most}: it sits badly, or its slot has no more"
            findings += said(
                context, self.name, "amd.pcie_width", now / most, reason, device=name, metric="lanes"
            )
        if name in state.rates:
            rate, best = state.rates[name]
            reason = (
                f"{name} runs PCIe at {rate:g} under load where {best:g} could be: see the board's settings"
            )
            findings += said(
                context, self.name, "amd.pcie_speed", rate / best, reason, device=name, metric="rate"
            )
        return findings


def _count(state: LinkState, seen: Sight, device: AmdDevice) -> None:
    """Count links; a link that was down once stays so. What a device never tells (MI200) is no trouble."""
    try:
        answer = seen.ask("gpu_xgmi_link_status", device)
    except Untold:
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


def pcie(machine: Machine, seen: Sight, device: AmdDevice) -> Tuple[Optional[Lanes], Optional[Rate]]:
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


WATCHES: Tuple[Watch, ...] = (AmdLinks(),)
