"""What we ask of a Kubernetes server: one narrow protocol, served by ``rest.py``; objects are plain dicts as in JSON.

All calls may come from any thread. Each takes at most :data:`CALL_LIMIT_S`; streams (watch, logs) take that long to
begin and then last, until the server or :meth:`close` from any thread ends them.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pytest_mlhpc.provision.kubernetes.resources import ObjectRef, Resource

#: Longest time that one call may take, in seconds; an API server gives up a request of its own after 60 s.
CALL_LIMIT_S = 30.0

Manifest = dict[str, Any]

#: What becomes of an object's dependants when it is deleted (metav1.DeleteOptions).
Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True)
class Version:
    """A server's version. ``minor`` is a number also where the server says ``20+``; ``text`` as it says, v1.20.2."""

    major: int
    minor: int
    text: str


@dataclass(frozen=True)
class Listing:
    """All objects that match, and the place in the server's history from which a watch goes on."""

    items: tuple[Manifest, ...]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """One event: ADDED, MODIFIED, DELETED or BOOKMARK. ERROR is raised instead, as an error of ours."""

    type: str
    object: Manifest


class Watch(Protocol):
    """Events as they come. Iterating ends when the server ends the watch, or after :meth:`close`.

    Raises (while iterating):
        Gone: the place in the history is forgotten.
        Unavailable: the connection broke, or what came is no watch event.
        KubernetesError: what else the server says by an ERROR event.
    """

    def __iter__(self) -> Iterator[WatchEvent]:
        """Return the events, waiting for each."""

    def close(self) -> None:
        """End it; from any thread, any number of times. Who iterates is woken at once."""


class LogStream(Protocol):
    """Lines of one container's log, as bytes without their newline, however long up to a limit that cuts them.

    Iterating ends when the server ends the log properly, or after :meth:`close`. A last line without newline is left in
    ``rest``: after a cut it is incomplete.

    Raises (while iterating):
        Unavailable: the connection broke.
    """

    rest: bytes

    def __iter__(self) -> Iterator[bytes]:
        """Return the lines, waiting for each."""

    def close(self) -> None:
        """End it; from any thread, any number of times. Who iterates is woken at once."""


class KubernetesApi(Protocol):
    """The calls. ``namespace`` of a call: empty means the one of this object.

    Raises (every method):
        KubernetesError: one of errors.py; Unavailable where nobody answered.
    """

    namespace: str

    @property
    def server(self) -> str:
        """The server's URL."""

    @property
    def authority(self) -> str:
        """Which certificate authority the server has, a SHA-256; empty: one of the system's."""

    @property
    def requests(self) -> int:
        """How many requests were sent so far, branches included."""

    def version(self) -> Version:
        """Return the server's version."""

    def versions(self, group: str) -> tuple[str, ...]:
        """Return the versions of an API group that the server has, that which it prefers first; NotFound: it has no such group."""

    def create(self, resource: Resource, manifest: Manifest, namespace: str = "") -> Manifest:
        """Create an object and return it as the server keeps it. The manifest is not changed."""

    def get(self, ref: ObjectRef) -> Manifest:
        """Return an object; NotFound."""

    def list(self, resource: Resource, *, labels: str = "", fields: str = "", namespace: str = "") -> Listing:
        """Return all objects that match the selectors, in as many requests as it takes (500 objects each)."""

    def watch(
        self,
        resource: Resource,
        *,
        labels: str = "",
        resource_version: str,
        timeout_s: float,
        namespace: str = "",
    ) -> Watch:
        """Return the events since *resource_version*, for *timeout_s* seconds: then the server ends it."""

    def delete(
        self, ref: ObjectRef, *, grace_s: int | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object and what it owns. One that is gone, or another of its name (uid), is no error."""

    def patch(self, ref: ObjectRef, body: Mapping[str, Any]) -> Manifest:
        """Change an object by a JSON merge patch (RFC 7386) and return it."""

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
        """Return a container's log. ``since`` is an RFC 3339 time, of which kubelets read whole seconds alone.

        With ``timestamps`` each line begins with its time (RFC 3339, ns) and a space.
        """

    def events(self, uid: str) -> builtins.list[Manifest]:
        """Return what the cluster has told about the object with this uid, oldest first."""

    def allowed(self, resource: Resource, verb: str, subresource: str = "") -> bool | None:
        """Return whether this account may do that in the namespace; None where the server does not tell."""

    def branch(self) -> KubernetesApi:
        """Return this server once more: :meth:`close` of the branch ends what is under way in it, and nothing else."""

    def close(self) -> None:
        """End calls and streams that are under way, of branches too, from any thread. Nothing can be asked any more."""
