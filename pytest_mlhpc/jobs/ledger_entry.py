"""One allocation in the ledger: enough to find it again, to judge it in a later session, or to end it."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import pwd
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.jobs.programs import resolved_argv
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.protocol.plan import Plan

if TYPE_CHECKING:
    from pytest_mlhpc.store.record import Provenance

#: Fields of a spec that do not change what is run: where the test stands, what was asked before defaults were filled in,
#: what is looked at afterwards, who is asked about it.
_NOT_COUNTED = frozenset(
    {
        "node_id",
        "asked",
        "target",
        "judged",
        "expected_metrics",
        "folder",
        "owner",
        "functions",
        "needs",
        "needed",
    }
)
#: Fields of a partition that change how a job is submitted or run there. Not its limits for whole sessions.
_PARTITION_FIELDS = (
    "system", "name", "scheduler", "launcher", "accelerator", "nodes", "vet", "scheduler_options", "ssh",
)  # fmt: skip


@dataclass(frozen=True)
class LedgerRun:
    """One run of an allocation. ``digest`` is its spec's (:func:`spec_digest`)."""

    run_id: str
    node_id: str  #: pytest's
    benchmark: str
    attempt: int
    digest: str


@dataclass(frozen=True)
class LedgerEntry:
    """One allocation as it was submitted. ``id`` and ``job_name`` were chosen before; ``native_id`` came afterwards.

    ``partition`` is ``system:partition``; ``cluster`` tells one scheduler from another where that is known, as one
    state directory may serve the login nodes of several.
    """

    id: str
    partition: str
    scheduler: str = "local"
    job_name: str = ""
    native_id: str = ""
    directory: str = ""
    session: str = ""  #: that submitted it
    user: str = ""
    uid: int = -1
    submitted_ns: int = 0
    time_limit_s: float = 0.0
    nodes: int = 0
    runs: tuple[LedgerRun, ...] = ()
    cluster: str = ""
    concluded: tuple[str, ...] = ()  #: run ids whose records are stored: nobody needs them again
    commit: str = ""  #: of what was submitted; this and the next two as in ``store/record.py``
    branch: str = ""
    purpose: str = ""


def describe(entry: LedgerEntry) -> str:
    """Return name, the scheduler's id and the partition of *entry*."""
    native = f" (job {entry.native_id})" if entry.native_id else ""
    return f"{entry.job_name or entry.id}{native} on {entry.partition}"


def job_name(allocation_id: str) -> str:
    """Return the unique name under which an allocation is submitted."""
    return f"mlhpc-{allocation_id}"


def same_cluster(entry: LedgerEntry, cluster: str) -> bool:
    """Whether *entry* may be a job of *cluster*: surely so, or one of the two names is not known."""
    return not entry.cluster or not cluster or entry.cluster == cluster


def ledger_entry(
    plan: Plan,
    specs: Sequence[JobSpec],
    session_id: str,
    cluster: str = "",
    *,
    provenance: Provenance | None = None,
) -> LedgerEntry:
    """Return the ledger's entry of *plan*, whose runs are those of *specs* in their order."""
    partition = specs[0].target.partition
    return LedgerEntry(
        id=plan.allocation_id,
        partition=partition.id,
        scheduler=partition.scheduler,
        job_name=job_name(plan.allocation_id),
        directory=plan.directory,
        session=session_id,
        user=user_name(),
        uid=os.getuid(),
        submitted_ns=time.time_ns(),
        time_limit_s=plan.time_limit_s,
        nodes=plan.nodes + plan.spares,
        runs=tuple(
            LedgerRun(run.run_id, spec.node_id, spec.benchmark, run.attempt, spec_digest(spec))
            for run, spec in zip(plan.runs, specs, strict=True)
        ),
        cluster=cluster,
        commit=provenance.commit if provenance else "",
        branch=provenance.branch if provenance else "",
        purpose=provenance.purpose if provenance else "",
    )


def user_name() -> str:
    """Return this user's name, or the uid as text where it has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run under numbers that no password database knows
        return str(os.getuid())


def spec_digest(spec: JobSpec) -> str:
    """Return a hash of all that makes two specs the same job: two sessions with the same test agree on it.

    Counted are the benchmark, every field that reaches the node, the partition with its scheduler's options, the one
    environment and the one data set that the run uses. Not counted are the test's node id (files may move), what was
    asked before defaults were filled in, and what is a session's matter (budget, number of jobs, features).

    Raises:
        TypeError: a field holds what is neither plain JSON nor a path, a set or an enum; names it.
    """
    target = spec.target
    content = {
        **{name.name: getattr(spec, name.name) for name in fields(spec) if name.name not in _NOT_COUNTED},
        "argv": resolved_argv(spec),
        **({"needs": {name: spec_digest(one) for name, one in spec.needs.items()}} if spec.needs else {}),
        "partition": {name: getattr(target.partition, name) for name in _PARTITION_FIELDS},
        "environment": target.environment,
        "dataset": target.datasets.get(spec.data),
        "fingerprint": target.fingerprint,
    }
    text = json.dumps(_plain(content, "spec"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item, where) for item in value), key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name), f"{where}.{one.name}") for one in fields(value)}
    return _scalar(value, where)


def _scalar(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, where)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1.0 and 1 compute the same
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where}: {type(value).__name__} is neither plain JSON nor a path, a set or an enum")
