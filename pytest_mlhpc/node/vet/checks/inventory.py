"""What a node has, against what its partition's description promises, and as facts that nodes should share.

*Not there*: a file that this kernel or machine does not have (cpufreq in a VM, DMI on Arm, NUMA in a container) gives no fact; where
its property is *described*, the node does not have it: "none", and not as described. *There and unreadable*: UNKNOWN for what is
described, no fact for what is not. Cores and memory exist on every node: without their files, what is described is UNKNOWN.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple

from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.machine import Absent, Check, Context, Machine, Unreadable
from pytest_mlhpc.node.vet.policy import summed, unknown, weigh

_CPU = "/sys/devices/system/cpu"
_KIB = 1024


class Inventory:
    """Cores, memory, swap, clock and properties by name."""

    name = "inventory"
    level = "quick"
    cost_s = 0.2
    reads: Tuple[str, ...] = (
        f"{_CPU}/online",
        f"{_CPU}/smt/active",
        f"{_CPU}/cpu*/cpufreq/scaling_governor",
        "/sys/devices/system/node",
        "/sys/class/dmi/id/bios_version",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/proc/sys/kernel/osrelease",
        "adjtimex(2)",
    )
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look at each, and compare with what is described."""
        found = [
            *_cores(machine, context),
            *_memory(machine, context),
            *_swap(machine, context),
            *_clock(machine, context),
            *_expected(machine, context),
        ]
        facts = _facts(machine)
        return CheckOutcome(summed(self.name, found, _describe(facts)), facts=facts)


def cores(machine: Machine) -> Tuple[int, int]:
    """Return processors that are online, and threads of each core.

    Raises:
        Unreadable: neither sysfs nor /proc/cpuinfo says.
    """
    try:
        count = count_list(machine.text(f"{_CPU}/online"))
    except Absent:
        lines = machine.text("/proc/cpuinfo").splitlines()
        count = sum(
            line.startswith("processor") and line.partition(":")[0].strip() == "processor" for line in lines
        )
    try:
        threads = 2 if machine.text(f"{_CPU}/smt/active") == "1" else 1
    except Unreadable:
        threads = 1
    return count, threads


def count_list(text: str) -> int:
    """Return how many numbers a list of the kernel's has, such as ``0-3,8``.

    Raises:
        Unreadable: it is none.
    """
    count = 0
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    except ValueError as error:
        raise Unreadable(f"{text[:40]!r} is no list of processors") from error
    return count


def _cores(machine: Machine, context: Context) -> List[Finding]:
    """A description may mean cores or threads: more than cores and fewer than threads is either, less a few."""
    wanted, bound = context.wanted.cores, context.policy["inventory.cores"]
    if wanted is None:
        return []
    try:
        threads, of_core = cores(machine)
    except Unreadable as error:
        return [unknown("inventory", bound, error)]
    text = (
        f"{threads} processors are online, {wanted} are described; look for processors that are off or lost"
    )
    found = [weigh("inventory", bound, max(0, wanted - threads), text)]
    real = threads // of_core
    text = f"{real} cores with {threads} threads are online, {wanted} are described; if these are cores, some are lost"
    lost = wanted - real if real < wanted < threads else 0
    return [*found, weigh("inventory", context.policy["inventory.cores_smt"], lost, text)]


def _meminfo(machine: Machine) -> Callable[[str], int]:
    """Return what /proc/meminfo says by name, in bytes (counts of pages as they are)."""
    values = machine.key_values("/proc/meminfo")

    def value(name: str) -> int:
        words = values.get(name, "").split()
        if not words:
            raise Absent(f"/proc/meminfo has no {name}")
        if not words[0].isdecimal():
            raise Unreadable(f"/proc/meminfo holds {words[0][:20]!r} for {name}, not a number")
        return int(words[0]) * (_KIB if words[-1] == "kB" else 1)

    return value


def _memory(machine: Machine, context: Context) -> List[Finding]:
    wanted, bound = context.wanted.memory, context.policy["inventory.memory"]
    if not wanted:
        return []
    try:
        total = _meminfo(machine)("MemTotal")
    except Unreadable as error:
        return [unknown("inventory", bound, error)]
    text = f"Linux has {total / 2**30:.1f} GiB of memory, {wanted / 2**30:.1f} are described; look for a module that is lost"
    return [weigh("inventory", bound, total / wanted, text)]


def _swap(machine: Machine, context: Context) -> List[Finding]:
    try:
        value = _meminfo(machine)
        used, total = value("SwapTotal") - value("SwapFree"), value("MemTotal")
    except Unreadable:
        return []  # without swap nothing is swapped out
    text = f"{used / 2**30:.1f} GiB are swapped out; look for processes that are left behind"
    return [weigh("inventory", context.policy["inventory.swap_used"], used / max(1, total), text)]


def _clock(machine: Machine, context: Context) -> List[Finding]:
    """A clock that nobody is known to discipline says nothing of its error: chrony without rtcsync looks the same."""
    try:
        state = machine.clock_state()
    except Unreadable:
        return []
    if not state.synced:
        return []
    text = f"the node's clock may be {state.error_s:.2g} s wrong; look at chrony or NTP"
    return [weigh("inventory", context.policy["inventory.clock_error"], state.error_s, text)]


