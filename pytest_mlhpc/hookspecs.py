"""Our own extension points.

Third parties implement them in a package with the entry-point group ``pytest_mlhpc``, or in a conftest.py. Our own schedulers, launchers and workloads use the same hooks (``pytest_mlhpc/builtin.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pytest_mlhpc.provision.base import Provisioner
    from pytest_mlhpc.results.record import Record
    from pytest_mlhpc.system.model import Partition
    from pytest_mlhpc.worker.workloads.definitions import Workload

hookspec = pluggy.HookspecMarker("pytest_mlhpc")
hookimpl = pluggy.HookimplMarker("pytest_mlhpc")


@hookspec(firstresult=True)
def mlhpc_provisioner(partition: Partition, state_dir: Path, session_id: str) -> Provisioner | None:
    """Return the provisioner for *partition* if its ``scheduler:`` is yours, else None. First answer wins."""


@hookspec
def mlhpc_schedulers() -> Mapping[str, type[Any] | None]:  # type: ignore[empty-body]  # a specification
    """Return names of schedulers that you serve, each with the pydantic model of its options, or None for no options."""


@hookspec
def mlhpc_launchers() -> Mapping[str, str]:  # type: ignore[empty-body]  # a specification
    """Return launchers: name -> payload module with ``launch(run, nodes, env) -> (argv, env)``."""


@hookspec
def mlhpc_workloads() -> tuple[Workload, ...]:  # type: ignore[empty-body]  # a specification
    """Return workloads that tests may name in ``@pytest.mark.train``."""


@hookspec
def mlhpc_record(record: Record) -> None:
    """Receive every record after it was stored durably. Must not raise and must not block for long."""
