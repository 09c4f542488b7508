"""PAYLOAD. AMD: what slowed devices down while they computed; ``amd_limits.py`` says how that is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import Device, Sight, busy, said, sight, unknown, wanted
from pytest_mlhpc.node.vet.checks.amd_limits import (
    Accumulators,
    Shares,
    accumulators,
    accumulators_of_sysfs,
    bits,
    bits_of_sysfs,
    by_samples,
    by_time,
)
from pytest_mlhpc.node.vet.finding import Finding, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable, Watch

#: A device that computes at least so much of the time, in per cent, is under load.
BUSY = 50


@dataclass
class Watched:
    """What is known of one device: accumulators, or bits, each with whether it was busy; and why there is nothing new."""

    device: Device
    points: List[Tuple[Accumulators, bool]] = field(default_factory=list)
    samples: List[Tuple[int, bool]] = field(default_factory=list)
    trouble: str = ""

    def add(self, machine: Machine, seen: Sight, device: Device) -> None:
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
class State:
    """All devices of a node; ``asks`` whether the library is needed to watch them."""

    accelerator: str = ""
    asks: bool = False
    devices: List[Watched] = field(default_factory=list)


class AmdThrottle:
    """Judges by the share of the time under load in which a device was slowed down by heat, or from outside."""

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
                state.devices.append(self._first(machine, seen, device))
                by_sysfs = (
                    accumulators_of_sysfs(machine, device) or bits_of_sysfs(machine, device) is not None
                )
                state.asks = state.asks or not by_sysfs
        finally:
            seen.close()
        return state

    def _first(self, machine: Machine, seen: Sight, device: Device) -> Watched:
        watched = Watched(Device(device.name, device.model, device.folder))
        try:
            watched.points.append((accumulators(machine, seen, device), False))
        except Unreadable as error:
            watched.trouble = str(error)
        return watched

    def sample(self, machine: Machine, state: object) -> object:
        """Add what is told now."""
        assert isinstance(state, State)  # noqa: S101 - what begin returned
        if state.devices:
            self._add(machine, state, state.devices)
        return state

    def _add(self, machine: Machine, state: State, devices: List[Watched]) -> None:
        seen = sight(machine, state.accelerator) if state.asks else Sight()
        try:
            now = {device.name: device for device in seen.devices}
            for one in devices:
                one.add(machine, seen, now.get(one.device.name, one.device))
        finally:
            seen.close()

    def end(self, machine: Machine, context: Context, state: object) -> Outcome:
        """Look again at accumulators, not at bits, as the load is over; and say what it has shown."""
        assert isinstance(state, State)  # noqa: S101 - what begin returned
        if not state.devices:
            return Outcome()
        counting = [one for one in state.devices if one.points]
        if counting:
            self._add(machine, state, counting)
        findings: List[Finding] = []
        for one in state.devices:
            findings += self._judge(context, one)
        if not findings:
            reason = "no device was slowed down by heat or from outside"
            findings = [Finding(self.name, Severity.PASS, reason)]
        return Outcome(tuple(findings))

    def _judge(self, context: Context, one: Watched) -> List[Finding]:
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
