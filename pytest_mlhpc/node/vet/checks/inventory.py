"""What a node has, against what its partition's description promises, and as facts that nodes should share.

*Not there*: a file that this kernel or machine does not have (cpufreq in a VM, DMI on Arm, NUMA in a container) gives no fact; where
its property is *described*, the node does not have it: "none", and not as described. *There and unreadable*: UNKNOWN for what is
described, no fact for what is not. Cores and memory exist on every node: without their files, what is described is UNKNOWN.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable, numbers, or_else

_CPU = "/sys/devices/system/cpu"
_KIB = 1024


def _judge(exam: Examination) -> str:
    """Look at each, and compare with what is described."""
    _judge_cores(exam)
    _judge_memory(exam)
    _judge_swap(exam)
    _judge_clock(exam)
    _judge_expected(exam)
    for name, read in _FACTS.items():
        value = or_else(lambda _, read=read: read(exam.machine), name, "", Unreadable)  # type: ignore[misc]
        if value:
            exam.fact(name, value)
    said = {fact.name: fact.value for fact in exam.facts}
    names = [name for name in ("processors online", "memory", "NUMA nodes", "kernel") if name in said]
    return (
        ", ".join(f"{name} {said[name]}" for name in names)
        or "nothing of this node can be read, and nothing is described"
    )


def cores(machine: Machine) -> Tuple[int, int]:
    """Return processors that are online, and threads of each core.

    Raises:
        Unreadable: neither sysfs nor /proc/cpuinfo says.
    """
    try:
        count = len(numbers(machine.text(f"{_CPU}/online")))
    except Absent:
        lines = machine.text("/proc/cpuinfo").splitlines()
        count = sum(line.partition(":")[0].strip() == "processor" for line in lines)
    active = or_else(machine.text, f"{_CPU}/smt/active", "", Unreadable)
    return count, 2 if active == "1" else 1


def _judge_cores(exam: Examination) -> None:
    """A description may mean cores or threads: more than cores and fewer than threads is either, less a few."""
    wanted = exam.wanted.cores
    if wanted is None:
        return
    try:
        threads, of_core = cores(exam.machine)
    except Unreadable as error:
        exam.unknown("inventory.cores", error)
        return
    text = (
        f"{threads} processors are online, {wanted} are described; look for processors that are off or lost"
    )
    exam.judge("inventory.cores", max(0, wanted - threads), text)
    real = threads // of_core
    text = f"{real} cores with {threads} threads are online, {wanted} are described; if these are cores, some are lost"
    exam.judge("inventory.cores_smt", wanted - real if real < wanted < threads else 0, text)


def memory_info(machine: Machine, name: str) -> int:
    """Return what /proc/meminfo says by name, in bytes (a count of pages as it is).

    Raises:
        Unreadable: it does not say.
    """
    fields = machine.key_values("/proc/meminfo").get(name, "").split()
    if not fields:
        raise Absent(f"/proc/meminfo has no {name}")
    if not fields[0].isdecimal():
        raise Unreadable(f"/proc/meminfo holds {fields[0][:20]!r} for {name}, not a number")
    return int(fields[0]) * (_KIB if fields[-1] == "kB" else 1)


def _judge_memory(exam: Examination) -> None:
    wanted = exam.wanted.memory
    if not wanted:
        return
    try:
        total = memory_info(exam.machine, "MemTotal")
    except Unreadable as error:
        exam.unknown("inventory.memory", error)
        return
    text = f"Linux has {total / 2**30:.1f} GiB of memory, {wanted / 2**30:.1f} are described; look for a module that is lost"
    exam.judge("inventory.memory", total / wanted, text)


def _judge_swap(exam: Examination) -> None:
    try:
        names = ("SwapTotal", "SwapFree", "MemTotal")
        swap, free, total = (memory_info(exam.machine, name) for name in names)
    except Unreadable:
        return  # without swap nothing is swapped out
    used = swap - free
    text = f"{used / 2**30:.1f} GiB are swapped out; look for processes that are left behind"
    exam.judge("inventory.swap_used", used / max(1, total), text)


def _judge_clock(exam: Examination) -> None:
    """A clock that nobody is known to discipline says nothing of its error: chrony without rtcsync reads the same."""
    try:
        state = exam.machine.clock_state()
    except Unreadable:
        return
    if state.synced:
        text = f"the node's clock may be {state.error_s:.2g} s wrong; look at chrony or NTP"
        exam.judge("inventory.clock_error", state.error_s, text)


# -- properties by name ----------------------------------------------------------------------------------------------


def _numa(machine: Machine) -> str:
    machine.names_in("/sys/devices/system/node")  # Absent without it: a kernel that knows no NUMA
    return str(len(machine.numbered("/sys/devices/system/node", "node")))


def _governor(machine: Machine) -> str:
    """Return the governors of all processors; several are joined by commas."""
    files = (f"{_CPU}/{name}/cpufreq/scaling_governor" for name in machine.numbered(_CPU, "cpu"))
    found = {or_else(machine.text, file, "") for file in files} - {""}
    if not found:
        raise Absent("no processor has a governor")
    return ",".join(sorted(found))


def _hugepages(machine: Machine) -> str:
    return str(memory_info(machine, "HugePages_Total"))


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
    gib = memory_info(machine, "MemTotal") / 2**30
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


def _judge_expected(exam: Examination) -> None:
    names = ", ".join(sorted({*EXPECTABLE, *OF_DEVICES}))
    for name, wanted in exam.wanted.expect.items():
        firmware = (name, exam.wanted.accelerator) == ("firmware", "cpu")
        read = EXPECTABLE["bios"] if firmware else EXPECTABLE.get(name)
        if read is None:
            if name not in OF_DEVICES:
                text = f"{name} is expected to be {wanted}, and no check reads {name}; there are {names}"
                exam.unknown("inventory.expected", text)
            continue
        value: Optional[str] = None
        try:
            value = read(exam.machine)
        except Absent:
            pass
        except Unreadable as error:
            exam.unknown("inventory.expected", error)
            continue
        text = f"{name} is {value or 'none'}, {wanted} is described"
        exam.judge("inventory.expected", int(value != str(wanted)), text)


CHECKS = (Check.named("inventory", _judge),)
