"""PAYLOAD. Bounds for Cerebras appliances."""

from __future__ import annotations

from pytest_mlhpc.node.vet.policy import Bound

BOUNDS = (
    Bound(
        "cerebras.client",
        "failures of the appliance's client to get an answer",
        "Cerebras documentation, csctl",
        fail=1,
    ),
)
