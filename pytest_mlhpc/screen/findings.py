"""What judging takes and gives: all that was seen of a program, and the things that limit it."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_mlhpc.screen.courses import DeviceCourse, NodeCourse
from pytest_mlhpc.screen.ranks import Rank

#: Shares below which nothing is said: what is told must be worth a look.
LEAST = 0.10


@dataclass(frozen=True)
class Finding:
    """One thing that limits: a word for it, its share of the time, the evidence, and what to do."""

    kind: str
    share: float
    text: str
    advice: str = ""
    certain: bool = True  #: False: seen from outside alone


@dataclass(frozen=True)
class Seen:
    """All that was found out of a program in *seconds*."""

    seconds: float
    ranks: tuple[Rank, ...]
    nodes: tuple[NodeCourse, ...]
    devices: tuple[DeviceCourse, ...]
