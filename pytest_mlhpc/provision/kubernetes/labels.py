"""Names and labels of all that is created for an allocation: by them it is found, read and cleared up, whoever made it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.jobs.submitted import job_name

#: A recommended label of Kubernetes (kubernetes.io/docs, "Recommended Labels").
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
US: Final = "pytest-mlhpc"
SESSION: Final = "pytest-mlhpc/session"
ALLOCATION: Final = "pytest-mlhpc/allocation"
RUN: Final = "pytest-mlhpc/run"
OWNER: Final = "pytest-mlhpc/owner"
RANK: Final = "pytest-mlhpc/rank"
#: The annotation by which rank 0's address reaches the other pods.
LEADER: Final = "pytest-mlhpc/leader"
#: On what is kept after its end: until when, in seconds since 1970.
KEEP_UNTIL: Final = "pytest-mlhpc/keep-until"
#: Longest value of a label, and longest name of a pod's host (RFC 1123 label).
LONGEST: Final = 63


@dataclass(frozen=True)
class Identity:
    """Who makes an allocation: the session's id, and the user's name as the system has it."""

    session: str
    owner: str


def label_safe(text: str) -> str:
    """Return *text* as the value of a label: other characters become ``-``, at most 63 are kept; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:LONGEST].strip("._-")


def labels_of(plan: Plan, identity: Identity) -> Mapping[str, str]:
    """Return the labels that every object of *plan*'s allocation carries, pods too."""
    return {
        MANAGED_BY: US,
        SESSION: label_safe(identity.session),
        ALLOCATION: plan.allocation_id,
        RUN: plan.runs[0].run_id if plan.runs else plan.allocation_id,
        OWNER: label_safe(identity.owner) or "unknown",
    }


def selector(**labels: str) -> str:
    """Return a label selector for our objects; ``selector(allocation=ID)``, ``session=``, ``owner=``, ``run=``."""
    said = {f"pytest-mlhpc/{name}": label_safe(value) for name, value in labels.items()}
    return ",".join(f"{name}={value}" for name, value in {MANAGED_BY: US, **said}.items())


def object_name(allocation_id: str, round_: int = 0) -> str:
    """Return the name of the objects of an allocation, ``mlhpc-<id>``; those of pods have more behind it.

    *round_* counts allocations that were made again without unfit nodes.
    """
    return f"{job_name(allocation_id)}-r{round_}" if round_ else job_name(allocation_id)
