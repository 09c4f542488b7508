"""Processes of a node: those left from other jobs, and how the job's own ranks are bound to cores, memory and devices."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from pytest_mlhpc.node.agents.nodes import number_ranges
from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable, is_number, numbers, or_else, some

#: What /proc counts CPU time in, in ticks a second.
TICKS = float(os.sysconf("SC_CLK_TCK"))

#: The kernel's own processes are all children of this one (kthreadd, since Linux 2.6.24).
KERNEL = 2


@dataclass(frozen=True)
class Process:
    """One process; ``cpu_s`` is what it has computed in all, in seconds, ``started_s`` when it began, after booting."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    cpu_s: float
    started_s: float


def parse(text: str) -> Process:
    """Return a process from its /proc/PID/stat (proc(5)); a name may hold blanks and brackets.

    Raises:
        Unreadable: there is something else in it.
    """
    head, _, tail = text.rpartition(")")
    number, _, name = head.partition("(")
    fields = tail.split()
    try:
        return Process(
            int(number),
            name,
            fields[0],
            int(fields[1]),
            int(fields[3]),
            (int(fields[11]) + int(fields[12])) / TICKS,
            int(fields[19]) / TICKS,
        )
    except (ValueError, IndexError) as error:
        raise Unreadable(f"{text[:40]!r} is no line of /proc/PID/stat") from error


def pids(machine: Machine) -> List[int]:
    """Return the visible processes, in order."""
    folders = machine.names("/proc/[0-9]*")
    return sorted(int(name.rpartition("/")[2]) for name in folders if is_number(name.rpartition("/")[2]))


def processes(machine: Machine) -> Dict[int, Process]:
    """Return all that are visible; those that end meanwhile are left out."""
    every = (_process_of(machine, pid) for pid in pids(machine))
    return {process.pid: process for process in every if process is not None}


def _process_of(machine: Machine, pid: int) -> Optional[Process]:
    try:
        return parse(machine.text(f"/proc/{pid}/stat"))
    except Unreadable:
        return None


def variables(machine: Machine, pid: int) -> Dict[str, str]:
    """Return the environment with which a process was started; empty where it is not ours to see."""
    text = or_else(machine.text, f"/proc/{pid}/environ", "", Unreadable)
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, between, value in pairs if between}


def cgroup(machine: Machine, pid: object) -> str:
    """Return the text of a process's cgroups; empty where it is not visible."""
    return or_else(machine.text, f"/proc/{pid}/cgroup", "", Unreadable)


def ours(machine: Machine, found: Dict[int, Process], me: Process) -> FrozenSet[int]:
    """Return what belongs to this vetting and its job: its session, those above it, all below them, and its Slurm job."""
    above: List[int] = []
    at: Optional[Process] = me
    while at is not None and at.pid > 1 and at.pid not in above:
        above.append(at.pid)
        at = found.get(at.parent)
    roots: Set[int] = set(above[:2])  # this process and the agent that started it
    mark = machine.environ.get("SLURM_JOB_ID", "")
    belongs = set(above)
    for pid, process in found.items():
        near = process.session == me.session or process.parent in roots
        if near or (mark and f"/job_{mark}/" in cgroup(machine, pid) + "/"):
            belongs.add(pid)
    grown = True
    while grown:  # children of children; a tree is a few levels high
        more = {pid for pid, process in found.items() if process.parent in belongs - set(above[2:])} - belongs
        belongs |= more
        grown = bool(more)
    return frozenset(belongs)


#: A process that is running now and has computed so long, in seconds, is no passing command.
BUSY_S = 10.0

#: Users below this number are the system's own. Source: login.defs(5), UID_MIN.
FIRST_USER = 1000

#: Device files of accelerators. Sources: NVIDIA driver's README; amdgpu's and amdkfd's documentation.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")


