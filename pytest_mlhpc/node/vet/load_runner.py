"""PAYLOAD. The owner of the killable child, and what it is asked to compute, in which order, and how long it may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.leash import Leash
from pytest_mlhpc.node.protocol.vet_settings import BUDGET_S, Settings
from pytest_mlhpc.node.vet.held import Held, Say

#: The child's module (``child/main.py``).
CHILD = "pytest_mlhpc.node.vet.load.main"

#: How often the child is started again after it was lost in an exchange.
RESTARTS = 1

#: What the child takes as ``--accelerator`` (child/main.py).
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


def budget_of(settings: Settings) -> float:
    """Return the whole time for vetting, in seconds."""
    return settings.budget_s or BUDGET_S[settings.level]


def works(settings: Settings) -> Tuple[List[Work], List[Work]]:
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


def limit_of(work: Work, settings: Settings) -> float:
    """Return after how many seconds a command counts as hung."""
    return max(LEAST_S, PATIENCE * work.cost_s(settings.level))


def pair_args(settings: Settings, round_number: int) -> Dict[str, Any]:
    """Return the arguments of an exchange that both sides share."""
    return {
        "bytes": PAIR_BYTES[settings.level],
        "rounds": PAIR_REPEATS[settings.level],
        "timeout_s": PAIR_S[settings.level],
        "round": round_number,
    }


class Load:
    """Has the child do one command after the other; *loaded* is told when the node is under load, and when not.

    ``held`` is the process, None where there is none, and then ``gone`` says why.
    """

    def __init__(
        self,
        settings: Settings,
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
        self.held: Optional[Held] = None

    def start(self) -> None:
        """Start it, unless nothing is to be computed; it says when it is ready."""
        settings = self._settings
        if settings.no_load:
            return
        self._starts += 1
        kind = settings.wanted.accelerator
        arguments = ("--accelerator", kind) if kind in CHILD_KINDS else ()
        try:
            leash = Leash(self._module, python=settings.python, arguments=arguments, environ=self._environ)
        except OSError as error:
            self._lost(f"{settings.python or sys.executable} cannot be started: {error.strerror}", hung=False)
            return
        self.held = Held(leash)
        self.held.expect(0, "starting", READY_SHARE * budget_of(settings))

    def do(self, number: int, what: str, args: Mapping[str, Any], limit_s: float) -> None:
        """Have it do something; the answer to *number* follows."""
        if self.held is None:
            self._say({"kind": "answer", "id": number, "error": self.gone})
            return
        self.held.expect(number, what, limit_s)
        self.held.leash.send({"id": number, "do": what, "args": {**args, **self._own_args(what)}})
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

    def tend(self) -> None:
        """Hear what it says, and end it when it fails."""
        held = self.held
        if held is None:
            return
        for message in held.heard():
            self._heard(held, message)
        how, hung = held.failed()
        if how:
            self._failed(held, how, hung=hung)

    def _heard(self, held: Held, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            held.idle()
            self._say({"kind": "ready", "ready": message["ready"]})
        elif message.get("id") != held.number:
            return  # of a command that nobody waits for any more
        elif "begun" in message:
            held.doing = str(message["begun"])[:200]
            self._say({"kind": "begun", "what": held.doing})
        elif held.number == 0:
            self._refused = str(message.get("error"))[:1000]
        elif "outcome" in message or "error" in message:
            answer = {name: message[name] for name in ("outcome", "error", "why") if name in message}
            self._say({"kind": "answer", "id": held.number, **answer})
            held.idle()
            self._loaded(False)

    def _failed(self, held: Held, how: str, *, hung: bool) -> None:
        number, command, what = held.number, held.what, held.doing or held.what
        left = held.let_go()
        self.held = None
        self._loaded(False)
        text = f"{what}: {how}{left}" if what else f"{how}{left}"
        if number <= 0:
            self._lost(self._refused or text, hung=hung)
            return
        self.gone = f"its process was lost before, in {text}"
        answer = {"kind": "answer", "id": number, "error": text, "hung": hung, "died": not hung}
        # A partner that hangs may take us along, where a library waits for both: that must not spoil all further exchanges.
        again = command == "pair" and self._starts <= RESTARTS
        self._say({**answer, "restarting": again})
        if again:
            self.start()

    def _lost(self, text: str, *, hung: bool) -> None:
        self.gone = text
        self._say({"kind": "no_child", "text": text, "hung": hung})
