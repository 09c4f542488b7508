"""PAYLOAD. Processors under load: throttled for heat, held at a low clock, or limited by a setting that someone left.

*Not there*: ``thermal_throttle`` is Intel's, ``cpufreq`` takes firmware that offers it, a base clock is only known to intel_pstate or
by CPPC; VMs have none. What is missing is not judged, and a node without any of it passes with a remark. Processors that are
idle run slowly on purpose: only those that /proc/stat shows busy are looked at. *There and unreadable*: UNKNOWN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.finding import Fact, Finding, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable, Watch
from pytest_mlhpc.node.vet.policy import summed, weigh

_CPU = "/sys/devices/system/cpu"
_COUNTS = ("core_throttle_count", "package_throttle_count")
_TIMES = ("core_throttle_total_time_ms", "package_throttle_total_time_ms")

#: A processor is busy that ran for this share of the time between two samples.
BUSY = 0.9

#: Most processors whose clock is read in one sample: on some kernels each takes 10 ms.
MOST_CLOCKS = 8

#: Least time between two looks at /proc/stat that says something, in its ticks (usually 10 ms each).
_TICKS = 10


@dataclass(frozen=True)
class State:
    """Counters at the begin, by processor and name; when that was; busy and total ticks at the last sample; clocks as shares of the base clock."""

    counters: Mapping[Tuple[str, str], int]
    since: float
    ticks: Mapping[str, Tuple[int, int]]
    clocks: Tuple[float, ...] = field(default_factory=tuple)


class CpuThrottle:
    """Watches the node's processors."""

    name = "cpu_throttle"
    level = "quick"
    cost_s = 0.3
    reads: Tuple[str, ...] = (
        f"{_CPU}/cpu*/thermal_throttle",
        f"{_CPU}/cpu*/cpufreq/{{scaling_cur_freq,scaling_max_freq,base_frequency}}",
        f"{_CPU}/cpu*/acpi_cppc/nominal_freq",
        "/proc/stat",
    )
    purpose = ""

    def begin(self, machine: Machine, _context: Context) -> State:
        """Read all counters."""
        return State(_counters(machine), machine.clock(), _ticks(machine))

    def sample(self, machine: Machine, state: object) -> State:
        """Read the clocks of processors that were busy since the last sample."""
        assert isinstance(state, State)  # noqa: S101 - what begin returned
        ticks = _ticks(machine)
        busy = [name for name in sorted(ticks) if _busy(state.ticks.get(name), ticks[name])]
        step = max(1, len(busy) // MOST_CLOCKS)
        clocks = [_clock(machine, name) for name in busy[::step][:MOST_CLOCKS]]
        return replace(
            state, ticks=ticks, clocks=state.clocks + tuple(one for one in clocks if one is not None)
        )

    def end(self, machine: Machine, context: Context, state: object) -> Outcome:
        """Read the counters again, and weigh what has changed."""
        assert isinstance(state, State)  # noqa: S101 - what begin returned
        elapsed = max(1.0, machine.clock() - state.since)
        caps = _caps(machine)
        found = [
            *_heat(context, state.counters, _counters(machine), elapsed),
            *_held(context, state.clocks, caps),
        ]
        if not found:
            return Outcome(
                (
                    Finding(
                        self.name, Severity.INFO, "this node shows neither heat nor clocks of its processors"
                    ),
                )
            )
        facts = (Fact(self.name, "lowest limit of the clock", f"{min(caps):.2f} x base"),) if caps else ()
        passed = f"not throttled in {elapsed:.0f} s; {len(state.clocks)} clocks of busy processors looked at"
        return Outcome(summed(self.name, found, passed), facts=facts)


def _heat(
    context: Context,
    before: Mapping[Tuple[str, str], int],
    after: Mapping[Tuple[str, str], int],
    elapsed: float,
) -> List[Finding]:
    """Return what the counters of heat come to: the worst processor speaks for the node."""
    changes = {place: max(0, after[place] - before[place]) for place in before if place in after}
    if not changes:
        return []
    events = {place: change for place, change in changes.items() if place[1] in _COUNTS}
    times = {place: change for place, change in changes.items() if place[1] in _TIMES}
    found = []
    if events:
        (cpu, name), count = max(events.items(), key=lambda item: item[1])
        text = f"{cpu} was throttled for heat {count} times in {elapsed:.0f} s ({name}); look at cooling"
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.events"], count, text))
    if times:
        (cpu, name), spent = max(times.items(), key=lambda item: item[1])
        share = spent / 1e3 / elapsed
        text = (
            f"{cpu} was throttled for heat for {share:.0%} of {elapsed:.0f} s ({name}); have cooling repaired"
        )
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.share"], share, text))
    return found


def _held(context: Context, clocks: Tuple[float, ...], caps: List[float]) -> List[Finding]:
    found = []
    if clocks:
        middle = median(clocks)
        text = f"busy processors run at {middle:.0%} of their base clock; look at power limits, PROCHOT and cooling"
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.clock"], middle, text))
    if caps:
        text = f"the clock may not go beyond {min(caps):.0%} of the base clock (scaling_max_freq); lift the limit"
        found.append(weigh("cpu_throttle", context.policy["cpu_throttle.cap"], min(caps), text))
    return found


def _cpus(machine: Machine) -> List[str]:
    try:
        return [name for name in machine.names_in(_CPU) if name[:3] == "cpu" and name[3:].isdecimal()]
    except Absent:
        return []


def _number(machine: Machine, name: str) -> Optional[int]:
    """Return a number, None where there is none."""
    try:
        return machine.number(name)
    except Absent:
        return None


def _counters(machine: Machine) -> Dict[Tuple[str, str], int]:
    found = {}
    for cpu in _cpus(machine):
        folder = f"{_CPU}/{cpu}/thermal_throttle"
        if not machine.exists(folder):
            continue
        for name in (*_COUNTS, *_TIMES):
            count = _number(machine, f"{folder}/{name}")
            if count is not None:
                found[cpu, name] = count
    return found


def _ticks(machine: Machine) -> Dict[str, Tuple[int, int]]:
    """Return each processor's ticks at work and in all (proc_stat(5)); nothing where nobody says."""
    try:
        lines = machine.text("/proc/stat").splitlines()
    except Unreadable:
        return {}
    found = {}
    for line in lines:
        name, *words = line.split()
        if (
            name[:3] == "cpu"
            and name[3:].isdecimal()
            and len(words) >= 5
            and all(word.isdecimal() for word in words[:8])
        ):
            values = [int(word) for word in words[:8]]  # guest time is within user's
            found[name] = (sum(values) - values[3] - values[4], sum(values))
    return found


def _busy(before: Optional[Tuple[int, int]], now: Tuple[int, int]) -> bool:
    if before is None or now[1] - before[1] < _TICKS:
        return False
    return (now[0] - before[0]) / (now[1] - before[1]) >= BUSY


def _base(machine: Machine, cpu: str) -> Optional[int]:
    """Return a processor's base clock in kHz."""
    base = _number(machine, f"{_CPU}/{cpu}/cpufreq/base_frequency")
    if base:
        return base
    nominal = _number(machine, f"{_CPU}/{cpu}/acpi_cppc/nominal_freq")
    return nominal * 1000 if nominal else None


def _clock(machine: Machine, cpu: str) -> Optional[float]:
    now, base = _number(machine, f"{_CPU}/{cpu}/cpufreq/scaling_cur_freq"), _base(machine, cpu)
    return now / base if now and base else None


def _caps(machine: Machine) -> List[float]:
    """Return the highest clocks allowed, as shares of the base clock."""
    found = []
    for cpu in _cpus(machine):
        limit = _number(machine, f"{_CPU}/{cpu}/cpufreq/scaling_max_freq")
        base = _base(machine, cpu) if limit else None
        if limit and base:
            found.append(limit / base)
    return found


WATCHES: Tuple[Watch, ...] = (CpuThrottle(),)
