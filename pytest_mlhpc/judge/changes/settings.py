"""What the detector of change points can be told, and what it says when told nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Detector:
    """Settings of the detector; the defaults are for nightly benchmarks, chosen by ``benchmarks/history.py``.

    Shares are of the level: 0.015 is 1.5 %. Lengths are in points that have a figure; gaps do not count.
    """

    penalty: float = 3.0  #: a change must explain more than this times log(points), in variances of the noise
    share: float = (
        0.0  #: ... and this share of all that the series varies; for series that wander, not for nights
    )
    magnitude: float = (
        0.015  #: smallest change of level; nothing below 1.5 % is called one (``judge.fence.SMALLEST``)
    )
    abrupt: float = 0.3  #: share of a change that must have come within ``near`` points; the rest is drift
    near: int = 10  #: points on each side of a change
    floor: float = 0.004  #: no series is quieter than this share of its level (``judge.fence.SIGMA_FLOOR``)
    window: int = 21  #: points around each one that say what is an outlier there
    clip: float = 3.0  #: points farther from their window's median than this many sigmas are pulled in to it
    shortest: int = 2  #: points of a level, at least
