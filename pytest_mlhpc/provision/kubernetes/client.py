"""The calls to a Kubernetes API server, on plain JSON: the official client's models reject what some sites use.

Open it to see which calls are made and what they return. Each call takes at most ``connect.CALL_LIMIT_S``, from any
thread. Streams (watch, logs) take that long to begin, and last until the server or :meth:`KubernetesClient.close`
ends them.
"""

from __future__ import annotations

import builtins
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from pytest_mlhpc.provision.kubernetes.errors import (
    ApiCall,
    Conflict,
    Expired,
    NotFound,
    Unavailable,
)
from pytest_mlhpc.provision.kubernetes.objects import EVENT, Manifest, ObjectRef, Resource, event_time
from pytest_mlhpc.provision.kubernetes.transport import (
    ApiRequest,
    HttpTransport,
    LogStream,
    WatchStream,
)

#: What becomes of an object's dependants when it is deleted (metav1.DeleteOptions).
Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True)
class ServerVersion:
    """A server's version. ``minor`` is a number also if the server says ``20+``; ``text`` is like v1.20.2."""

    major: int
    minor: int
    text: str


@dataclass(frozen=True)
class Listing:
    """All matching objects, and the resource version from which a watch continues."""

    items: tuple[Manifest, ...]
    resource_version: str


#: Objects in one page of a list, as in kubectl and client-go.
PAGE_SIZE = 500
#: Longest silence of a watch, in seconds: since 1.19 servers send a bookmark every minute.
WATCH_SILENCE_S = 200.0


