"""No torch. What a sample reads of a node: processes of a tree, a job or a container from /proc (proc(5)), and accelerators.

Processes vanish at any moment, between two reads of one process too: what is gone by then is not in the sample. Accelerators are
read by nvidia-ml-py (NVIDIA) and amdsmi (AMD), where these are. What a board or a version does not tell is None. Names of calls and
units: NVML API reference (milliwatts, MHz, bytes), amdsmi's Python API (watts, MHz, MiB; ``N/A`` or the largest number of a type
where nothing is known).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Set, Tuple

from pytest_mlhpc.node.telemetry.samples import DeviceSample, ProcessSample

#: Who tells a process its rank, the surest first: torchrun, Open MPI and PopRun upon it, PMI (MPICH, Cray), Slurm.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

#: Threads of one process that are looked at one by one; of more, these stand for all.
MOST_THREADS = 64

#: Readings of a new process in which its environment is read again: between fork and exec it has its parent's.
FRESH_READINGS = 2

#: Bytes of /proc/PID/environ that are read.
MOST_ENVIRON = 256 << 10


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says: times in ticks, memory in pages."""

    name: str
    state: str
    parent: int
    ticks: int
    start: int
    pages: int
    blkio: int


def parse_stat(text: str) -> Optional[Stat]:
    """Read a stat file of a process or thread; its name may hold blanks and brackets. None: cut short."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    try:
        return Stat(
            name=head.partition("(")[2],
            state=fields[0],
            parent=int(fields[1]),
            ticks=int(fields[11]) + int(fields[12]),
            start=int(fields[19]),
            pages=int(fields[21]),
            blkio=int(fields[39]) if len(fields) > 39 else 0,
        )
    except (IndexError, ValueError):
        return None


def parse_pairs(text: str) -> Dict[str, int]:
    """Read ``name: number ...`` lines, as status and io have them; others are left out."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        word = rest.split()[:1]
        if word and word[0].isdigit():
            found[name] = int(word[0])
    return found


def parse_environ(data: bytes, names: Sequence[str]) -> Dict[str, str]:
    """Return those of *names* that an environ file holds."""
    wanted = {name.encode() for name in names}
    found = {}
    for word in data.split(b"\0"):
        name, _, value = word.partition(b"=")
        if name in wanted:
            found[name.decode()] = value.decode("utf-8", "replace")
    return found


def rank_of(environ: Mapping[str, str]) -> Optional[Tuple[int, int]]:
    """Return (how sure, 0 is the surest; rank) of a process's environment."""
    for sureness, name in enumerate(RANK_VARIABLES):
        value = environ.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 9:
            return sureness, int(value)
    return None


