"""What a test sees of vetted nodes."""

from __future__ import annotations

from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.verdict import Fitness, Verdict

#: What counts as trouble. What could not be judged is none here: ``unknown`` tells of it.
BAD = frozenset({Severity.CRITICAL})


class Vetting:
    """The verdict on a test's nodes: ``vetting.good``, ``vetting.unfit``, ``vetting.trouble("kernel_log")``."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    @property
    def good(self) -> tuple[str, ...]:
        """The nodes that may be used, in order."""
        return self.verdict.good

    @property
    def unfit(self) -> dict[str, str]:
        """Nodes that may not be used, each with the worst that was found."""
        return {node.host: node.reason for node in self.verdict.nodes if node.fitness is Fitness.UNFIT}

    def trouble(self, check: str) -> list[str]:
        """Return what *check* found that makes nodes unfit, as ``node: device: reason``."""
        return self._of(check, BAD)

    def unknown(self, check: str) -> list[str]:
        """Return what *check* could not judge."""
        return self._of(check, frozenset({Severity.UNKNOWN}))

    def ran(self, check: str) -> bool:
        """Return whether *check* said anything at all: nodes have not what it looks at, or it is too slow for the level."""
        return any(found.check == check for node in self.verdict.nodes for found in node.findings)

    def _of(self, check: str, severities: frozenset[Severity]) -> list[str]:
        return [
            ": ".join(word for word in (node.host, found.device, found.reason) if word)
            for node in self.verdict.nodes
            for found in node.findings
            if found.check == check and found.severity in severities
        ]

    def __repr__(self) -> str:
        return f"<vetting: {len(self.good)} of {len(self.verdict.nodes)} nodes are fit>"
