"""Draining and resuming nodes of Slurm by its own commands, one node at a time: each is looked at right before.

Slurm knows no "change it if it is still so", so between looking and changing a few milliseconds remain in which an
administrator's own drain would get our reason. It would never be undone by us: the seal is checked again, the state too.
"""

from __future__ import annotations

from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError, SlurmNode
from pytest_mlhpc.vetting.keeper import Action, changed, failed, left
from pytest_mlhpc.vetting.reasons import is_ours

#: RESUME would end these as well (scontrol(1), State=RESUME), and they are not ours.
_BUSY = frozenset({"powering_down", "powered_down", "reboot_requested", "reboot_issued"})


class SlurmNodes:
    """Nodes of one cluster. ``client`` has a time limit on every call."""

    name = "Slurm"

    def __init__(self, client: SlurmClient) -> None:
        self._client = client

    def take_out(self, host: str, reason: str) -> Action:
        """Drain a node that nobody has drained."""
        try:
            node = self._node(host)
            if node is None:
                return failed(host, "Slurm knows no node of this name")
            if _out(node):
                return left(host, f"already {_shown(node)}")
            self._client.drain([host], reason)
            node = self._node(host)
            if node is None or "drain" not in node.flags or node.reason != reason:
                return failed(host, f"was drained, but now is {_shown(node) if node else 'gone'}")
        except SlurmError as error:
            return failed(host, str(error))
        return changed(host, f"drained: {reason}")

    def give_back(self, host: str) -> Action:
        """Resume a node that we have drained, and that is nothing but drained."""
        try:
            node = self._node(host)
            if node is None:
                return failed(host, "Slurm knows no node of this name")
            if why := _not_ours(node):
                return left(host, f"{why}{_shown(node)}")
            self._client.resume([host])
            node = self._node(host)
            if node is not None and "drain" in node.flags:
                return failed(host, f"was resumed, but still is {_shown(node)}")
        except SlurmError as error:
            return failed(host, str(error))
        return changed(host, "resumed")

    def ours(self) -> list[str]:
        """Return the nodes that bear our reason.

        Raises:
            SlurmError: Slurm does not answer.
        """
        return [node.name for node in self._client.nodes() if is_ours(node.name, node.reason)]

    def _node(self, host: str) -> SlurmNode | None:
        return next((node for node in self._client.nodes([host]) if node.name == host), None)


def _out(node: SlurmNode) -> bool:
    return bool(node.flags & {"drain", "fail"}) or node.state in {"down", "error"}


def _not_ours(node: SlurmNode) -> str:
    """Return why a node is not to be resumed; empty if it is drained by us and nothing else."""
    if "drain" not in node.flags:
        return "not drained, but "
    if not is_ours(node.name, node.reason):
        return "drained by somebody else: "
    if node.state in {"down", "error", "unknown"} or node.flags & _BUSY:
        return "more than drained: "
    return ""


def _shown(node: SlurmNode) -> str:
    state = "+".join([node.state, *sorted(node.flags)])
    return f"{state}: {node.reason}" if node.reason else state
