"""PAYLOAD. What launchers print about ranks that died, as facts. No input or output.

The texts are those of srun and slurmstepd 22.05 to 26.05, OpenMPI 4 and 5, and torch.distributed.run 1.13 to 2.13.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from pytest_mlhpc.node.foreign import read_json

#: A rank in the table that torch.distributed.run prints when a rank failed.
_TORCHRUN_TABLE = re.compile(r"rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+)")

#: ``srun: error: node2: task 3: Exited with exit code 7``; ``tasks 0-1,4: Killed``.
_SRUN_TASK = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$")
_SRUN_NODE = re.compile(r"^srun: error: Node failure on (\S+)")
_SRUN_LOST = re.compile(
    r"^srun: error: .*(?:Unable to create step|Unable to confirm allocation|launch failed).*"
)
_NO_PROGRAM = re.compile(r"^slurmstepd\S*: error: (execve\(\): .+)$")
_STEP_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT .*\*\*\*")
_OOM = re.compile(r"oom[-_ ]kill(?:er)? event|exceeded (?:job |step |)memory limit", re.IGNORECASE)

#: Beginning of what ``node/batch/podrun.py`` says of its processes: one JSON object a line.
PODRUN = "mlhpc-podrun: "
_PODRUN = re.compile(rf"{PODRUN}(\{{.*\}})$")

_PORT = re.compile(r"^mlhpc: (port \d+ .*)$")

#: OpenMPI's words on a rank that was killed, and on one that ended with a non-zero code.
_MPI_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)")
_MPI_NAME = re.compile(r"Process name: \[.*,\s*(\d+)\]")
_MPI_CODE = re.compile(r"Exit code:\s+(\d+)")

#: strsignal(3) of glibc, by which srun names signals.
_SIGNALS: Dict[str, int] = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Trace/breakpoint trap": 5, "Aborted": 6,
    "Bus error": 7, "Floating point exception": 8, "Killed": 9, "User defined signal 1": 10,
    "Segmentation fault": 11, "User defined signal 2": 12, "Broken pipe": 13, "Alarm clock": 14, "Terminated": 15,
    "CPU time limit exceeded": 24, "File size limit exceeded": 25,
}  # fmt: skip

#: Deaths that are noted, of all lines together: a step has at most so many tasks.
_MOST_DEATHS = 65536
#: Longest line that is looked at, in bytes.
_LONGEST = 4096


@dataclass(frozen=True)
class Death:
    """One task that ended badly. ``exit`` is its code or minus the signal's number; ``node`` as the launcher calls it."""

    task: int
    node: str
    exit: int
    out_of_memory: bool = False


@dataclass
class LauncherWords:
    """What was understood of a launcher's output so far, in its order."""

    deaths: List[Death] = field(default_factory=list)
    failed_nodes: List[str] = field(default_factory=list)
    lost_pods: List[Tuple[str, str, str]] = field(
        default_factory=list
    )  #: each with why, and the node whose fault it is, if it is one's
    no_program: str = ""  #: slurmstepd's words on a program that does not exist
    not_started: str = ""  #: srun's words on a step that it could not start
    port_taken: str = ""  #: our torchrun's words on a port that it cannot have (``node/worker/elastic.py``)
    cancelled: bool = False  #: the step was ended before any task had died, and not for its memory
    out_of_memory: bool = False  #: some task of the step was
    dropped: int = 0  #: bytes that other pods did not hand on, as they were too many
    _rest: str = ""
    _mpi_task: int = -1

    def feed(self, data: bytes) -> None:
        """Take the next piece of output, cut anywhere."""
        *lines, rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        self._rest = rest[-_LONGEST:]
        for line in lines:
            self._take(line[:_LONGEST].rstrip())

    def _take(self, line: str) -> None:
        found = _SRUN_TASK.match(line)
        if found:
            self._srun(found.group(1), found.group(2), found.group(3))
            return
        told = _PODRUN.search(line)
        if told:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._podrun(read_json(told.group(1)))
            return
        for pattern, name in (
            (_NO_PROGRAM, "no_program"),
            (_SRUN_LOST, "not_started"),
            (_PORT, "port_taken"),
        ):
            match = pattern.match(line)
            if match and not getattr(self, name):
                setattr(self, name, match.group(match.lastindex or 0))
        node = _SRUN_NODE.match(line)
        if node:
            self.failed_nodes.append(node.group(1))
        self.out_of_memory = self.out_of_memory or bool(_OOM.search(line))
        if not (self.deaths or self.out_of_memory):  # after those, srun or slurmstepd itself cancels the step
            self.cancelled = self.cancelled or bool(_STEP_CANCELLED.search(line))
        self._mpirun(line)

    def _srun(self, node: str, tasks: str, what: str) -> None:
        code = re.match(r"Exited with exit code (\d+)", what)
        memory = what.startswith("Out Of Memory")
        number = -_SIGNALS.get(what.partition(" (core dumped)")[0].strip(), 9)
        self.out_of_memory = self.out_of_memory or memory
        for task in _numbers(tasks, _MOST_DEATHS - len(self.deaths)):
            self.deaths.append(Death(task, node, int(code.group(1)) if code else number, memory))

    def _podrun(self, said: Dict[str, Any]) -> None:
        self.no_program = self.no_program or str(said.get("no_program", ""))
        self.not_started = self.not_started or str(said.get("not_started", ""))
        self.dropped += int(said.get("dropped", 0))
        if "lost" in said:
            self.lost_pods.append((str(said["lost"]), str(said["why"]), str(said.get("node", ""))))
        if "death" in said:
            death = said["death"]
            memory = bool(death["memory"])
            self.out_of_memory = self.out_of_memory or memory
            self.deaths.append(Death(int(death["task"]), str(death["pod"]), int(death["exit"]), memory))

    def _mpirun(self, line: str) -> None:
        killed = _MPI_KILLED.search(line)
        if killed:
            self.deaths.append(Death(int(killed.group(1)), killed.group(2), -int(killed.group(3))))
        name, code = _MPI_NAME.search(line), _MPI_CODE.search(line)
        if name:
            self._mpi_task = int(name.group(1))
        elif code and self._mpi_task >= 0:
            self.deaths.append(Death(self._mpi_task, "", int(code.group(1))))
            self._mpi_task = -1


def torchrun_deaths(output: str) -> Dict[int, int]:
    """Return rank -> exit code of the table that torchrun prints."""
    return {int(rank): int(code) for rank, code in _TORCHRUN_TABLE.findall(output)}


def _numbers(text: str, most: int) -> List[int]:
    """Return the first numbers of a list like ``0-3,7``, *most* of them in all."""
    found: List[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not dash):
            found += range(int(first), min(int(last or first) + 1, int(first) + most - len(found)))
    return found
