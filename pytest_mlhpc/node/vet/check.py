"""PAYLOAD. What a check is. Each is a small class in ``checks/`` (no torch; runs in a process that may hang or die)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Protocol, Tuple

from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.machine import Machine
from pytest_mlhpc.node.vet.policy import Policy


@dataclass(frozen=True)
class Wanted:
    """What a node should have and what the user is about to do; None, 0 or empty: nobody has said.

    Sizes are in bytes. ``accelerator`` is cpu, cuda, rocm, xpu, ipu, wse or auto. ``expect`` are further properties by name
    (``driver``, ``numa``, ``hugepages``, ``governor``, ``firmware``), as text, from the partition's ``expect:``. ``purpose`` is
    "" or "job". ``paths`` are for job checks: ``checkpoint``, ``data``; ``storage`` is
    the folder that is measured (default: that for temporary files). ``ranks`` are those that one node will have.
    """

    accelerator: str = "auto"
    devices: Optional[int] = None
    device_model: str = ""
    cores: Optional[int] = None
    memory: Optional[int] = None
    expect: Mapping[str, str] = field(default_factory=dict)
    purpose: str = ""
    hours: float = 0.0
    ranks: int = 0
    paths: Mapping[str, str] = field(default_factory=dict)
    checkpoint_bytes: int = 0


@dataclass(frozen=True)
class Context:
    """What a check is given: policy and expectation, where this node stands, and when vetting began.

    ``hosts`` are all nodes in order. ``window_s``: events older than this are history. ``python`` is the interpreter that the
    job will run, empty: ``python3``.
    """

    policy: Policy
    wanted: Wanted = field(default_factory=Wanted)
    host: str = ""
    hosts: Tuple[str, ...] = ()
    window_s: float = 86400.0
    python: str = ""


class Check(Protocol):
    """A check that looks once.

    ``level`` is quick or deep (which includes quick); ``cost_s`` what it may take, in seconds; ``reads`` names what it reads, for the manual; ``purpose`` is "" or "job" (only with ``--for job``).

    A check that puts the node under load itself says ``loads = True`` (absent: it only looks), and is left out with ``--no-load``.

    ``examine`` raises ``Unreadable`` (``machine.py``) where it cannot tell: that becomes UNKNOWN with the error's words.
    """

    name: str
    level: str
    cost_s: float
    reads: Tuple[str, ...]
    purpose: str

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look, and say what was seen."""
        ...


class Watch(Protocol):
    """A check over the time of the load: ``begin`` before it, ``sample`` every half second during it, ``end`` after it.

    What ``begin`` and ``sample`` return is kept and handed on: counters, clocks. Other members are those of :class:`Check`.
    """

    name: str
    level: str
    cost_s: float
    reads: Tuple[str, ...]
    purpose: str

    def begin(self, machine: Machine, context: Context) -> object:
        """Return the state before the load."""
        ...

    def sample(self, machine: Machine, state: object) -> object:
        """Return the state with what is seen now, under load."""
        ...

    def end(self, machine: Machine, context: Context, state: object) -> Outcome:
        """Look again, and say what the load has shown."""
        ...
