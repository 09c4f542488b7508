"""What can go wrong, as one sentence for the one who ran the command."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster cannot do what was asked. The text says what, where, and what to do."""