class KubernetesClient:
    """One server, one account, and a namespace that calls without one use.

    Args:
        transport: sends the requests.
        namespace: empty: that of the credentials.

    Raises (every method):
        KubernetesError: see ``errors.py``; Unavailable if the server does not answer.
    """

    def __init__(self, transport: HttpTransport, namespace: str = "") -> None:
        self._transport = transport
        self.namespace = namespace or transport.login.access.namespace

    @property
    def server(self) -> str:
        """The server's URL."""
        return self._transport.login.access.server

    @property
    def authority(self) -> str:
        """SHA-256 of the server's certificate authority; empty if it is one of the system's."""
        return self._transport.login.access.authority

    @property
    def requests(self) -> int:
        """The number of requests sent, branches included."""
        return self._transport.login.requests

    def version(self) -> ServerVersion:
        """Return the server's version."""
        found = self._transport.ask(
            ApiRequest(ApiCall("get", "version", "", "", self.server), "GET", "/version")
        )
        major, minor = (_number(found.get(part)) for part in ("major", "minor"))
        return ServerVersion(major, minor, str(found.get("gitVersion") or f"{major}.{minor}"))

    def versions(self, group: str) -> tuple[str, ...]:
        """Return the server's versions of an API group, the preferred one first.

        Raises:
            NotFound: the server has no such group.
        """
        call = ApiCall("get", f"versions of {group}", "", "", self.server)
        found = self._transport.ask(ApiRequest(call, "GET", f"/apis/{quote(group, safe='')}"))
        first = (found.get("preferredVersion") or {}).get("version")
        others = [one.get("version") for one in found.get("versions") or ()]
        return tuple(dict.fromkeys(str(one) for one in [first, *others] if one))

    def create(self, resource: Resource, manifest: Manifest, namespace: str = "") -> Manifest:
        """Create an object and return it as the server stores it. *manifest* is not changed."""
        metadata = manifest.get("metadata") or {}
        namespace = namespace or str(metadata.get("namespace") or self.namespace)
        name = str(metadata.get("name") or metadata.get("generateName") or "")
        call = self._call("create", resource, namespace, name)
        return self._transport.ask(
            ApiRequest(call, "POST", resource.path(namespace), content=copy.deepcopy(manifest))
        )

    def get(self, ref: ObjectRef) -> Manifest:
        """Return an object.

        Raises:
            NotFound: there is none.
        """
        return self._transport.ask(ApiRequest(self._object_call("get", ref), "GET", self._path(ref)))

    def list(self, resource: Resource, *, labels: str = "", fields: str = "", namespace: str = "") -> Listing:
        """Return all matching objects, in pages; in one request if the server forgets the list between pages."""
        try:
            return self._list(resource, labels, fields, namespace, PAGE_SIZE)
        except Expired:
            return self._list(resource, labels, fields, namespace, 0)

    def watch(
        self,
        resource: Resource,
        *,
        labels: str = "",
        resource_version: str,
        timeout_s: float,
        namespace: str = "",
    ) -> WatchStream:
        """Return the events since *resource_version*. The server ends the watch after *timeout_s* seconds."""
        namespace = namespace or self.namespace
        call = self._call("watch", resource, namespace)
        query = [
            ("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", resource_version),
            ("timeoutSeconds", str(round(timeout_s))), *_without_empty(labelSelector=labels),
        ]  # fmt: skip
        silence_s = min(WATCH_SILENCE_S, timeout_s + 30.0)
        stream = self._transport.open(
            ApiRequest(call, "GET", resource.path(namespace), tuple(query)), silence_s
        )
        return WatchStream(stream, call)

    def delete(
        self, ref: ObjectRef, *, grace_s: int | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object and its dependants. A missing object, or another with its name (uid), is no error."""
        options: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if ref.uid:
            options["preconditions"] = {"uid": ref.uid}
        try:
            self._transport.ask(
                ApiRequest(self._object_call("delete", ref), "DELETE", self._path(ref), content=options)
            )
        except NotFound:
            return
        except Conflict as error:
            if not ref.uid or "uid" not in error.message.lower():
                raise

    def patch(self, ref: ObjectRef, body: Mapping[str, Any]) -> Manifest:
        """Change an object by a JSON merge patch (RFC 7386) and return it."""
        return self._transport.ask(
            ApiRequest(
                self._object_call("patch", ref),
                "PATCH",
                self._path(ref),
                content=body,
                content_type="application/merge-patch+json",
            )
        )

    def logs(
        self,
        ref: ObjectRef,
        container: str,
        *,
        follow: bool,
        since: str = "",
        timestamps: bool = True,
        limit_bytes: int | None = None,
    ) -> LogStream:
        """Return a container's log. *since* is an RFC 3339 time; kubelets ignore fractions of a second.

        With *timestamps* each line begins with its time (RFC 3339, ns) and a space.
        """
        query = [
            ("container", container),
            ("follow", str(follow).lower()),
            ("timestamps", str(timestamps).lower()),
        ]
        query += _without_empty(sinceTime=since, limitBytes="" if limit_bytes is None else str(limit_bytes))
        namespace = ref.namespace or self.namespace
        call = ApiCall("get", f"{ref.resource}/log", f"{ref.name}/{container}", namespace, self.server)
        path = ref.resource.path(namespace, ref.name, "log")
        # A program may print nothing for hours; TCP keep-alive finds a dead connection.
        return LogStream(self._transport.open(ApiRequest(call, "GET", path, tuple(query))))

    def events(self, uid: str) -> builtins.list[Manifest]:
        """Return the cluster's events about the object with this uid, oldest first."""
        return sorted(self.list(EVENT, fields=f"involvedObject.uid={uid}").items, key=event_time)

    def branch(self) -> KubernetesClient:
        """Return a client of the same server; closing it ends its own calls and streams only."""
        return KubernetesClient(self._transport.branch(), self.namespace)

    def close(self) -> None:
        """End all calls and streams, branches included, and refuse new ones; from any thread."""
        self._transport.close()

    def _list(self, resource: Resource, labels: str, fields: str, namespace: str, page: int) -> Listing:
        namespace = namespace or self.namespace
        call = self._call("list", resource, namespace)
        selectors = _without_empty(labelSelector=labels, fieldSelector=fields, limit=str(page or ""))
        items: builtins.list[Manifest] = []
        onward = ""
        while True:
            query = (*selectors, *_without_empty(**{"continue": onward}))
            found = self._transport.ask(ApiRequest(call, "GET", resource.path(namespace), query))
            metadata, some = found.get("metadata"), found.get("items")
            if not isinstance(metadata, dict) or not isinstance(some or [], builtins.list):
                raise Unavailable(call, "the answer is no list. Is this a Kubernetes API server?")
            items += [_with_kind(resource, item) for item in some or [] if isinstance(item, dict)]
            before, onward = onward, str(metadata.get("continue") or "")
            if not onward or onward == before:
                return Listing(tuple(items), str(metadata.get("resourceVersion") or ""))

    def _call(self, verb: str, resource: Resource, namespace: str, name: str = "") -> ApiCall:
        return ApiCall(verb, str(resource), name, namespace if resource.namespaced else "", self.server)

    def _object_call(self, verb: str, ref: ObjectRef) -> ApiCall:
        return self._call(verb, ref.resource, ref.namespace or self.namespace, ref.name)

    def _path(self, ref: ObjectRef) -> str:
        return ref.resource.path(ref.namespace or self.namespace, ref.name)


def _without_empty(**parameters: str) -> builtins.list[tuple[str, str]]:
    """Return the parameters that are not empty."""
    return [(name, value) for name, value in parameters.items() if value]


def _with_kind(resource: Resource, item: Manifest) -> Manifest:
    """Return a list's item with its kind, which lists omit."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **item}


def _number(value: object) -> int:
    """Return the number at the beginning of a text like ``20+``."""
    found = re.match(r"\d+", str(value))
    return int(found[0]) if found else 0
