"""Who takes nodes out of service and gives them back: what Slurm and Kubernetes have in common here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pytest_mlhpc.node.vet.text import safe


@dataclass(frozen=True)
class Action:
    """What became of one node. ``word`` is changed, left (somebody else's, or nothing to do) or failed."""

    host: str
    word: str
    text: str

    def __str__(self) -> str:
        """Return a line for people."""
        mark = {"changed": "", "left": "left as it is: ", "failed": "FAILED: "}[self.word]
        return safe(f"{self.host}: {mark}{self.text}")


def changed(host: str, text: str) -> Action:
    """Return that it was done."""
    return Action(host, "changed", text)


def left(host: str, text: str) -> Action:
    """Return that the node was not touched, and why that is right."""
    return Action(host, "left", text)


def failed(host: str, text: str) -> Action:
    """Return that it could not be done."""
    return Action(host, "failed", text)


class Keeper(Protocol):
    """One scheduler's nodes. No method touches a node that somebody else has out of service."""

    name: str

    def take_out(self, host: str, reason: str) -> Action:
        """Let nothing new start on *host*; *reason* is a sealed one."""
        ...

    def give_back(self, host: str) -> Action:
        """Undo :meth:`take_out`, if it was ours and nobody has changed it since."""
        ...

    def ours(self) -> list[str]:
        """Return the nodes that are out of service by us."""
        ...
