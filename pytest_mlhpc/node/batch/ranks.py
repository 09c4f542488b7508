"""What the ranks of one run and their launcher reported, how they ended, and what went wrong first. No input or output."""

from __future__ import annotations

import contextlib
import errno
import re
import signal
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.protocol.channel import PORT_TAKEN
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport, SchemaError, from_json
from pytest_mlhpc.node.telemetry import contention

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

#: OpenMPI's message on a rank that was killed, and on one that ended with a non-zero code.
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
#: Nodes and pods that are noted as failed.
_MOST_NODES = 1024
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
class LauncherOutput:
    """What was understood of a launcher's output so far, in its order."""

    deaths: List[Death] = field(default_factory=list)
    failed_nodes: List[str] = field(default_factory=list)
    lost_pods: List[Tuple[str, str, str]] = field(
        default_factory=list
    )  #: each with why, and the node whose fault it is, if it is one's
    no_program: str = ""  #: slurmstepd's message on a program that does not exist
    not_started: str = ""  #: srun's message on a step that it could not start
    port_taken: str = ""  #: our torchrun's message on a port that it cannot have (``node/torchrun.py``)
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
        matched = _PODRUN.search(line)
        if matched:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._podrun(read_json(matched.group(1)))
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
        if node and len(self.failed_nodes) < _MOST_NODES:
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
            self._died(task, node, int(code.group(1)) if code else number, memory)

    def _podrun(self, said: Dict[str, Any]) -> None:
        self.no_program = self.no_program or str(said.get("no_program", ""))
        self.not_started = self.not_started or str(said.get("not_started", ""))
        self.dropped += max(0, int(said.get("dropped", 0)))
        if "lost" in said and len(self.lost_pods) < _MOST_NODES:
            self.lost_pods.append((str(said["lost"]), str(said["why"]), str(said.get("node", ""))))
        if "death" in said:
            death = said["death"]
            memory = bool(death["memory"])
            self.out_of_memory = self.out_of_memory or memory
            self._died(int(death["task"]), str(death["pod"]), int(death["exit"]), memory)

    def _died(self, task: int, node: str, code: int, memory: bool = False) -> None:
        if len(self.deaths) < _MOST_DEATHS:
            self.deaths.append(Death(task, node, code, memory))

    def _mpirun(self, line: str) -> None:
        killed = _MPI_KILLED.search(line)
        if killed:
            self._died(int(killed.group(1)), killed.group(2), -int(killed.group(3)))
        name, code = _MPI_NAME.search(line), _MPI_CODE.search(line)
        if name:
            self._mpi_task = int(name.group(1))
        elif code and self._mpi_task >= 0:
            self._died(self._mpi_task, "", int(code.group(1)))
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


#: Number that stands for the launcher where a rank's is meant.
LAUNCHER = -1

#: Number of the log that has a program's standard error alone.
ERRORS = -3

#: Numbers of the files that say which rank printed what of the launcher's log, and of standard error.
OUTPUT_RANKS, ERRORS_RANKS = -4, -5

#: Least time between two progress lines of a run, in seconds.
PROGRESS_EVERY_S = 1.0

#: Errors of a connection whose other node is dead or cut off, rather than its process.
NODE_GONE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass
class RankState:
    """What is known of one rank."""

    pid: int = 0
    report: Optional[RankReport] = None
    closed: bool = False
    exit: Optional[int] = None
    step: int = 0
    samples_per_s: float = 0.0
    late: Mapping[str, float] = field(default_factory=dict)  #: ``contention.late_figures`` while it is late
    error: Optional[int] = None  #: errno by which its connection ended, where it did not close


@dataclass(frozen=True)
class RunTrouble:
    """Why a run failed. ``rank`` is whose log shows it; ``quote`` whether its last lines belong to the text."""

    outcome: str
    text: str
    rank: Optional[int] = None
    quote: bool = False
    again: bool = (
        False  #: the run may be started once more: nothing was measured, and the cause is known to pass
    )
    nodes: Tuple[str, ...] = ()  #: whose fault it is, by the scheduler's names


#: What torch's process groups say in a rank whose peer has gone: gloo, NCCL and RCCL.
_PEER_LOST = re.compile(
    r"gloo/transport|Connection (closed|reset) by (remote )?peer|ncclRemoteError|remote process (has )?exited|Broken pipe"
)