def _judge_leftovers(exam: Examination) -> str:
    """Read all visible processes once."""
    machine = exam.machine
    me = parse(machine.text("/proc/self/stat"))
    found = processes(machine)
    mine = ours(machine, found, me)
    others = [
        one
        for one in found.values()
        if one.pid not in mine and KERNEL not in (one.pid, one.parent) and one.pid > 1
    ]
    busy, holders = _busy(machine, others), _holders(machine, others)
    cores = len(machine.names("/sys/devices/system/node/node*/cpu[0-9]*")) or _online(machine)
    text = (
        f"{len(busy)} processes that are none of this job's compute on this node ({some(busy)}): "
        "end them, or ask for nodes of your own (--exclusive)"
    )
    exam.judge("job.leftover_busy", len(busy), text)
    text = f"they take {len(busy)} of {cores} processors"
    exam.judge("job.leftover_share", len(busy) / max(1, cores), text)
    text = f"processes of yours from before hold a device and its memory ({some(holders)}): end them"
    exam.judge("job.leftover_device", len(holders), text)
    return f"none of {len(others)} other processes computes"


def _busy(machine: Machine, others: List[Process]) -> Tuple[str, ...]:
    found = []
    for one in others:
        if one.state == "R" and one.cpu_s >= BUSY_S:
            user = machine.status(one.pid, "Uid") or ""
            if not is_number(user) or int(user) >= FIRST_USER:
                found.append(f"{one.pid} {one.name[:20]!r} of user {user or '?'}")
    return tuple(found)


def _holders(machine: Machine, others: List[Process]) -> Tuple[str, ...]:
    """Return those that have a device open; only files of one's own processes are visible (proc(5))."""
    found = []
    for one in others:
        targets = (_target(machine, name) for name in machine.names(f"/proc/{one.pid}/fd/*"))
        target = next((target for target in targets if target.startswith(DEVICES)), None)
        if target is not None:
            found.append(f"{one.pid} {one.name[:20]!r} {target}")
    return tuple(found)


def _target(machine: Machine, link: str) -> str:
    try:
        return os.readlink(machine.path(link))  # noqa: PTH115 - the node's own text, never followed
    except OSError:  # closed meanwhile, or another user's
        return ""


def _online(machine: Machine) -> int:
    return len(numbers(machine.text("/sys/devices/system/cpu/online")))


@dataclass(frozen=True)
class RankBinding:
    """What one rank was given: processors, NUMA nodes of memory, and what its variable says of devices (None: nothing).

    ``group`` is its cgroup: ranks of different ones may count different devices from 0.
    """

    name: str
    cpus: FrozenSet[int]
    memories: FrozenSet[int]
    visible: Optional[Tuple[str, ...]] = None
    group: str = ""


@dataclass(frozen=True)
class Board:
    """The node: processors by NUMA node, each processor's core (its lowest sibling), and each device's NUMA node.

    ``devices`` are in the order in which drivers count them; -1 is unknown. ``granted`` is how many processors the job has here.
    """

    numa: Mapping[int, FrozenSet[int]]
    core: Mapping[int, int] = field(default_factory=dict)
    devices: Tuple[int, ...] = ()
    granted: int = 0

    def cores(self, cpus: FrozenSet[int]) -> int:
        """Return how many cores these processors are."""
        return len({self.core.get(cpu, cpu) for cpu in cpus})

    def nodes(self, cpus: FrozenSet[int]) -> FrozenSet[int]:
        """Return the NUMA nodes on which they are."""
        return frozenset(number for number, members in self.numa.items() if members & cpus)


def _alike(ranks: Sequence[RankBinding]) -> Dict[FrozenSet[int], List[RankBinding]]:
    groups: Dict[FrozenSet[int], List[RankBinding]] = {}
    for rank in ranks:
        groups.setdefault(rank.cpus, []).append(rank)
    return groups


def _judge_cores(exam: Examination, ranks: Sequence[RankBinding], wanted: int, board: Board) -> None:
    """Judge cores; a single rank may stand for a launcher that starts *wanted* ranks itself, such as torchrun."""
    groups = _alike(ranks)
    shares = [
        (board.cores(cpus) / (len(members) if len(ranks) > 1 else wanted), cpus, members)
        for cpus, members in groups.items()
    ]
    share, cpus, members = min(shares, key=lambda one: one[0])
    who = f"{len(members)} of {len(ranks)} ranks" if len(ranks) > 1 else f"{wanted} ranks"
    text = (
        f"{who} share {board.cores(cpus)} cores (processors {_short(cpus)} of {board.granted}): give --cpus-per-task "
        "to srun itself, which does not take it from sbatch (SRUN_CPUS_PER_TASK does)"
    )
    exam.judge("job.cores_per_rank" if board.devices else "job.cores_per_cpu_rank", share, text)
    narrow = [same for cpus, same in groups.items() if len(same) > 1 and len(cpus) < board.granted]
    worst = max(narrow, key=len, default=[])
    text = (
        f"ranks {some(tuple(rank.name for rank in worst))} are all bound to processors "
        f"{_short(worst[0].cpus) if worst else ''} while others idle: bind each to its own, --cpu-bind=cores"
    )
    exam.judge("job.same_cores", max(0, len(worst) - 1), text)
    far = max(len(board.nodes(rank.cpus) - rank.memories) if rank.memories else 0 for rank in ranks)
    text = f"{far} NUMA nodes give cores to a rank but no memory: --mem-bind, or cpuset.mems of the cgroup, is too narrow"
    exam.judge("job.memory_far", far, text)


