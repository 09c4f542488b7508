"""PAYLOAD. What the ranks of one run said and how they ended, and what went wrong first. No input or output."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.batch.words import LauncherWords, torchrun_deaths
from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.protocol.channel import PORT_TAKEN
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport, SchemaError, from_json

#: Number that stands for the launcher where a rank's is meant.
LAUNCHER = -1

#: Least time between two progress lines of a run, in seconds.
PROGRESS_EVERY_S = 1.0

#: Errors of a connection whose other node is dead or cut off, rather than its process.
NODE_GONE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass
class Rank:
    """What is known of one rank."""

    pid: int = 0
    report: Optional[RankReport] = None
    closed: bool = False
    exit: Optional[int] = None
    step: int = 0
    samples_per_s: float = 0.0
    error: Optional[int] = None  #: errno by which its connection ended, where it did not close


@dataclass(frozen=True)
class Trouble:
    """Why a run failed. ``rank`` is whose log shows it; ``quote`` whether its last lines belong to the text."""

    outcome: str
    text: str
    rank: Optional[int] = None
    quote: bool = False
    again: bool = (
        False  #: the run may be started once more: nothing was measured, and the cause is known to pass
    )
    nodes: Tuple[str, ...] = ()  #: whose fault it is, by the scheduler's names


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
        self.ranks: Dict[int, Rank] = {}
        self.trouble: Optional[Trouble] = None
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
            self.trouble = Trouble(outcome, text, rank, quote, again, nodes)

    @property
    def turned_away(self) -> str:
        """Say how many connections were not let in, or nothing where all were."""
        if not self.strangers:
            return ""
        return f"connections that did not prove to be of this run and were dropped: {self.strangers}"

    def node_of(self, number: int) -> str:
        """Return the node on which a rank is to be, or nothing where all are here."""
        if not self.nodes or not 0 <= number < self.run.ranks:
            return ""
        return self.nodes[number * len(self.nodes) // self.run.ranks]

    def who(self, number: int) -> str:
        """Name a rank, with its node where that says something."""
        node = self.node_of(number)
        return f"rank {number} on {node}" if node else f"rank {number}"

    def greet(self, body: Mapping[str, Any], pid: int) -> bool:
        """Take the greeting of who has proved to be of this run; return whether it is one of its ranks."""
        number = body["rank"]
        if not 0 <= number < self.run.ranks:
            self.fail("foreign_result", f"rank {number} connected, but the run has {self.run.ranks} ranks")
        elif body["purpose"] == "messages" and number in self.ranks:
            self.fail("duplicate_result", f"two processes say that they are rank {number}")
        elif str(body.get("node")) in self.nodes and str(body.get("node")) != self.node_of(number):
            text = f"rank {number} was started on {body['node']}, but belongs on {self.node_of(number)}"
            self.fail("launch_failed", f"{text}: the launcher {self.run.launcher!r} placed ranks otherwise")
        else:
            if body["purpose"] == "messages":
                self.ranks[number] = Rank(pid=pid)
            return True
        return False

    def say(self, number: int, kind: str, body: Any, now: float) -> Optional[Tuple[str, Mapping[str, Any]]]:
        """Take one message of a rank; return the kind and body of the line that the controller is to get, if any."""
        if self.trouble is not None or number not in self.ranks:
            return None
        rank = self.ranks[number]
        if kind == "progress":
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
        if self.suspect is not None and self.suspect != number:
            return  # it lost its peer, which is the one to be named
        if outcome == PORT_TAKEN:
            self.fail("launch_failed", f"{self.who(number)}: {text}", number, again=True)
        else:
            self.fail(outcome, f"{self.who(number)}: {text}", number)

    def _progress(
        self, rank: Rank, body: Mapping[str, Any], now: float
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

    def _report(self, number: int, rank: Rank, body: Any) -> None:
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
        if not rank.closed and self.suspect is None:
            rank.error, self.suspect = error, number

    def ended(self, number: int) -> None:
        """Judge a rank whose process has ended, or whose connection broke with nothing known of the process."""
        rank, who = self.ranks[number], self.who(number)
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

    def learn(self, words: LauncherWords, output: str) -> List[int]:
        """Take the exit codes of ranks from what their launcher said; return which it named, the first first."""
        self._memory = self._memory or words.out_of_memory
        deaths: Dict[int, int] = {}
        for death in [] if self.agents else words.deaths:
            deaths.setdefault(death.task, death.exit)
        deaths.update(torchrun_deaths(output))
        named = [number for number in deaths if number < self.run.ranks]
        for number in named:
            rank = self.ranks.setdefault(number, Rank())
            rank.exit = deaths[number] if rank.exit is None else rank.exit
        return named

    def launcher_ended(
        self, code: int, output: str, *, is_rank: bool, words: Optional[LauncherWords] = None
    ) -> None:
        """Judge a launcher that ended by itself with *code*, or is about to (0), after a rank was lost.

        *output* is the end of what it printed, *words* what was understood of all of it.
        """
        words = words or LauncherWords()
        if not code and self.suspect is None:
            return
        if is_rank:
            reported = 0 in self.ranks and self.ranks[0].report is not None
            who, number, after = "rank 0", 0, " after it had reported" if reported else ""
        else:
            self._judge_words(words, output)
            who, number, after = "the launcher", LAUNCHER, ""
        outcome = "worker_killed" if code < 0 else "worker_exit"
        if code == -signal.SIGKILL and self._out_of_memory():
            outcome = "out_of_memory"
        self.fail(outcome, f"{who} {describe_exit(code)}{after}", number, quote=True)

    def _judge_words(self, words: LauncherWords, output: str) -> None:
        """Name the first thing that went wrong: what kept ranks from starting, a node, then the first rank that died."""
        heard = bool(self.ranks)
        named = self.learn(words, output)
        if words.no_program:
            outcome = "command_not_found" if self.run.workload == "command" else "launch_failed"
            self.fail(outcome, f"cannot start {self._program()!r}: {words.no_program}", LAUNCHER)
        if words.port_taken and not heard:
            self.fail("launch_failed", words.port_taken, LAUNCHER, again=True)
        if words.not_started and not heard:
            self.fail("launch_failed", words.not_started, LAUNCHER)
        for node in words.failed_nodes:
            self.fail("node_failure", f"Slurm says that node {node} failed during the run", LAUNCHER)
        for pod, why, node in words.lost_pods:
            text = f"pod {pod} was lost during the run: {why}"
            self.fail("node_failure", text, LAUNCHER, nodes=(node,) if node else ())
        if words.cancelled:
            self.fail("cancelled_outside", "somebody else cancelled the run's job step", LAUNCHER, quote=True)
        for number in [*([] if self.suspect is None else [self.suspect]), *named]:
            self.ended(number)
        if self.suspect is not None:
            self._nameless(self.suspect)
        for death in words.deaths:  # of agents
            text = f"the launcher's task {death.task} on {death.node} {describe_exit(death.exit)}"
            outcome = "worker_killed" if death.exit < 0 else "worker_exit"
            self.fail("out_of_memory" if death.out_of_memory else outcome, text, LAUNCHER, quote=True)

    def _nameless(self, number: int) -> None:
        error = self.ranks[number].error
        if error in NODE_GONE:
            text = f"{self.who(number)} does not answer any more: {errno.errorcode.get(error or 0)}"
            self.fail("node_failure", text, number, quote=True)
        else:
            self.fail("worker_exit", f"{self.who(number)} ended without a word", number, quote=True)

    def _program(self) -> str:
        words = (
            *self.run.wrapper,
            *(self.run.argv if self.run.workload == "command" else (self.run.python,)),
        )
        return words[0] if words else ""

    def out_of_time(self) -> None:
        """Note that the time limit has passed, and how far the ranks were."""
        steps = ", ".join(
            f"{self.who(number)} at step {rank.step}" for number, rank in sorted(self.ranks.items())[:4]
        )
        seen = f"last seen: {steps} of {self.run.steps}" if steps else "no rank had said anything"
        self.fail(
            "time_limit", f"the run did not end within {self.run.time_limit_s:g} s; {seen}", 0, quote=True
        )

    def reports(self) -> List[RankReport]:
        """Return the reports of all ranks in order; a missing one is a trouble, never hidden."""
        missing = [number for number in range(self.run.ranks) if number not in self.ranks]
        silent = [number for number, rank in sorted(self.ranks.items()) if rank.report is None]
        if missing and len(missing) == self.run.ranks:
            self.fail("no_result", "the run ended without a word from any rank", 0, quote=True)
        elif missing:
            some = ", ".join(map(str, missing[:8]))
            where = "".join(
                f"; rank {missing[0]} was to be on {node}" for node in [self.node_of(missing[0])] if node
            )
            self.fail(
                "too_few_ranks",
                f"of {self.run.ranks} ranks these were never heard of: {some}{where}",
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
        codes = [known.get(number) for number in range(self.run.ranks)]
        return [unknown if code is None else code for code in codes]