class RankBook:
    """The ranks of one run. Only the first trouble counts; what follows is its consequence.

    Args:
        run: what is to be done.
        nodes: where its ranks are, in blocks of equal size, when they are no processes of this node's batch.

    ``agents`` is to be set where the launcher starts one agent a node, which starts the ranks: tasks are no ranks then.
    """

    def __init__(self, run: RunPlan, nodes: Sequence[str] = ()) -> None:
        self.run = run
        self.nodes = tuple(nodes)
        self.suspect: Optional[int] = None  #: the first rank whose connection broke; why is not yet known
        self.agents = False
        self.memory: Optional[Callable[[], bool]] = None  #: tells whether the kernel kills for memory here
        self._memory = False
        self.ranks: Dict[int, RankState] = {}
        #: Rank -> outcome and text with which it said that it lost a peer, in the order in which they said so.
        self.peers_lost: Dict[int, Tuple[str, str]] = {}
        self.trouble: Optional[RunTrouble] = None
        self.strangers = 0  #: connections that came and did not prove that they are of this run
        self.started = False  #: the controller knows that the run has started
        self._next_progress = 0.0

    def fail(
        self,
        outcome: str,
        text: str,
        rank: Optional[int] = None,
        *,
        quote: bool = False,
        again: bool = False,
        nodes: Tuple[str, ...] = (),
    ) -> None:
        """Note what went wrong, unless something went wrong before."""
        if self.trouble is None:
            self.trouble = RunTrouble(outcome, text, rank, quote, again, nodes)

    @property
    def turned_away(self) -> str:
        """Say how many connections were not let in, or nothing where all were."""
        if not self.strangers:
            return ""
        return f"connections that did not prove to be of this run and were dropped: {self.strangers}"

    def node_of(self, number: int) -> str:
        """Return the node on which a rank is to be, or nothing where all are here."""
        if not self.nodes or not 0 <= number < self.run.started:
            return ""
        return self.nodes[number * len(self.nodes) // self.run.started]

    def who(self, number: int) -> str:
        """Name a rank, with its node where that says something."""
        node = self.node_of(number)
        return f"rank {number} on {node}" if node else f"rank {number}"

    def greet(self, body: Mapping[str, Any], pid: int) -> bool:
        """Take the greeting of who has proved to be of this run; return whether it is one of its ranks."""
        number = body["rank"]
        if not 0 <= number < self.run.started:
            self.fail("foreign_result", f"rank {number} connected, but the run has {self.run.started} ranks")
        elif body["purpose"] == "messages" and number in self.ranks:
            self.fail("duplicate_result", f"two processes say that they are rank {number}")
        elif str(body.get("node")) in self.nodes and str(body.get("node")) != self.node_of(number):
            text = f"rank {number} was started on {body['node']}, but belongs on {self.node_of(number)}"
            self.fail("launch_failed", f"{text}: the launcher {self.run.launcher!r} placed ranks otherwise")
        else:
            if body["purpose"] == "messages":
                self.ranks[number] = RankState(pid=pid)
            return True
        return False

    def say(self, number: int, kind: str, body: Any, now: float) -> Optional[Tuple[str, Mapping[str, Any]]]:
        """Take one message of a rank; return the kind and body of the line that the controller is to get, if any."""
        if self.trouble is not None or number not in self.ranks:
            return None
        rank = self.ranks[number]
        if kind == "progress":
            self._end_if_crowded(number, rank, body)
            return self._progress(rank, body, now)
        if kind == "started" and not self.started:
            self.started = True
            return "started", body
        if kind == "report":
            self._report(number, rank, body)
        elif kind == "failed":
            self._failed(number, str(body.get("outcome")), str(body.get("text")))
        elif kind == "close":
            rank.closed = True
        elif kind == "damaged":
            self.fail("truncated_result", f"rank {number} sent something that is no message: {body}", number)
        return None

    def _failed(self, number: int, outcome: str, text: str) -> None:
        after = self.suspect is not None and self.suspect != number
        if after or (self.run.started > 1 and _PEER_LOST.search(text)):
            self.peers_lost.setdefault(number, (outcome, text))
            return  # it lost its peer, which is the one to be named; that may be heard of later
        if outcome == PORT_TAKEN:
            self.fail("launch_failed", f"{self.who(number)}: {text}", number, again=True)
        else:
            self.fail(outcome, f"{self.who(number)}: {text}", number)

    def settle(self) -> None:
        """Take the word of the first rank that lost a peer, where no peer has turned out to have ended by itself."""
        for number, (outcome, text) in list(self.peers_lost.items())[:1]:
            self.fail(outcome, f"{self.who(number)}: {text}", number)

    def _end_if_crowded(self, number: int, rank: RankState, body: Mapping[str, Any]) -> None:
        """Fail the run where all ranks of a node are late and others have its processors: its figures would say nothing."""
        rank.late = contention.figures_of(body.get("late"))
        size = max(1, self.run.started // max(1, len(self.nodes)))
        first = number // size * size
        node = [self.ranks[one].late if one in self.ranks else {} for one in range(first, first + size)]
        if all(node) and (why := contention.crowded_out(self.node_of(number) or "this node", node)):
            self.fail("machine_busy", why, number)

    def _progress(
        self, rank: RankState, body: Mapping[str, Any], now: float
    ) -> Optional[Tuple[str, Mapping[str, Any]]]:
        step, rate, steps = body.get("step"), body.get("samples_per_s"), body.get("steps")
        if not (isinstance(step, int) and isinstance(steps, int) and isinstance(rate, (int, float))):
            return None  # a courtesy to people, not worth a run
        rank.step, rank.samples_per_s = step, float(rate)
        if now < self._next_progress:
            return None
        self._next_progress = now + PROGRESS_EVERY_S
        total = sum(other.samples_per_s for other in self.ranks.values())
        if not 0 <= total < float("inf"):
            return None
        slowest = min(other.step for other in self.ranks.values())
        return "progress", {"step": slowest, "steps": steps, "samples_per_s": total}

    def _report(self, number: int, rank: RankState, body: Any) -> None:
        if rank.report is not None:
            self.fail("duplicate_result", f"rank {number} reported twice", number)
            return
        try:
            report = from_json(RankReport, body, f"rank {number}")
        except (SchemaError, TypeError, RecursionError) as error:
            outcome = "metric_invalid" if "finite" in str(error) else "truncated_result"
            self.fail(outcome, f"the report cannot be used: {error}", number)
            return
        if report.rank != number:
            self.fail("foreign_result", f"rank {number} sent a report of rank {report.rank}", number)
            return
        rank.report = report

    def lost(self, number: int, error: Optional[int]) -> None:
        """Note that a remote rank's connection ended before it had closed it. The launcher may yet say why."""
        rank = self.ranks[number]
        if not rank.closed and self.suspect is None and number not in self.peers_lost:
            rank.error, self.suspect = error, number

    def ended(self, number: int) -> None:
        """Judge a rank whose process has ended, or whose connection broke with nothing known of the process."""
        rank, who = self.ranks[number], self.who(number)
        if number in self.peers_lost:
            return  # it ended for want of its peer
        after = " after it had reported" if rank.report is not None else ""
        if rank.exit == -signal.SIGKILL and self._out_of_memory():
            text = f"{who} used more memory than it may and was killed{after}"
            self.fail("out_of_memory", text, number, quote=True)
        elif rank.exit:
            outcome = "worker_killed" if rank.exit < 0 else "worker_exit"
            self.fail(outcome, f"{who} {describe_exit(rank.exit)}{after}", number, quote=True)
        elif rank.exit == 0 and rank.report is None:
            self.fail("no_result", f"{who} ended with exit code 0 without a report", number, quote=True)

    def _out_of_memory(self) -> bool:
        return self._memory or (self.memory is not None and self.memory())

    def learn(self, launcher_output: LauncherOutput, output: str) -> List[int]:
        """Take the exit codes of ranks from what their launcher said; return which it named, the first first."""
        self._memory = self._memory or launcher_output.out_of_memory
        deaths: Dict[int, int] = {}
        for death in [] if self.agents else launcher_output.deaths:
            deaths.setdefault(death.task, death.exit)
        deaths.update(torchrun_deaths(output))
        named = [number for number in deaths if 0 <= number < self.run.started]
        for number in named:
            rank = self.ranks.setdefault(number, RankState())
            rank.exit = deaths[number] if rank.exit is None else rank.exit
        return named

    def launcher_ended(
        self, code: int, output: str, *, is_rank: bool, launcher_output: Optional[LauncherOutput] = None
    ) -> None:
        """Judge a launcher that ended by itself with *code*, or is about to (0), after a rank was lost.

        *output* is the end of what it printed, *launcher_output* what was understood of all of it.
        """
        launcher_output = launcher_output or LauncherOutput()
        if not code and self.suspect is None:
            return
        if is_rank:
            reported = 0 in self.ranks and self.ranks[0].report is not None
            who, number, after = "rank 0", 0, " after it had reported" if reported else ""
        else:
            self._judge_output(launcher_output, output)
            who, number, after = "the launcher", LAUNCHER, ""
        self.settle()
        outcome = "worker_killed" if code < 0 else "worker_exit"
        if code == -signal.SIGKILL and self._out_of_memory():
            outcome = "out_of_memory"
        self.fail(outcome, f"{who} {describe_exit(code)}{after}", number, quote=True)

    def _judge_output(self, launcher_output: LauncherOutput, output: str) -> None:
        """Name the first thing that went wrong: what prevented ranks from starting, a node, then the first rank that died."""
        heard = bool(self.ranks)
        named = self.learn(launcher_output, output)
        if launcher_output.no_program:
            outcome = "command_not_found" if self.run.workload == "command" else "launch_failed"
            self.fail(outcome, f"cannot start {self._program()!r}: {launcher_output.no_program}", LAUNCHER)
        if launcher_output.port_taken and not heard:
            self.fail("launch_failed", launcher_output.port_taken, LAUNCHER, again=True)
        if launcher_output.not_started and not heard:
            self.fail("launch_failed", launcher_output.not_started, LAUNCHER)
        # A program may print another job's messages: only nodes of this run are believed to have failed in it.
        for node in [one for one in launcher_output.failed_nodes if not self.nodes or one in self.nodes]:
            self.fail("node_failure", f"Slurm says that node {node} failed during the run", LAUNCHER)
        for pod, why, node in launcher_output.lost_pods:
            text = f"pod {pod} was lost during the run: {why}"
            self.fail("node_failure", text, LAUNCHER, nodes=(node,) if node else ())
        if launcher_output.cancelled:
            self.fail(
                "cancelled_outside", "the run's job step was cancelled from outside", LAUNCHER, quote=True
            )
        for number in [*([] if self.suspect is None else [self.suspect]), *named]:
            self.ended(number)
        if self.suspect is not None:
            self._nameless(self.suspect)
        for death in launcher_output.deaths:  # of agents
            text = f"the launcher's task {death.task} on {death.node} {describe_exit(death.exit)}"
            outcome = "worker_killed" if death.exit < 0 else "worker_exit"
            self.fail("out_of_memory" if death.out_of_memory else outcome, text, LAUNCHER, quote=True)

    def _nameless(self, number: int) -> None:
        error = self.ranks[number].error
        if error in NODE_GONE:
            text = f"{self.who(number)} does not answer any more: {errno.errorcode.get(error or 0)}"
            self.fail("node_failure", text, number, quote=True)
        elif self._out_of_memory():  # its launcher may name its peers alone
            text = f"{self.who(number)} used more memory than it may and was killed"
            self.fail("out_of_memory", text, number, quote=True)
        else:
            self.fail("worker_exit", f"{self.who(number)} ended without a message", number, quote=True)

    def _program(self) -> str:
        launcher_output = (
            *self.run.wrapper,
            *(self.run.argv if self.run.workload == "command" else (self.run.python,)),
        )
        return launcher_output[0] if launcher_output else ""

    def out_of_time(self) -> None:
        """Note that the time limit has passed, and how far the ranks were."""
        steps = ", ".join(
            f"{self.who(number)} at step {rank.step}" for number, rank in sorted(self.ranks.items())[:4]
        )
        progress = f"last seen: {steps} of {self.run.steps}" if steps else "no rank had reported"
        self.fail(
            "time_limit", f"the run did not end within {self.run.time_limit_s:g} s; {progress}", 0, quote=True
        )

    def reports(self) -> List[RankReport]:
        """Return the reports of all ranks in order; a missing one is a trouble, never hidden."""
        missing = [number for number in range(self.run.started) if number not in self.ranks]
        silent = [number for number, rank in sorted(self.ranks.items()) if rank.report is None]
        if missing and len(missing) == self.run.started:
            self.fail("no_result", "the run ended before any rank reported", 0, quote=True)
        elif missing:
            some = ", ".join(map(str, missing[:8]))
            where = "".join(
                f"; rank {missing[0]} was to be on {node}" for node in [self.node_of(missing[0])] if node
            )
            self.fail(
                "too_few_ranks",
                f"of {self.run.started} ranks these never reported: {some}{where}",
                missing[0],
            )
        elif silent:
            some = ", ".join(map(str, silent[:8]))
            self.fail("no_result", f"these ranks ended without a report: {some}", silent[0], quote=True)
        return [rank.report for _, rank in sorted(self.ranks.items()) if rank.report is not None]

    def exits(self, launcher: Optional[int]) -> List[int]:
        """Return each rank's exit code (minus a signal's number), the launcher's where the rank's is not known."""
        unknown = 127 if launcher is None else launcher  # 127: the shell's code for what never started
        known = {number: rank.exit for number, rank in self.ranks.items()}
        codes = [known.get(number) for number in range(self.run.started)]
        return [unknown if code is None else code for code in codes]
