"""What can be asked of a Kubernetes server: kinds by their paths, and names of single objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True)
class Resource:
    """One kind as the server names it. ``group`` is empty for the core group, ``plural`` is the word in paths."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The word of a manifest's ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        """Return what kubectl calls it: ``pods``, ``jobs.batch``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, of one object, or of a part of it like ``log``; every piece is quoted."""
        pieces = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced:
            pieces += ["namespaces", namespace]
        pieces.append(self.plural)
        if name:
            pieces.append(name)
        if subresource:
            pieces.append(subresource)
        return "/" + "/".join(quote(piece, safe="") for piece in pieces)


POD = Resource("", "v1", "Pod", "pods")
JOB = Resource("batch", "v1", "Job", "jobs")
CONFIG_MAP = Resource("", "v1", "ConfigMap", "configmaps")
SERVICE = Resource("", "v1", "Service", "services")
EVENT = Resource("", "v1", "Event", "events")
PVC = Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
NODE = Resource("", "v1", "Node", "nodes", namespaced=False)


@dataclass(frozen=True)
class ObjectRef:
    """One object. ``uid`` tells it from another of the same name made later; empty where it is not known."""

    resource: Resource
    namespace: str
    name: str
    uid: str = ""

    def __str__(self) -> str:
        """Return ``jobs.batch NAMESPACE/NAME``."""
        place = f"{self.namespace}/" if self.resource.namespaced else ""
        return f"{self.resource} {place}{self.name}"

    @property
    def path(self) -> str:
        """The object's path on the server."""
        return self.resource.path(self.namespace, self.name)


def ref_of(resource: Resource, manifest: Mapping[str, Any]) -> ObjectRef:
    """Return the reference of an object that the server told; what it lacks is empty."""
    found = manifest.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    namespace, name, uid = (metadata.get(key) for key in ("namespace", "name", "uid"))
    return ObjectRef(resource, str(namespace or ""), str(name or ""), str(uid or ""))