def _index(rank: RankBinding, board: Board) -> Optional[Tuple[int, ...]]:
    """Return the devices that a rank sees by their number; None where they are named in another way."""
    if rank.visible is None:
        return tuple(range(len(board.devices)))
    if not all(is_number(word) for word in rank.visible):
        return None
    return tuple(int(word) for word in rank.visible if int(word) < len(board.devices))


def _judge_devices(exam: Examination, ranks: Sequence[RankBinding], wanted: int, board: Board) -> None:
    one_view = len({rank.group for rank in ranks}) == 1
    if len({rank.visible for rank in ranks}) == 1 and one_view:
        count = len(board.devices) if ranks[0].visible is None else len(ranks[0].visible)
        needed = max(wanted, len(ranks))
        text = f"{needed} ranks, but only {count} devices are visible: ask for --gpus-per-node={needed}, or start fewer ranks"
        exam.judge("job.devices_per_rank", count / needed, text)
    twice = _twice(ranks, one_view=one_view)
    text = (
        f"ranks {some(twice)} were given a device that another rank has as well; NCCL refuses that: "
        "set each rank's device from its local rank, or --gpus-per-task with --gpu-bind"
    )
    exam.judge("job.same_device", len(twice), text)
    far = _far(ranks, board) if one_view else ()
    text = f"{some(far)} on another NUMA node than the rank's cores: --gpu-bind=closest, or --cpu-bind with a map"
    exam.judge("job.device_far", len(far), text)


def _twice(ranks: Sequence[RankBinding], *, one_view: bool) -> Tuple[str, ...]:
    """Return the ranks whose only device is another's, too; numbers count only where all see the same devices."""
    first: Dict[Tuple[str, ...], str] = {}
    twice = []
    for rank in ranks:
        if rank.visible is None or len(rank.visible) != 1 or not (one_view or not is_number(rank.visible[0])):
            continue
        if first.setdefault(rank.visible, rank.name) != rank.name:
            twice.append(rank.name)
    return tuple(twice)


def _far(ranks: Sequence[RankBinding], board: Board) -> Tuple[str, ...]:
    """Return the devices that no core of their rank is near; a rank that sees all devices has all of them."""
    far = []
    for rank in ranks:
        devices = _index(rank, board)
        near = board.nodes(rank.cpus)
        if devices is None or (len(ranks) > 1 and len(devices) > 1) or not near:
            continue  # nobody knows yet which of them it will take
        far += [
            f"device {device} of rank {rank.name}"
            for device in devices
            if board.devices[device] >= 0 and board.devices[device] not in near
        ]
    return tuple(far)


def _short(cpus: FrozenSet[int]) -> str:
    """Return processors as the kernel writes them: ``0-3,8``."""
    ranges = number_ranges(cpus)
    return ",".join(ranges[:6]) + (",..." if len(ranges) > 6 else "")


#: PCI vendors of accelerators, and the classes that they use: displays, of Intel without a console, and processing accelerators.
#: Source: pci.ids, as of 2026-11.
VENDORS = {"cuda": ("0x10de",), "rocm": ("0x1002",), "xpu": ("0x8086",)}
CLASSES = {"cuda": ("0x03",), "rocm": ("0x03", "0x12"), "xpu": ("0x038", "0x12")}

