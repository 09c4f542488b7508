"""The process with the checks, with checks that do as MLHPC_SCRIPT says for this node: {"node2": {"hang": "fast"}}."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from dataclasses import dataclass

from pytest_mlhpc.node.vet import passive
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.machine import Machine, Unreadable


def host() -> str:
    return os.environ.get("MLHPC_VET_HOST") or os.environ["SLURMD_NODENAME"]


def script() -> dict:
    every = json.loads(os.environ.get("MLHPC_SCRIPT", "{}"))
    return {**every.get("all", {}), **every.get(host(), {})}


def act(faults: dict, name: str) -> None:
    """Do what is to be done where *name* is: hang, die, or end the agent."""
    if faults.get("hang") == name:
        threading.Event().wait()
    if faults.get("die") == name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if faults.get("stop_agent") == name:
        os.kill(os.getppid(), signal.SIGKILL)


def misbehave(name: str) -> None:
    own = script()
    act(own, name)
    if own.get("hang_in_c") == name:
        ctypes.PyDLL(None).pause()  # holds the interpreter's lock, as a bad driver binding does
    if own.get("defect") == name:
        raise RuntimeError("so much for that")
    if own.get("unreadable") == name:
        raise Unreadable("/proc/nothing cannot be read")


@dataclass
class Scripted:
    name: str = "watch"
    level: str = "quick"
    cost_s: float = 0.1
    reads: tuple[str, ...] = ()
    purpose: str = ""


class ScriptedCheck(Scripted):
    def examine(self, machine, context) -> CheckOutcome:
        misbehave(self.name)
        severity = Severity(script().get("says", {}).get(self.name, "PASS"))
        finding = Finding(self.name, severity, f"{self.name} looked at {context.host}")
        return CheckOutcome((finding,), facts=(Fact(self.name, "hosts", ",".join(context.hosts)),))


class ScriptedWatch(Scripted):
    def start(self, machine, context) -> int:
        misbehave("begin")
        return 0

    def sample(self, machine, state: int) -> int:
        misbehave("sample")
        return state + 1

    def end(self, machine, context, state: int) -> CheckOutcome:
        misbehave("end")
        return CheckOutcome(
            (Finding(self.name, Severity.PASS, f"watched, {'under load' if state else 'idle'}"),)
        )


class ScriptedMachine(Machine):
    def boot_id(self) -> str:
        return script().get("boot_id", "boot of " + host())


def provide():
    names = script().get("checks", ["first", "second", "third"])
    return [ScriptedCheck(name) for name in names], [ScriptedWatch()]


if __name__ == "__main__":
    if script().get("no_start"):
        raise SystemExit("this node's Python is broken")
    passive.main(provide, ScriptedMachine())
