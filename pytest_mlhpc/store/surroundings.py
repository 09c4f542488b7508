"""What a record says of where its figures come from: nodes, commit, environment. Wherever it says so."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_mlhpc.store.record import Record

#: Parts of a run's environment that nodes and commit already say.
_ELSEWHERE = frozenset({"host", "commit"})


def nodes_of(record: Record) -> tuple[str, ...]:
    """Return the nodes of the run; as the run itself named them where the session did not know."""
    return record.nodes or (record.measurement.nodes if record.measurement else ())


def commit_of(record: Record) -> str:
    """Return the commit under test; where the session knew none, the one of the checkout that the run saw."""
    seen = record.measurement.environment.get("commit", "") if record.measurement else ""
    return record.commit or seen


def environment_of(record: Record) -> Mapping[str, str]:
    """Return what the run said of its environment (driver, kernel, image ...), without its host and commit."""
    found = record.measurement.environment if record.measurement else {}
    return {name: value for name, value in found.items() if name not in _ELSEWHERE}


def unfit_of(record: Record) -> Mapping[str, str]:
    """Return the nodes that vetting left out, host -> reason."""
    return record.vetting.unfit if record.vetting else {}
