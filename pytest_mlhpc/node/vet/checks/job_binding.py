"""PAYLOAD. How ranks are bound on this node, as they were launched: cores, memory, devices.

The vetting process stands for the ranks that it was started as, or that a launcher will start below it; other tasks of its
job step are looked up in /proc, so that ``srun --ntasks-per-node=4 mlhpc vet`` shows the binding of four.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.job_findings import is_number, numbers, outcome
from pytest_mlhpc.node.vet.job_processes import cgroup, pids, variables
from pytest_mlhpc.node.vet.job_ranks import CHECK, Board, Rank, judge
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable

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


class Binding:
    """Cores, memory and devices that ranks were given."""

    name = CHECK
    level = "quick"
    cost_s = 0.2
    reads = (
        "/proc/self/status",
        "/proc/*/environ",
        "/proc/*/status",
        "/sys/devices/system/node",
        "/sys/bus/pci/devices",
    )
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look at this process and the other tasks of its job step."""
        kind, places = _devices(machine, context.wanted.accelerator)
        me = _rank(machine, machine.environ.get("SLURM_LOCALID") or "0", "self", machine.environ, kind)
        ranks = _tasks(machine, kind) or [me]
        board = _board(machine, places)
        wanted = context.wanted.ranks or len(me.visible or places) or 1
        said = judge(ranks, wanted, board, context.policy)
        return outcome(self.name, said, f"{len(ranks)} tasks, bound as they should be")


def _rank(machine: Machine, name: str, pid: object, environ: Mapping[str, str], kind: str) -> Rank:
    status = machine.key_values(f"/proc/{pid}/status")
    if "Cpus_allowed_list" not in status:
        raise Unreadable(f"/proc/{pid}/status does not say Cpus_allowed_list")
    return Rank(
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


def _tasks(machine: Machine, kind: str) -> List[Rank]:
    """Return the tasks of our own job step on this node, by local rank; empty where there is only one, or no step."""
    job, step = machine.environ.get("SLURM_JOB_ID"), machine.environ.get("SLURM_STEP_ID")
    if not job or not step:
        return []
    found: Dict[str, Rank] = {}
    for pid in pids(machine):
        environ = variables(machine, pid)
        local = environ.get("SLURM_LOCALID")
        if local is None or local in found or environ.get("SLURM_JOB_ID") != job:
            continue
        if environ.get("SLURM_STEP_ID") == step:
            rank = _gone_or(machine, local, pid, environ, kind)
            found.update({} if rank is None else {local: rank})
    return [found[local] for local in sorted(found, key=int)] if len(found) > 1 else []


def _gone_or(machine: Machine, local: str, pid: int, environ: Mapping[str, str], kind: str) -> Optional[Rank]:
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
                found[kind].append(_numa(machine, folder))
    kind = max(kinds, key=lambda one: len(found[one]), default="cpu")
    return kind, tuple(found.get(kind, ()))


def _numa(machine: Machine, folder: str) -> int:
    try:
        return machine.number(f"{folder}/numa_node")
    except Absent:
        return -1


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


CHECKS = (Binding(),)
