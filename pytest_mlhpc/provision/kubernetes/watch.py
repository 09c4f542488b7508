"""Following all objects of one kind: list, then watch from there, for as long as it takes; no object is asked for again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pytest_mlhpc.provision.kubernetes.api import KubernetesApi, Manifest, Watch
from pytest_mlhpc.provision.kubernetes.errors import Call, Gone, KubernetesError, Unavailable
from pytest_mlhpc.provision.kubernetes.pauses import FIRST_S, pause_after
from pytest_mlhpc.provision.kubernetes.resources import ObjectRef, Resource, ref_of

#: How long the server is asked to keep a watch open, in seconds, chosen at random so that no herd comes back at once;
#: client-go's reflector asks for 5 to 10 minutes.
WATCH_S = (300.0, 600.0)
#: A watch that lasted so long was a good one: it is followed by the next without a pause, in seconds.
GOOD_S = 5.0


@dataclass(frozen=True)
class Seen:
    """An object is new or has changed; ``object`` is as the server has it now."""

    resource: Resource
    object: Manifest
    source: str = ""


@dataclass(frozen=True)
class Vanished:
    """An object was deleted. ``object`` is its last state where the server told it, else as it was last seen."""

    resource: Resource
    ref: ObjectRef
    object: Manifest
    source: str = ""


@dataclass(frozen=True)
class Synced:
    """All that there is has been told; changes follow. Comes again after each new list."""

    source: str = ""


@dataclass(frozen=True)
class Trouble:
    """Nothing can be seen, since then (``time.monotonic()``); told at every failing try. It is tried again."""

    error: KubernetesError
    since: float
    source: str = ""


@dataclass(frozen=True)
class Healed:
    """The trouble is over; what was missed has been told, or follows."""

    source: str = ""


Report = Seen | Vanished | Synced | Trouble | Healed


class Watcher:
    """One thread for one kind, begun by :meth:`start` and ended by :meth:`close`.

    Args:
        api: the server; a branch of it is used, so that closing ends what is under way.
        resource: the kind.
        labels: selector; empty: all objects of the namespace.
        put: takes each report, from this thread; must not wait.
        namespace: empty: that of *api*.
        source: by what the reports say who told them; empty: namespace and kind.
    """

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        labels: str,
        put: Callable[[Report], object],
        *,
        namespace: str = "",
        source: str = "",
    ) -> None:
        self._api = api.branch()
        self._resource = resource
        self._labels = labels
        self._put = put
        self._namespace = namespace or api.namespace
        self.source = source or f"{self._namespace}/{resource}"
        self._known: dict[str, Manifest] = {}  #: uid -> as last told
        self._version = ""  #: from where the next watch goes on; empty: a list is needed
        self._failures = 0
        self._since: float | None = None  #: since when there is trouble
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {self.source}")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End it and wait for the thread; any number of times, from any thread but its own."""
        self._stop.set()
        self._api.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
            except Gone as error:
                self._version = ""
                self._failed(error, quiet=self._failures == 0)
            except KubernetesError as error:
                self._failed(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, silence would be the worst answer
                self._version = ""
                self._failed(Unavailable(self._call(), f"{type(error).__name__}: {error}"))

    def _list(self) -> None:
        listing = self._api.list(self._resource, labels=self._labels, namespace=self._namespace)
        there = {_uid(item) for item in listing.items}
        for uid in [uid for uid in self._known if uid not in there]:
            self._vanished(uid)
        for item in listing.items:
            self._seen(item)
        self._version = listing.resource_version
        self._put(Synced(self.source))

    def _watch(self) -> None:
        """Open one watch and tell its events until it ends; one that breaks early is a failure."""
        began = time.monotonic()
        timeout_s = random.uniform(*WATCH_S)  # noqa: S311 - spreads load, guards nothing
        watch = self._api.watch(
            self._resource,
            labels=self._labels,
            resource_version=self._version,
            timeout_s=timeout_s,
            namespace=self._namespace,
        )
        try:
            self._healed()
            came, broke = self._tell(watch)
        finally:
            watch.close()
        if came or time.monotonic() - began >= GOOD_S:
            self._failures = 0
            if time.monotonic() - began < GOOD_S:
                self._stop.wait(FIRST_S)  # whoever cuts watches all the time is not to be asked all the time
        elif not self._stop.is_set():
            raise broke or Unavailable(self._call(), "the server ended the watch at once")

    def _tell(self, watch: Watch) -> tuple[bool, Unavailable | None]:
        """Tell a watch's events until it ends; return whether any came, and why it broke if it did."""
        came = False
        try:
            for event in watch:
                came = True
                if event.type in {"ADDED", "MODIFIED"}:
                    self._seen(event.object)
                elif event.type == "DELETED":
                    self._vanished(_uid(event.object), event.object)
                self._version = _version(event.object) or self._version
        except Unavailable as error:
            return came, error
        return came, None

    def _call(self) -> Call:
        return Call("watch", str(self._resource), "", self._namespace, self._api.server)

    def _seen(self, content: Manifest) -> None:
        uid = _uid(content)
        if not uid:
            return  # no object
        before = self._known.get(uid)
        self._known[uid] = content
        if before is None or _version(before) != _version(content) or not _version(content):
            self._put(Seen(self._resource, content, self.source))

    def _vanished(self, uid: str, last: Manifest | None = None) -> None:
        known = self._known.pop(uid, None)
        content = last or known
        if content is not None:
            self._put(Vanished(self._resource, ref_of(self._resource, content), content, self.source))

    def _failed(self, error: KubernetesError, *, quiet: bool = False) -> None:
        """Tell the trouble, unless it is but a reason to list anew, and wait before the next try."""
        if self._stop.is_set():
            return
        self._failures += 1
        if quiet:
            return
        self._since = time.monotonic() if self._since is None else self._since
        self._put(Trouble(error, self._since, self.source))
        self._stop.wait(pause_after(self._failures, error))

    def _healed(self) -> None:
        if self._since is not None:
            self._since = None
            self._put(Healed(self.source))


def _uid(content: Manifest) -> str:
    metadata = content.get("metadata")
    return str(metadata.get("uid") or "") if isinstance(metadata, dict) else ""


def _version(content: Manifest) -> str:
    metadata = content.get("metadata")
    return str(metadata.get("resourceVersion") or "") if isinstance(metadata, dict) else ""