#: What says which devices a process may use, the first that is set counts. Sources: CUDA programming guide, CUDA_VISIBLE_DEVICES;
#: ROCm, GPU isolation; oneAPI Level Zero specification, ZE_AFFINITY_MASK.
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def _judge_binding(exam: Examination) -> str:
    """Look at this process and the other tasks of its job step."""
    machine = exam.machine
    kind, places = _devices(machine, exam.wanted.accelerator)
    me = _rank(machine, machine.environ.get("SLURM_LOCALID") or "0", "self", machine.environ, kind)
    ranks = _tasks(machine, kind) or [me]
    board = _board(machine, places)
    wanted = exam.wanted.ranks or len(me.visible or places) or 1
    _judge_cores(exam, ranks, wanted, board)
    if board.devices:
        _judge_devices(exam, ranks, wanted, board)
    return f"{len(ranks)} tasks, bound as they should be"


def _rank(machine: Machine, name: str, pid: object, environ: Mapping[str, str], kind: str) -> RankBinding:
    status = machine.key_values(f"/proc/{pid}/status")
    if "Cpus_allowed_list" not in status:
        raise Unreadable(f"/proc/{pid}/status does not say Cpus_allowed_list")
    return RankBinding(
        name,
        numbers(status["Cpus_allowed_list"]),
        numbers(status.get("Mems_allowed_list", "")),
        _visible(environ, kind),
        cgroup(machine, pid),
    )


def _visible(environ: Mapping[str, str], kind: str) -> Optional[Tuple[str, ...]]:
    for name in VISIBLE.get(kind, ()):
        if name in environ:
            return tuple(word.strip() for word in environ[name].split(",") if word.strip())
    return None


def _tasks(machine: Machine, kind: str) -> List[RankBinding]:
    """Return the tasks of our own job step on this node, by local rank; empty where there is only one, or no step."""
    job, step = machine.environ.get("SLURM_JOB_ID"), machine.environ.get("SLURM_STEP_ID")
    if not job or not step:
        return []
    found: Dict[str, RankBinding] = {}
    for pid in pids(machine):
        environ = variables(machine, pid)
        local = environ.get("SLURM_LOCALID")
        if local is None or local in found or environ.get("SLURM_JOB_ID") != job:
            continue
        if environ.get("SLURM_STEP_ID") == step:
            rank = _ended_or(machine, local, pid, environ, kind)
            found.update({} if rank is None else {local: rank})
    return [found[local] for local in sorted(found, key=int)] if len(found) > 1 else []


def _ended_or(
    machine: Machine, local: str, pid: int, environ: Mapping[str, str], kind: str
) -> Optional[RankBinding]:
    try:
        return _rank(machine, local, pid, environ, kind) if is_number(local) else None
    except Absent:
        return None  # it has ended


def _devices(machine: Machine, accelerator: str) -> Tuple[str, Tuple[int, ...]]:
    """Return which kind of devices there is, and their NUMA nodes in the order of the bus (-1: not known)."""
    kinds = [accelerator] if accelerator in VENDORS else list(VENDORS) if accelerator == "auto" else []
    found: Dict[str, List[int]] = {kind: [] for kind in kinds}
    for path in machine.names("/sys/bus/pci/devices/*/class") if kinds else []:
        folder = path.rpartition("/")[0]
        vendor, what = machine.text(f"{folder}/vendor"), machine.text(path)
        for kind in kinds:
            if vendor in VENDORS[kind] and what.startswith(CLASSES[kind]):
                found[kind].append(or_else(machine.number, f"{folder}/numa_node", -1))
    kind = max(kinds, key=lambda one: len(found[one]), default="cpu")
    return kind, tuple(found.get(kind, ()))


def _board(machine: Machine, devices: Tuple[int, ...]) -> Board:
    numa: Dict[int, FrozenSet[int]] = {}
    for path in machine.names("/sys/devices/system/node/node[0-9]*/cpulist"):
        numa[int(path.split("/")[-2][4:])] = numbers(machine.text(path))
    core = {}
    for path in machine.names("/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        core[int(path.split("/")[-3][3:])] = min(numbers(machine.text(path)), default=0)
    try:
        online = len(numbers(machine.text("/sys/devices/system/cpu/online")))
    except Absent:
        online = sum(len(cpus) for cpus in numa.values())
    given = machine.environ.get("SLURM_CPUS_ON_NODE", "")
    return Board(numa, core, devices, int(given) if is_number(given) else online)


CHECKS = (
    Check.named("job_processes", _judge_leftovers),
    Check.named("job_binding", _judge_binding),
)
