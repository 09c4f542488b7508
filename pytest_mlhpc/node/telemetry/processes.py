"""No torch. Processes of a tree, of a job or of a container, read from /proc (proc(5)).

Entries vanish at any moment, between two reads of one process too: what is gone by then is not in the sample.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from pytest_mlhpc.node.telemetry.samples import ProcessSample

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
