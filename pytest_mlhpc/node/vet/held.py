"""PAYLOAD. A process on its leash with the one command that it is at; what its two owners (``looking.py``, ``load.py``) share."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.leash import Leash
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.finding import Finding, Outcome, Severity

#: How long what was killed may take to vanish before it is left behind, in seconds.
VANISH_S = 2.0

#: Takes a message for the leader.
Say = Callable[[Mapping[str, Any]], None]


class Held:
    """``number`` of the command, -1: none; ``what`` it is, ``doing`` which part of it; ``limit`` is monotonic."""

    def __init__(self, leash: Leash) -> None:
        self.leash = leash
        self.number = -1
        self.what = self.doing = ""
        self.limit = float("inf")
        self.limit_s = 0.0

    def expect(self, number: int, what: str, limit_s: float) -> None:
        """Note what it is at, and until when it may be."""
        self.number, self.what, self.doing, self.limit_s = number, what, "", limit_s
        self.limit = time.monotonic() + limit_s

    def idle(self) -> None:
        """Note that it has nothing to do."""
        self.number, self.what, self.doing, self.limit = -1, "", "", float("inf")

    def heard(self) -> List[Dict[str, Any]]:
        """Return its answers; send what waits, and take what it prints."""
        self.leash.flush()
        self.leash.listen()
        return self.leash.read()

    def failed(self) -> Tuple[str, bool]:
        """Return how it failed, empty if it did not, and whether it hung."""
        if self.leash.trouble:
            return self.leash.trouble, False
        if self.leash.ended is not None:
            return f"its process {self.leash.how()}", False
        if time.monotonic() > self.limit:
            return f"did not end within {self.limit_s:g} s", True
        return "", False

    def let_go(self) -> str:
        """End it; return what there is to say if it does not go."""
        gone = self.leash.ended is not None
        self.leash.close()
        if gone or self.leash.wait(VANISH_S):
            return ""
        return f"; not even SIGKILL ends it: process {self.leash.pid} is left behind"


def checked(check: str, severity: Severity, text: str, rule: str) -> Dict[str, Any]:
    """Return the message that a check says one thing."""
    outcome = Outcome((Finding(check, severity, text, rule=rule),))
    return {"kind": "checked", "check": check, "outcome": to_json(outcome)}
