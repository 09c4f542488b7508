"""What can go wrong, as one sentence for the one who ran the command."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster cannot do what was asked. The text says what, where, and what to do."""


class UnfitMachineError(ClusterError):
    """No cluster can run on this machine as it is: packages or permissions are missing."""