def below(root: int, parents: Mapping[int, int]) -> Set[int]:
    """Return all processes below *root*, and itself."""
    children: Dict[int, List[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


class Reader:
    """Reads samples. What never changes of a process (its environment at its start) is read once.

    Args:
        root: only processes below this one, without it. None: all that may be read.
        job: only processes of this Slurm job.
        proc: where /proc is; tests have others.
    """

    def __init__(
        self, root: Optional[int] = None, job: Optional[str] = None, proc: Path = Path("/proc")
    ) -> None:
        self._root, self._job, self._proc = root, job, str(proc)
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._environ: Dict[
            Tuple[int, int], Tuple[int, Dict[str, str]]
        ] = {}  # readings so far, what was found

    def read(self) -> Tuple[ProcessSample, ...]:
        """Return a sample of each process that is wanted and still there."""
        stats = self._stats()
        parents = {pid: stat.parent for pid, stat in stats.items()}
        pids = set(stats) if self._root is None else below(self._root, parents) - {self._root}
        # The looker and what it starts is no part of what is looked at.
        pids -= below(os.getpid(), parents) if self._root != os.getpid() else set()
        alive = {(pid, stats[pid].start) for pid in pids if pid in stats}
        self._environ = {key: value for key, value in self._environ.items() if key in alive}
        environments = {pid: self._environment(pid, stats[pid].start) for pid in pids if pid in stats}
        if self._job is not None:
            environments = {
                pid: found for pid, found in environments.items() if found.get("SLURM_JOB_ID") == self._job
            }
        ranks = {pid: rank_of(found) for pid, found in environments.items()}
        surest = min((found[0] for found in ranks.values() if found is not None), default=0)
        samples = []
        for pid in sorted(environments):
            found = ranks[pid]
            rank = found[1] if found is not None and found[0] == surest else None
            sample = self._sample(pid, stats[pid], rank)
            if sample is not None:
                samples.append(sample)
        return tuple(samples)

    def _stats(self) -> Dict[int, Stat]:
        found = {}
        try:
            names = os.listdir(self._proc)  # noqa: PTH208 - names alone, hundreds of them
        except OSError:
            return {}
        for name in names:
            if name.isdigit():
                stat = parse_stat(self._text(f"{name}/stat"))
                if stat is not None and stat.state not in "ZX":
                    found[int(name)] = stat
        return found

    def _sample(self, pid: int, stat: Stat, rank: Optional[int]) -> Optional[ProcessSample]:
        states, main = self._threads(pid)
        if main is None:  # ended since
            return None
        status, io = parse_pairs(self._text(f"{pid}/status")), parse_pairs(self._text(f"{pid}/io"))
        return ProcessSample(
            pid=pid,
            parent=stat.parent,
            start_ticks=stat.start,
            name=stat.name,
            rank=rank,
            cpu_s=stat.ticks / self._ticks,
            main_cpu_s=main.ticks / self._ticks,
            main_state=main.state,
            running=states.count("R"),
            disk=states.count("D"),
            sleeping=sum(state not in "RD" for state in states),
            rss_bytes=stat.pages * self._page,
            blkio_s=stat.blkio / self._ticks,
            voluntary=status.get("voluntary_ctxt_switches"),
            involuntary=status.get("nonvoluntary_ctxt_switches"),
            read_bytes=io.get("read_bytes"),
            rchar_bytes=io.get("rchar"),
        )

    def _threads(self, pid: int) -> Tuple[List[str], Optional[Stat]]:
        """Return the states of a process's threads, and what its first thread says."""
        try:
            names = os.listdir(f"{self._proc}/{pid}/task")  # noqa: PTH208 - as above
        except OSError:
            names = []
        states = []
        main = parse_stat(self._text(f"{pid}/task/{pid}/stat"))
        if main is not None:
            states.append(main.state)
        for name in names[:MOST_THREADS]:
            thread = parse_stat(self._text(f"{pid}/task/{name}/stat")) if name != str(pid) else None
            if thread is not None:
                states.append(thread.state)
        return states, main

    def _environment(self, pid: int, start: int) -> Dict[str, str]:
        readings, found = self._environ.get((pid, start), (0, {}))
        if readings < FRESH_READINGS:
            try:
                with open(f"{self._proc}/{pid}/environ", "rb") as file:  # noqa: PTH123 - hundreds of these
                    data = file.read(MOST_ENVIRON)
            except OSError:  # gone, or another user's
                data = b""
            found = parse_environ(data, (*RANK_VARIABLES, "SLURM_JOB_ID"))
            self._environ[pid, start] = (readings + 1, found)
        return found

    def _text(self, name: str) -> str:
        try:
            with open(f"{self._proc}/{name}", "rb") as file:  # noqa: PTH123 - as above
                return file.read(65536).decode("utf-8", "replace")
        except (OSError, ValueError):
            return ""


#: Numbers by which AMD's driver says "not known": the largest of 16, 32 and 64 bits.
UNKNOWN = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

#: NVML_CLOCK_SM, NVML_TEMPERATURE_GPU.
CLOCK_SM, TEMPERATURE_GPU = 1, 0

MIB = 1 << 20


class Devices(Protocol):
    """Where samples of devices come from. ``text`` says what is there, or why nothing is."""

    text: str

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return a sample of each device."""


class NoDevices:
    """A node without a library that tells of accelerators."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return nothing."""
        return ()


@dataclass(frozen=True)
class _Board:
    """One device, with what never changes of it."""

    handle: Any
    index: int
    identity: str
    model: str
    limit_w: Optional[float] = None
    highest_hz: Optional[float] = None


class Nvidia:
    """All GPUs that NVML shows."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        module.nvmlInit()
        self._boards = [self._board(index) for index in range(int(module.nvmlDeviceGetCount()))]
        self.text = f"{len(self._boards)} x {self._boards[0].model}" if self._boards else "NVML shows no GPU"

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return a sample of each GPU; those that have fallen off the bus are without figures."""
        return tuple(self._sample(board) for board in self._boards)

    def _board(self, index: int) -> _Board:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        clock = self._ask("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM)
        return _Board(
            handle,
            index,
            _text(self._ask("nvmlDeviceGetUUID", handle)) or str(index),
            _text(self._ask("nvmlDeviceGetName", handle)) or "GPU",
            None if limit is None else limit / 1e3,
            None if clock is None else clock * 1e6,
        )

    def _sample(self, board: _Board) -> DeviceSample:
        handle = board.handle
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        clock = self._ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # its name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        celsius = self._ask("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU)
        users = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return DeviceSample(
            index=board.index,
            identity=board.identity,
            model=board.model,
            busy=None if rates is None else rates.gpu / 100.0,
            memory_busy=None if rates is None else rates.memory / 100.0,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_bytes=None if memory is None else int(memory.total),
            power_w=None if power is None else power / 1e3,
            power_limit_w=board.limit_w,
            celsius=None if celsius is None else float(celsius),
            clock_hz=None if clock is None else clock * 1e6,
            highest_clock_hz=board.highest_hz,
            reasons=None if reasons is None else int(reasons),
            pids=tuple(int(user.pid) for user in users),
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        function: Optional[Callable[..., Any]] = getattr(self._nvml, name, None)
        if function is None:  # an older nvidia-ml-py
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


class Amd:
    """All GPUs that amdsmi shows. Its reasons for low clocks have other names; they are no part of these samples."""

    def __init__(self, module: Any) -> None:
        self._smi = module
        module.amdsmi_init()
        handles = list(module.amdsmi_get_processor_handles())
        self._boards = [self._board(index, handle) for index, handle in enumerate(handles)]
        self.text = f"{len(handles)} x {self._boards[0].model}" if handles else "amdsmi shows no GPU"

    def read(self) -> Tuple[DeviceSample, ...]:
        """Return a sample of each GPU."""
        return tuple(self._sample(board) for board in self._boards)

    def _board(self, index: int, handle: Any) -> _Board:
        asic = self._ask("amdsmi_get_gpu_asic_info", handle)
        identity = self._ask_text("amdsmi_get_gpu_device_uuid", handle) or str(index)
        model = str(asic.get("market_name") or "GPU")
        cap = number(self._ask("amdsmi_get_power_cap_info", handle), "power_cap")
        limit = None if cap is None else cap / 1e6 if cap > 1e5 else cap  # microwatts in newer releases
        return _Board(handle, index, identity, model, limit)

    def _sample(self, board: _Board) -> DeviceSample:
        activity = self._ask("amdsmi_get_gpu_activity", board.handle)
        metrics = self._ask("amdsmi_get_gpu_metrics_info", board.handle)
        memory = self._ask("amdsmi_get_gpu_vram_usage", board.handle)
        busy, traffic = number(activity, "gfx_activity"), number(activity, "umc_activity")
        used, total = number(memory, "vram_used"), number(memory, "vram_total")
        clock = number(metrics, "current_gfxclk")
        return DeviceSample(
            index=board.index,
            identity=board.identity,
            model=board.model,
            busy=None if busy is None else busy / 100.0,
            memory_busy=None if traffic is None else traffic / 100.0,
            memory_used_bytes=None if used is None else int(used * MIB),
            memory_bytes=None if total is None else int(total * MIB),
            power_w=number(metrics, "current_socket_power", "average_socket_power"),
            power_limit_w=board.limit_w,
            celsius=number(metrics, "temperature_hotspot"),
            clock_hz=None if clock is None else clock * 1e6,
        )

    def _ask(self, name: str, handle: Any) -> Mapping[str, Any]:
        found = self._call(name, handle)
        return found if isinstance(found, Mapping) else {}

    def _ask_text(self, name: str, handle: Any) -> str:
        found = self._call(name, handle)
        return found if isinstance(found, str) else ""

    def _call(self, name: str, handle: Any) -> Any:
        function: Optional[Callable[..., Any]] = getattr(self._smi, name, None)
        if function is None:
            return None
        try:
            return function(handle)
        except self._smi.AmdSmiException:
            return None


def number(found: Mapping[str, Any], *names: str) -> Optional[float]:
    """Return the first of *names* that *found* has a known number for."""
    for name in names:
        value = found.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in UNKNOWN:
            return float(value)
    return None


def find_devices(load: Callable[[str], Any] = importlib.import_module) -> Devices:
    """Return what tells of this node's accelerators. *load* imports a module; tests have another."""
    said: List[str] = []
    kinds: Tuple[Tuple[str, Callable[[Any], Any]], ...] = (("pynvml", Nvidia), ("amdsmi", Amd))
    for name, kind in kinds:
        found = _open(name, kind, load)
        if found.read():
            return found
        said.append(found.text)
    return NoDevices("; ".join(said))


def _open(name: str, kind: Callable[[Any], Any], load: Callable[[str], Any]) -> Devices:
    try:
        found: Devices = kind(load(name))
    except ImportError:
        return NoDevices(f"no module {name}")
    except Exception as error:  # noqa: BLE001 - drivers raise classes of their own; screening goes on without
        return NoDevices(f"{name}: {error}")
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
