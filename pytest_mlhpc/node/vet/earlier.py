"""PAYLOAD. What a vetting may know from earlier ones, and who keeps that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Protocol, Sequence, Tuple

from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.report import NodeReport, PairResult, Report
from pytest_mlhpc.node.vet.verdict import Verdict


@dataclass(frozen=True)
class Earlier:
    """What is known from before: settings with what was learned, and results by host that may be used for an equal boot id.

    ``pairs`` are exchanges between all nodes, or none. ``age_s`` is the oldest's.
    """

    settings: Settings
    nodes: Mapping[str, NodeReport] = field(default_factory=dict)
    pairs: Tuple[PairResult, ...] = ()
    age_s: float = 0.0


class Memory(Protocol):
    """Where earlier vettings are kept; the controller's (``command/remembering.py``), as the payload keeps nothing.

    ``grace_s`` is how long ``after`` may take, in seconds.
    """

    @property
    def grace_s(self) -> float:
        """Return it."""
        ...

    def before(self, settings: Settings, hosts: Sequence[str]) -> Earlier:
        """Return what is known of these nodes."""
        ...

    def after(
        self, identity: str, verdict: Verdict, report: Report, settings: Settings, reused: Sequence[str]
    ) -> None:
        """Take in a verdict; *reused* are the hosts that were not measured again."""
        ...
