"""What became of a declared job, as the test sees it; plain data that travels to pytest-xdist workers as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.node.vet.verdict import Verdict
from pytest_mlhpc.store.record import Failure
from pytest_mlhpc.store.verdict import Judgement


@dataclass(frozen=True)
class Held:
    """Nodes that a test holds. ``directory`` is the folder through which their batch is asked (``node/batch/held.py``)."""

    id: str  #: the scheduler's own id of the allocation, or ours where it has none
    nodes: tuple[str, ...]
    partition: str
    cores_per_node: int
    directory: str


@dataclass(frozen=True)
class Outcome:
    """The end of one declared job: measured and judged, or failed, all attempts considered.

    ``measurement`` is attempt 0's. ``failure`` is set when the run was broken; a slow run has a judgement that says
    so instead. ``record_id`` names the stored record. ``directory`` holds plan and logs.
    """

    node_id: str
    benchmark: str
    measurement: Measurement | None = None
    judgement: Judgement | None = None
    failure: Failure | None = None
    attempts: int = 0
    record_id: str = ""
    directory: str = ""
    vetting: Verdict | None = None  #: instead of a measurement: what was found of the nodes
    held: Held | None = None  #: instead of a measurement: nodes that are the test's while it runs
