"""PAYLOAD. What a rank says of operations that it timed again and again: those of storage, communication and n-body.

All ranks do an operation at the same time, so that one repetition took as long as on the slowest rank
(``node/protocol/probed.py`` makes metrics of it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class Rate:
    """A metric that is an amount over a time, such as ``write_bandwidth`` in ``B/s``.

    ``amount`` is what one repetition did, in the unit without ``/s``: of this rank, to be added up, or, where ``together``
    is set, of all ranks, who then all name the same. ``tolerance``: see :class:`pytest_mlhpc.node.protocol.schema.Metric`.
    """

    metric: str
    unit: str
    amount: float
    together: bool = False
    tolerance: Optional[float] = None


@dataclass(frozen=True)
class Timed:
    """One operation: how long each repetition took on this rank, in seconds, and the metrics that this makes.

    ``times`` are names of metrics that are the time itself. ``ranks`` time it (empty: all).
    """

    name: str
    seconds: Tuple[float, ...] = ()
    rates: Tuple[Rate, ...] = ()
    times: Tuple[str, ...] = ()
    ranks: Tuple[int, ...] = ()
    tolerance: Optional[float] = None  #: of the times
