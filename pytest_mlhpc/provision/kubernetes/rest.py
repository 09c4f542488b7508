"""The calls of ``api.py`` on the official client, with objects as plain JSON: its models refuse what sites have."""

from __future__ import annotations

import builtins
import copy
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pytest_mlhpc.provision.kubernetes.api import Listing, Manifest, Propagation, Version
from pytest_mlhpc.provision.kubernetes.errors import Call, Conflict, Forbidden, Gone, NotFound, Unavailable
from pytest_mlhpc.provision.kubernetes.resources import EVENT, ObjectRef, Resource
from pytest_mlhpc.provision.kubernetes.stream import LineStream, WatchStream
from pytest_mlhpc.provision.kubernetes.transport import Request, Transport

#: Objects in one answer of a list; kubectl's and client-go's own number.
PAGE = 500
#: A watch in which nothing came for so long is taken for dead, in seconds: since 1.19 servers send a bookmark every minute.
WATCH_SILENCE_S = 200.0

_REVIEW = Resource(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)


class RestApi:
    """One server, as one account, in one namespace unless a call names another.

    Args:
        transport: reaches the server.
        namespace: for calls that name none; empty: the one of the credentials.
    """

    def __init__(self, transport: Transport, namespace: str = "") -> None:
        self._transport = transport
        self.namespace = namespace or transport.login.access.namespace

    @property
    def server(self) -> str:
        """The server's URL."""
        return self._transport.login.access.server

    @property
    def authority(self) -> str:
        """Which certificate authority the server has; empty: one of the system's."""
        return self._transport.login.access.authority

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return self._transport.login.requests

    def version(self) -> Version:
        """Return the server's version."""
        found = self._transport.ask(Request(Call("get", "version", "", "", self.server), "GET", "/version"))
        major, minor = (_number(found.get(part)) for part in ("major", "minor"))
        return Version(major, minor, str(found.get("gitVersion") or f"{major}.{minor}"))

    def versions(self, group: str) -> tuple[str, ...]:
        """Return the versions of an API group that the server has, that which it prefers first."""
        call = Call("get", f"versions of {group}", "", "", self.server)
        found = self._transport.ask(Request(call, "GET", f"/apis/{quote(group, safe='')}"))
        first = (found.get("preferredVersion") or {}).get("version")
        others = [one.get("version") for one in found.get("versions") or ()]
        return tuple(dict.fromkeys(str(one) for one in [first, *others] if one))

    def create(self, resource: Resource, manifest: Manifest, namespace: str = "") -> Manifest:
        """Create an object and return it as the server keeps it."""
        metadata = manifest.get("metadata") or {}
        namespace = namespace or str(metadata.get("namespace") or self.namespace)
        name = str(metadata.get("name") or metadata.get("generateName") or "")
        call = self._call("create", resource, namespace, name)
        return self._transport.ask(
            Request(call, "POST", resource.path(namespace), content=copy.deepcopy(manifest))
        )

    def get(self, ref: ObjectRef) -> Manifest:
        """Return an object."""
        return self._transport.ask(Request(self._of("get", ref), "GET", self._path(ref)))

    def list(self, resource: Resource, *, labels: str = "", fields: str = "", namespace: str = "") -> Listing:
        """Return all objects that match, in pages; once more in one go where the server forgets them in between."""
        try:
            return self._list(resource, labels, fields, namespace, PAGE)
        except Gone:
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
        """Return the events since *resource_version*; the server ends it after *timeout_s* seconds."""
        namespace = namespace or self.namespace
        call = self._call("watch", resource, namespace)
        query = [
            ("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", resource_version),
            ("timeoutSeconds", str(round(timeout_s))), *_given(labelSelector=labels),
        ]  # fmt: skip
        silence_s = min(WATCH_SILENCE_S, timeout_s + 30.0)
        stream = self._transport.open(Request(call, "GET", resource.path(namespace), tuple(query)), silence_s)
        return WatchStream(stream, call)

    def delete(
        self, ref: ObjectRef, *, grace_s: int | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object and what it owns; one that is gone, or another of its name, is no error."""
        options: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if ref.uid:
            options["preconditions"] = {"uid": ref.uid}
        try:
            self._transport.ask(Request(self._of("delete", ref), "DELETE", self._path(ref), content=options))
        except NotFound:
            return
        except Conflict as error:
            if not ref.uid or "uid" not in error.message.lower():
                raise

    def patch(self, ref: ObjectRef, body: Mapping[str, Any]) -> Manifest:
        """Change an object by a JSON merge patch and return it."""
        return self._transport.ask(
            Request(
                self._of("patch", ref),
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
    ) -> LineStream:
        """Return a container's log."""
        query = [
            ("container", container),
            ("follow", str(follow).lower()),
            ("timestamps", str(timestamps).lower()),
        ]
        query += _given(sinceTime=since, limitBytes="" if limit_bytes is None else str(limit_bytes))
        namespace = ref.namespace or self.namespace
        call = Call("get", f"{ref.resource}/log", f"{ref.name}/{container}", namespace, self.server)
        path = ref.resource.path(namespace, ref.name, "log")
        # A program may say nothing for hours; a dead connection is found by the keep-alive of TCP.
        return LineStream(self._transport.open(Request(call, "GET", path, tuple(query))))

    def events(self, uid: str) -> builtins.list[Manifest]:
        """Return what the cluster has told about the object with this uid, oldest first."""
        return sorted(self.list(EVENT, fields=f"involvedObject.uid={uid}").items, key=_when)

    def allowed(self, resource: Resource, verb: str, subresource: str = "") -> bool | None:
        """Return whether this account may do that in the namespace; None where the server does not tell."""
        asked = {
            "namespace": self.namespace if resource.namespaced else "", "verb": verb, "group": resource.group,
            "resource": resource.plural, "subresource": subresource,
        }  # fmt: skip
        review = {
            "apiVersion": _REVIEW.api_version, "kind": _REVIEW.kind, "spec": {"resourceAttributes": asked},
        }  # fmt: skip
        try:
            found = self.create(_REVIEW, review).get("status")
        except (Forbidden, NotFound):
            return None
        answer = found.get("allowed") if isinstance(found, dict) else None
        return answer if isinstance(answer, bool) else None

    def branch(self) -> RestApi:
        """Return this server for one thread, whose calls and streams can be ended from another."""
        return RestApi(self._transport.branch(), self.namespace)

    def close(self) -> None:
        """End calls and streams that are under way, of branches too, and take no more."""
        self._transport.close()

    def _list(self, resource: Resource, labels: str, fields: str, namespace: str, page: int) -> Listing:
        namespace = namespace or self.namespace
        call = self._call("list", resource, namespace)
        selectors = _given(labelSelector=labels, fieldSelector=fields, limit=str(page or ""))
        items: builtins.list[Manifest] = []
        onward = ""
        while True:
            query = (*selectors, *_given(**{"continue": onward}))
            found = self._transport.ask(Request(call, "GET", resource.path(namespace), query))
            metadata, some = found.get("metadata"), found.get("items")
            if not isinstance(metadata, dict) or not isinstance(some or [], builtins.list):
                raise Unavailable(call, "the answer is no list. Is this a Kubernetes API server?")
            items += [_whole(resource, item) for item in some or [] if isinstance(item, dict)]
            before, onward = onward, str(metadata.get("continue") or "")
            if not onward or onward == before:
                return Listing(tuple(items), str(metadata.get("resourceVersion") or ""))

    def _call(self, verb: str, resource: Resource, namespace: str, name: str = "") -> Call:
        return Call(verb, str(resource), name, namespace if resource.namespaced else "", self.server)

    def _of(self, verb: str, ref: ObjectRef) -> Call:
        return self._call(verb, ref.resource, ref.namespace or self.namespace, ref.name)

    def _path(self, ref: ObjectRef) -> str:
        return ref.resource.path(ref.namespace or self.namespace, ref.name)


def _given(**parameters: str) -> builtins.list[tuple[str, str]]:
    """Return the parameters that are not empty."""
    return [(name, value) for name, value in parameters.items() if value]


def _whole(resource: Resource, item: Manifest) -> Manifest:
    """Return an item of a list with what lists leave out: its kind."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **item}


def _number(value: object) -> int:
    """Return the number that a text like ``20+`` begins with."""
    found = re.match(r"\d+", str(value))
    return int(found[0]) if found else 0


def _when(event: Manifest) -> str:
    """Return an event's last time; RFC 3339 in UTC sorts as text."""
    metadata = event.get("metadata")
    created = metadata.get("creationTimestamp") if isinstance(metadata, dict) else ""
    return str(event.get("lastTimestamp") or event.get("eventTime") or created or "")
