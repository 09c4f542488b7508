"""Where an allocation was created, written down before it is: enough for a later session, or `mlhpc reap`, to find it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.kinds import Kind
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.resources import Resource
from pytest_mlhpc.results.foreign import read_json

FILE: Final = "cluster.json"
_SCHEMA: Final = 1


@dataclass(frozen=True)
class Where:
    """How the server is reached, as systems.yaml said it, which server that was, and the kind of the workload."""

    kubeconfig: str
    context: str
    namespace: str  #: never empty
    server: str
    group: str
    version: str
    kind: str
    plural: str
    authority: str = ""  #: its certificates: one URL may lead to several clusters, through tunnels

    def is_at(self, api: KubernetesApi) -> bool:
        """Whether *api* is the cluster in which it is."""
        known = api.authority if self.authority else ""
        return (self.server, self.authority) == (api.server, known)

    def elsewhere(self, api: KubernetesApi) -> str:
        """Say that *api* is another one."""
        same_url = " (with other certificates)" if api.server == self.server else ""
        return f"it is in {self.server}, and the kubeconfig leads to {api.server}{same_url} now"

    @property
    def resource(self) -> Resource:
        """The workload's kind."""
        return Resource(self.group, self.version, self.kind, self.plural)


def where_of(settings: KubernetesSettings, namespace: str, api: KubernetesApi, kind: Kind) -> Where:
    """Return where an allocation of *kind* is created."""
    resource = kind.resource
    return Where(
        settings.kubeconfig,
        settings.context,
        namespace,
        api.server,
        resource.group,
        resource.version,
        resource.kind,
        resource.plural,
        api.authority,
    )


def settings_at(settings: KubernetesSettings, where: Where | None) -> KubernetesSettings:
    """Return *settings* that lead to where an allocation was created, whatever the partition says by now."""
    if where is None:
        return settings
    return replace(settings, kubeconfig=where.kubeconfig, context=where.context, namespace=where.namespace)


def to_text(where: Where) -> str:
    """Return the content of the file."""
    return json.dumps({"schema": _SCHEMA, **asdict(where)}, indent=1) + "\n"


def read(directory: Path) -> Where | None:
    """Return what was written into an allocation's *directory*; None where there is no such file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of ours, or of a newer version.
    """
    try:
        found = read_json((directory / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or found.pop("schema", None) != _SCHEMA:
        raise ValueError(f"{directory / FILE} is not of schema {_SCHEMA}")
    try:
        return Where(**found)
    except TypeError as error:
        raise ValueError(f"{directory / FILE} lacks something: {error}") from None
