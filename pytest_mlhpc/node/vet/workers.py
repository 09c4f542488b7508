"""The two killable processes of a node, one with checks and one with load: their owners start, bound and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from pytest_mlhpc.node.child_process import ChildProcess
from pytest_mlhpc.node.protocol.plan import BUDGET_S, VetSettings
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Severity
from pytest_mlhpc.node.vet.place import VetPlace

#: Takes a message for the leader.
Say = Callable[[Mapping[str, Any]], None]


class Runner:
    """Owns one child process. ``child`` is the process, None where there is none."""

    child: Optional[ChildProcess] = None

    def tend(self) -> None:
        """Hear what it says, and end it when it fails."""
        child = self.child
        if child is None:
            return
        try:
            for message in child.read():
                self._handle(child, message)
        except (TypeError, ValueError, KeyError) as error:
            child.trouble = f"it answered something that is no answer: {error}"[:300]
        how, hung = child.failed()
        if how:
            self.child = None
            self._failed(child, how, hung=hung)

    def _order(self, number: int, what: str, args: Mapping[str, Any], limit_s: float) -> None:
        """Have it do something within a limit."""
        if self.child is not None:
            self.child.expect(number, what, limit_s)
            self.child.send({"id": number, "do": what, "args": args})

    def _handle(self, child: ChildProcess, message: Mapping[str, Any]) -> None:
        """Take one answer."""
        raise NotImplementedError

    def _failed(self, child: ChildProcess, how: str, *, hung: bool) -> None:
        """End it, and say what it was at."""
        raise NotImplementedError


def checked(check: str, severity: Severity, text: str, rule: str) -> Dict[str, Any]:
    """Return the message that a check says one thing."""
    outcome = CheckOutcome((Finding(check, severity, text, rule=rule),))
    return {"kind": "checked", "check": check, "outcome": to_json(outcome)}


#: How long the process may take to begin, in seconds: Python and some modules from a slow file system.
START_S = 30.0

#: How long the watches' end may take, in seconds: longer than they wait for each other (passive.END_S).
END_S = 12.0

#: How often it is started again after it hung or died: each time without what did it.
CHECK_RESTARTS = 8


class CheckRunner(Runner):
    """Has all checks done, and watches ended when asked."""

    def __init__(
        self, settings: VetSettings, place: VetPlace, module: str, *, environ: Mapping[str, str], say: Say
    ) -> None:
        self._settings, self._place, self._module = settings, place, module
        self._environ, self._say = environ, say
        self._plan: List[str] = []
        self._answered: Set[str] = set()
        self._starts = 0

    def start(self) -> None:
        """Begin with the checks that have not spoken."""
        self._starts += 1
        try:
            self.child = ChildProcess(self._module, environ=self._environ)
        except OSError as error:
            self._give_up(f"the process for checks cannot be started: {error.strerror}", Severity.UNKNOWN)
            return
        args = {
            "settings": to_json(self._settings),
            "host": self._place.host,
            "hosts": list(self._place.hosts),
            "skip": sorted(self._answered),
        }
        self._order(0, "checks", args, START_S)

    def sample(self, *, on: bool) -> None:
        """Say whether the node is under load."""
        if self.child is not None:
            self.child.send({"id": -1, "do": "sample", "args": {"on": on}})

    def end(self, number: int) -> None:
        """Have the watches say what they saw; the answer to *number* follows."""
        if self.child is None:
            self._say({"kind": "answer", "id": number, "done": True})
        self._order(number, "end", {}, END_S)

    def _handle(self, child: ChildProcess, message: Mapping[str, Any]) -> None:
        if "plan" in message:
            self._plan = [str(name) for name in message["plan"]]
            self._say({"kind": "plan", "boot_id": str(message.get("boot_id", ""))})
        if "begun" in message:
            child.expect(child.number, child.what, float(message["limit_s"]))
            child.doing = str(message["begun"])
            self._say({"kind": "begun", "what": child.doing})
        if "check" in message:
            self._answered.add(str(message["check"]))
            self._say({"kind": "checked", "check": str(message["check"]), "outcome": message["outcome"]})
        if message.get("done"):
            number = child.number
            child.idle()
            first = {"kind": "checks_done"}
            self._say(first if number == 0 else {"kind": "answer", "id": number, "done": True})

    def _failed(self, child: ChildProcess, how: str, *, hung: bool) -> None:
        """Name what the process was at, end it, and start another for the rest."""
        number, what = child.number, child.doing
        severity = Severity.CRITICAL if hung else Severity.UNKNOWN
        left = child.end()
        if number == 0 and what:
            self._answered.add(what)
            text = f"the check {what} {how}{left}" if hung else f"in the check {what} {how}{left}"
            self._say(checked(what, severity, text, "hung" if hung else "died"))
            if self._starts <= CHECK_RESTARTS:
                self.start()
                return
        self._give_up(f"the process for checks: {how}{left}", severity)
        if number > 0:
            self._say({"kind": "answer", "id": number, "done": True})

    def _give_up(self, text: str, severity: Severity) -> None:
        """Say that what has not been reported will never be."""
        rest = [name for name in self._plan if name not in self._answered] or ["checks"]
        for name in rest:
            self._say(checked(name, severity, text, "lost"))
        self._answered.update(rest)
        self._say({"kind": "checks_done"})


#: The child's module (``load/main.py``).
CHILD = "pytest_mlhpc.node.vet.load.main"

#: How often the child is started again after it was lost in an exchange.
LOAD_RESTARTS = 1

#: What the child takes as ``--accelerator`` (load/main.py).
CHILD_KINDS = ("cpu", "cuda", "rocm", "xpu")


@dataclass(frozen=True)
class Work:
    """One command for the child: what it does, what it may cost on a healthy node, by level, in seconds; and for what.

    The costs are those of the plan for vetting (a GEMM of 3 s quick and 120 s deep, memory and copies 2 s, votes 1 and 60 s,
    collectives 10 to 20 s); ``level`` deep means only then. ``shared_s`` is how long it measures
    in a quick vetting where many nodes share a machine, 0: as usual; ``again``: there it may be done in several turns, of which
    the best figure counts.
    """

    name: str
    quick_s: float
    deep_s: float
    level: str = "quick"
    purpose: str = ""
    shared_s: float = 0.0
    again: bool = False

    def cost_s(self, level: str) -> float:
        """Return what it may cost."""
        return self.deep_s if level == "deep" else self.quick_s


#: In the order in which they are done: what matters most comes first, as time may run out.
WORKS: Tuple[Work, ...] = (
    Work("gemm", 3.0, 120.0, shared_s=1.0, again=True),
    Work("memory", 2.0, 10.0, shared_s=0.45, again=True),
    Work("host_copy", 2.0, 10.0),
    Work("hash", 1.0, 60.0, shared_s=0.3),
    Work("all_reduce", 4.0, 20.0, shared_s=0.45, again=True),
    Work("transport", 2.0, 5.0, purpose="job"),
    Work("checkpoint", 20.0, 60.0, level="deep"),
)

#: A command has hung when it takes so many times its cost, and at least so many seconds.
PATIENCE, LEAST_S = 4.0, 10.0

#: Time for one exchange between two nodes, in seconds, by level: measured as 0.5 s healthy over gloo, with the start of NCCL
#: about 3 s; a hung one costs its whole time in each round.
PAIR_S = {"quick": 6.0, "deep": 20.0}

#: Bytes of one exchange, and how often it is repeated within a round, by level.
PAIR_BYTES, PAIR_REPEATS = {"quick": 16 << 20, "deep": 128 << 20}, {"quick": 4, "deep": 8}

#: Share of the whole time by which the child must have imported torch: 3 to 13 s measured, far more where many nodes read it
#: from one slow file system.
READY_SHARE = 0.5


def budget_of(settings: VetSettings) -> float:
    """Return the whole time for vetting, in seconds."""
    return settings.budget_s or BUDGET_S[settings.level]


def works(settings: VetSettings) -> Tuple[List[Work], List[Work]]:
    """Return what to do, and what is left out because time is short (half of it is for computing)."""
    fitting = [
        work
        for work in WORKS
        if (work.level == "quick" or settings.level == "deep")
        and (not work.purpose or work.purpose == settings.wanted.purpose)
    ]
    if settings.no_load:
        return [], []
    room = 0.5 * budget_of(settings)
    chosen: List[Work] = []
    late: List[Work] = []
    for work in fitting:
        cost = work.cost_s(settings.level)
        (chosen if cost <= room else late).append(work)
        room -= cost if cost <= room else 0.0
    return chosen, late


def limit_of(work: Work, settings: VetSettings) -> float:
    """Return after how many seconds a command counts as hung."""
    return max(LEAST_S, PATIENCE * work.cost_s(settings.level))


def pair_args(settings: VetSettings, round_number: int) -> Dict[str, Any]:
    """Return the arguments of an exchange that both sides share."""
    return {
        "bytes": PAIR_BYTES[settings.level],
        "rounds": PAIR_REPEATS[settings.level],
        "timeout_s": PAIR_S[settings.level],
        "round": round_number,
    }


class LoadRunner(Runner):
    """Has the child do one command after the other; *loaded* is called when the node is under load, and when not.

    Where there is no process, ``gone`` says why.
    """

    def __init__(
        self,
        settings: VetSettings,
        module: str,
        *,
        environ: Mapping[str, str],
        say: Say,
        loaded: Callable[[bool], None],
    ) -> None:
        self._settings, self._module, self._environ = settings, module, environ
        self._say, self._loaded = say, loaded
        self._refused = ""
        self._starts = 0
        self.gone = "nothing is computed here"

    def start(self) -> None:
        """Start it, unless nothing is to be computed; it says when it is ready."""
        settings = self._settings
        if settings.no_load:
            return
        self._starts += 1
        kind = settings.wanted.accelerator
        arguments = ("--accelerator", kind) if kind in CHILD_KINDS else ()
        try:
            self.child = ChildProcess(
                self._module, python=settings.python, arguments=arguments, environ=self._environ
            )
        except OSError as error:
            self._lost(f"{settings.python or sys.executable} cannot be started: {error.strerror}", hung=False)
            return
        self.child.expect(0, "starting", READY_SHARE * budget_of(settings))

    def do(self, number: int, what: str, args: Mapping[str, Any], limit_s: float) -> None:
        """Have it do something; the answer to *number* follows."""
        if self.child is None:
            self._say({"kind": "answer", "id": number, "error": self.gone})
            return
        self._order(number, what, {**args, **self._own_args(what)}, limit_s)
        self._loaded(True)

    def _own_args(self, what: str) -> Dict[str, Any]:
        """Return what only this node's own settings say, never the network: paths, and what goes with them."""
        found: Dict[str, Any] = {"level": self._settings.level}
        wanted = self._settings.wanted
        if what == "checkpoint":
            if wanted.paths.get("checkpoint"):
                found["path"] = wanted.paths["checkpoint"]
            if wanted.checkpoint_bytes:
                found["size"] = wanted.checkpoint_bytes
        return found

    def _handle(self, child: ChildProcess, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            child.idle()
            self._say({"kind": "ready", "ready": message["ready"]})
        elif message.get("id") != child.number:
            return  # of a command that nobody waits for any more
        elif "begun" in message:
            child.doing = str(message["begun"])[:200]
            self._say({"kind": "begun", "what": child.doing})
        elif child.number == 0:
            self._refused = str(message.get("error"))[:1000]
        elif "outcome" in message or "error" in message:
            answer = {name: message[name] for name in ("outcome", "error", "why") if name in message}
            self._say({"kind": "answer", "id": child.number, **answer})
            child.idle()
            self._loaded(False)

    def _failed(self, child: ChildProcess, how: str, *, hung: bool) -> None:
        number, command, what = child.number, child.what, child.doing or child.what
        left = child.end()
        self._loaded(False)
        text = f"{what}: {how}{left}" if what else f"{how}{left}"
        if number <= 0:
            self._lost(self._refused or text, hung=hung)
            return
        self.gone = f"its process was lost before, in {text}"
        answer = {"kind": "answer", "id": number, "error": text, "hung": hung, "died": not hung}
        # A partner that hangs may take us along, where a library waits for both: that must not spoil all further exchanges.
        again = command == "pair" and self._starts <= LOAD_RESTARTS
        self._say({**answer, "restarting": again})
        if again:
            self.start()

    def _lost(self, text: str, *, hung: bool) -> None:
        self.gone = text
        self._say({"kind": "no_child", "text": text, "hung": hung})


@dataclass(frozen=True)
class WorkerModules:
    """Modules to be started; tests put scripted ones in their place."""

    passive: str = "pytest_mlhpc.node.vet.passive"
    child: str = CHILD


class WorkerSignals:
    """Signals to end, and threads that have news, as bytes on a pipe. ``received`` is the signal's number, 0 before.

    Outside the main thread, where Python sets no handlers, whoever called has to end the vetting.
    """

    def __init__(self) -> None:
        self.received = 0
        self.wakeup, self._waker = os.pipe()
        for fd in (self.wakeup, self._waker):
            os.set_blocking(fd, False)
        self._before: Dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._end)

    def _end(self, number: int, _frame: Any) -> None:
        self.received = self.received or number
        self.wake()

    def wake(self) -> None:
        """Let the selector look."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b".")

    def drain(self) -> None:
        """Take what has woken it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)

    def close(self) -> None:
        """Give signals back to whoever had them; the pipe stays, as a thread that hangs may still write to it."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def checks_of_nodes(level: str = "quick") -> Tuple[str, ...]:
    """Return the names of checks that a vetting of this level makes on each node, the passive ones first.

    Those ``--for job`` are about a user's own set-up, and not among them.
    """
    from pytest_mlhpc.node.vet.checks import names_of

    load = [work.name for work in WORKS if not work.purpose and level in (work.level, "deep")]
    return (*sorted(names_of(purpose="", level=level)), *load)
