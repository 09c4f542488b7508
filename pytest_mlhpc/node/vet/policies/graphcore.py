"""PAYLOAD. Bounds for Graphcore IPUs."""

from __future__ import annotations

from pytest_mlhpc.node.vet.policy import Bound

BOUNDS = (
    Bound("graphcore.devices_missing", "IPUs fewer than described", "the partition's description", fail=1),
    Bound(
        "graphcore.error_state",
        "IPUs whose error state is not 'no errors'",
        "Graphcore command line tools, Device attributes: ipu error state",
        fail=1,
    ),
)
