"""Our own extension points.

Third parties implement them in a package with the entry-point group ``pytest_mlhpc``, or in a conftest.py. Our own schedulers, launchers and workloads use the same hooks (``pytest_mlhpc/builtin.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Environment, Partition
    from pytest_mlhpc.jobs.provisioner import Provisioner
    from pytest_mlhpc.node.worker.workloads.definitions import Workload
    from pytest_mlhpc.store.record import Record

hookspec = pluggy.HookspecMarker("pytest_mlhpc")
hookimpl = pluggy.HookimplMarker("pytest_mlhpc")


@dataclass(frozen=True)
class Preview:
    """What a scheduler would be given, as text: ``suffix`` is that of its file (sh, yaml)."""

    suffix: str
    text: str


@hookspec(firstresult=True)
def mlhpc_provisioner(partition: Partition, state_dir: Path, session_id: str) -> Provisioner | None:
    """Return the provisioner for *partition* if its ``scheduler:`` is yours, else None. First answer wins."""


@hookspec
def mlhpc_schedulers() -> Mapping[str, type[Any] | None]:  # type: ignore[empty-body]  # a specification
    """Return names of schedulers that you serve, each with the pydantic model of its options, or None for no options.

    A model may have a method ``contradictions(partition)``, which yields (key, text) for what the rest of the partition (a
    ``config.schema.PartitionModel``) says and this scheduler cannot do; the key is relative to the partition.
    """


@hookspec(firstresult=True)
def mlhpc_preview(partition: Partition, environment: Environment) -> Preview | None:
    """Return what your scheduler would be given for a small run there, with made-up names; None if it is not yours.

    Nothing may be asked or started but what checks the text. Raises UsageError if it cannot be made.
    """


@hookspec
def mlhpc_launchers() -> Mapping[str, str]:  # type: ignore[empty-body]  # a specification
    """Return launchers: name -> payload module with ``launch(run, nodes, env) -> (argv, env)``."""


@hookspec
def mlhpc_workloads() -> tuple[Workload, ...]:  # type: ignore[empty-body]  # a specification
    """Return workloads that tests may name in ``@workload``.

    ``module`` is an import path with ``task(parameters) -> Task``; with ``probe=True`` it has ``probe(place) -> Probe``.
    """


@hookspec
def mlhpc_records_begin() -> None:
    """Prepare for records: none of this session is stored yet. Called once, before the first run. Must not raise."""


@hookspec
def mlhpc_record(record: Record) -> None:
    """Receive every record after it was stored durably. Must not raise and must not block for long."""


@hookspec
def mlhpc_records_end(tell: Callable[[str], None], hurry: bool) -> None:
    """Finish what was begun with the records: no further one will come. Called once, at the end of a session.

    ``tell`` adds a line to the summary, which changes no exit code. With ``hurry`` the session received a signal to end: keep what is
    there and start nothing. Otherwise it may take some seconds. Must not raise.
    """


@hookspec
def mlhpc_alert_channels() -> Mapping[str, str]:  # type: ignore[empty-body]  # a specification
    """Return types of channels for alerts.yaml: name -> module with ``Settings`` and ``open_channels`` (alert/channels/base.py)."""