# -- properties by name ----------------------------------------------------------------------------------------------


def _numa(machine: Machine) -> str:
    nodes = [
        name
        for name in machine.names_in("/sys/devices/system/node")
        if name[:4] == "node" and name[4:].isdecimal()
    ]
    return str(len(nodes))


def _governor(machine: Machine) -> str:
    """Return the governors of all processors; several are joined by commas."""
    names = [name for name in machine.names_in(_CPU) if name[:3] == "cpu" and name[3:].isdecimal()]
    found = {_text_or_none(machine, f"{_CPU}/{name}/cpufreq/scaling_governor") for name in names} - {None}
    if not found:
        raise Absent("no processor has a governor")
    return ",".join(sorted(filter(None, found)))


def _text_or_none(machine: Machine, name: str) -> Optional[str]:
    try:
        return machine.text(name)
    except Absent:
        return None


def _hugepages(machine: Machine) -> str:
    return str(_meminfo(machine)("HugePages_Total"))


def _cpu_field(name: str) -> Callable[[Machine], str]:
    def read(machine: Machine) -> str:
        value = machine.key_values("/proc/cpuinfo").get(name)
        if not value:
            raise Absent(f"/proc/cpuinfo has no {name}")
        return value

    return read


def _file(name: str) -> Callable[[Machine], str]:
    return lambda machine: machine.text(name)


def _chosen(name: str) -> Callable[[Machine], str]:
    """Return a reader of the chosen word of a file such as ``always [madvise] never``."""

    def read(machine: Machine) -> str:
        text = machine.text(name)
        return text.partition("[")[2].partition("]")[0] or text

    return read


def _rounded_memory(machine: Machine) -> str:
    """Return the memory to 16 GiB (1 GiB below 64): nodes of one kind differ by a few MiB."""
    gib = _meminfo(machine)("MemTotal") / 2**30
    step = 16 if gib >= 64 else 1
    return f"{round(gib / step) * step} GiB"


def _synced(machine: Machine) -> str:
    return "yes" if machine.clock_state().synced else "no"


#: What ``expect:`` may name, and how it is read. ``driver`` and others belong to checks of their vendors.
EXPECTABLE: Dict[str, Callable[[Machine], str]] = {
    "numa": _numa,
    "governor": _governor,
    "hugepages": _hugepages,
    "kernel": _file("/proc/sys/kernel/osrelease"),
    "bios": _file("/sys/class/dmi/id/bios_version"),
}

#: What it may name besides, for the checks of devices. ``firmware`` is that of devices, and of the node where it has none.
OF_DEVICES = frozenset(
    {
        *("driver", "firmware", "vbios", "device_memory", "power_limit", "nvlinks", "ecc", "mig"),
        *("compute_partition", "memory_partition"),
    }
)

#: Facts by name.
_FACTS: Dict[str, Callable[[Machine], str]] = {
    **{("NUMA nodes" if name == "numa" else name): read for name, read in EXPECTABLE.items()},
    "processors online": lambda machine: str(cores(machine)[0]),
    "threads per core": lambda machine: str(cores(machine)[1]),
    "memory": _rounded_memory,
    "processor": _cpu_field("model name"),
    "microcode": _cpu_field("microcode"),
    "machine": _file("/sys/class/dmi/id/product_name"),
    "transparent huge pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
    "clock synchronised": _synced,
}


def _expected(machine: Machine, context: Context) -> List[Finding]:
    found = []
    bound, kind = context.policy["inventory.expected"], context.wanted.accelerator
    names = ", ".join(sorted({*EXPECTABLE, *OF_DEVICES}))
    for name, wanted in context.wanted.expect.items():
        read = EXPECTABLE["bios"] if (name, kind) == ("firmware", "cpu") else EXPECTABLE.get(name)
        if read is None:
            if name not in OF_DEVICES:
                text = f"{name} is expected to be {wanted}, and no check reads {name}; there are {names}"
                found.append(unknown("inventory", bound, Unreadable(text)))
            continue
        try:
            value: Optional[str] = read(machine)
        except Absent:
            value = None
        except Unreadable as error:
            found.append(unknown("inventory", bound, error))
            continue
        text = f"{name} is {value or 'none'}, {wanted} is described"
        found.append(weigh("inventory", bound, int(value != str(wanted)), text))
    return found


def _facts(machine: Machine) -> Tuple[Fact, ...]:
    found = []
    for name, read in _FACTS.items():
        try:
            value = read(machine)
        except Unreadable:
            continue
        found.append(Fact("inventory", name, value, severity=Severity.WARNING))
    return tuple(found)


def _describe(facts: Tuple[Fact, ...]) -> str:
    said = {fact.name: fact.value for fact in facts}
    parts = [
        f"{name} {said[name]}"
        for name in ("processors online", "memory", "NUMA nodes", "kernel")
        if name in said
    ]
    return ", ".join(parts) or "nothing of this node can be read, and nothing is described"


CHECKS: Tuple[Check, ...] = (Inventory(),)
