"""Watch the objects of one kind (list, then watch), and the clusters of one partition with their watches.

Open it to see how changes in the cluster are noticed without asking for single objects.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_mlhpc.jobs.ledger_entry import user_name
from pytest_mlhpc.provision.kubernetes.client import KubernetesClient, Stream, WatchEvent
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.errors import (
    FIRST_DELAY_S,
    ApiCall,
    Expired,
    KubernetesError,
    Unavailable,
    retry_delay,
)
from pytest_mlhpc.provision.kubernetes.objects import (
    POD,
    Manifest,
    ObjectRef,
    Resource,
    label_safe,
    label_selector,
    metadata_of,
    object_ref,
)
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, WorkloadKind

#: Range of a watch's random duration, in seconds, which spreads the load; as in client-go's reflector.
WATCH_S = (300.0, 600.0)
#: A watch that lasted so long is followed by the next one without a delay, in seconds.
STABLE_S = 5.0


@dataclass(frozen=True)
class ObjectChanged:
    """An object is new or has changed; ``object`` is its current state."""

    resource: Resource
    object: Manifest
    source: str = ""


@dataclass(frozen=True)
class ObjectDeleted:
    """An object was deleted. ``object`` is its last state from the server, else the last known one."""

    resource: Resource
    ref: ObjectRef
    object: Manifest
    source: str = ""


@dataclass(frozen=True)
class ListSynced:
    """All existing objects were reported; changes follow. Repeated after each new list."""

    source: str = ""


@dataclass(frozen=True)
class WatchFailing:
    """The watch fails since ``since`` (``time.monotonic()``); reported at each failure. It is retried."""

    error: KubernetesError
    since: float
    source: str = ""


@dataclass(frozen=True)
class WatchRecovered:
    """The watch works again; missed changes were reported, or follow."""

    source: str = ""


WatchReport = ObjectChanged | ObjectDeleted | ListSynced | WatchFailing | WatchRecovered


class ObjectWatcher:
    """One thread that watches one kind, from :meth:`start` to :meth:`close`.

    Args:
        api: the server; the watcher uses a branch of it, so that closing ends its calls.
        resource: the kind.
        labels: selector; empty: all objects of the namespace.
        put: receives each report in this thread; must not block.
        namespace: empty: that of *api*.
        source: identifies the watch in its reports; empty: namespace and kind.
    """

    def __init__(
        self,
        api: KubernetesClient,
        resource: Resource,
        labels: str,
        put: Callable[[WatchReport], object],
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
        self._known: dict[str, Manifest] = {}  #: uid -> last reported state
        self._version = ""  #: resource version of the next watch; empty: list first
        self._failures = 0
        self._since: float | None = None  #: since when the watch fails
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {self.source}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for it; any number of times, from any other thread."""
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
            except Expired as error:
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
            self._deleted(uid)
        for item in listing.items:
            self._changed(item)
        self._version = listing.resource_version
        self._put(ListSynced(self.source))

    def _watch(self) -> None:
        """Open one watch and report its events until it ends. A watch that breaks early is a failure."""
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
            self._recovered()
            came, broke = self._report_events(watch)
        finally:
            watch.close()
        if came or time.monotonic() - began >= STABLE_S:
            self._failures = 0
            if time.monotonic() - began < STABLE_S:
                self._stop.wait(FIRST_DELAY_S)  # do not hammer a server that cuts each watch
        elif not self._stop.is_set():
            raise broke or Unavailable(self._call(), "the server ended the watch at once")

    def _report_events(self, watch: Stream[WatchEvent]) -> tuple[bool, Unavailable | None]:
        """Report a watch's events until it ends; return whether there were any, and the error that broke it."""
        came = False
        try:
            for event in watch:
                came = True
                if event.type in {"ADDED", "MODIFIED"}:
                    self._changed(event.object)
                elif event.type == "DELETED":
                    self._deleted(_uid(event.object), event.object)
                self._version = _resource_version(event.object) or self._version
        except Unavailable as error:
            return came, error
        return came, None

    def _call(self) -> ApiCall:
        return ApiCall("watch", str(self._resource), "", self._namespace, self._api.server)

    def _changed(self, content: Manifest) -> None:
        uid = _uid(content)
        if not uid:
            return  # no object
        before = self._known.get(uid)
        self._known[uid] = content
        if (
            before is None
            or _resource_version(before) != _resource_version(content)
            or not _resource_version(content)
        ):
            self._put(ObjectChanged(self._resource, content, self.source))

    def _deleted(self, uid: str, last: Manifest | None = None) -> None:
        known = self._known.pop(uid, None)
        content = last or known
        if content is not None:
            self._put(
                ObjectDeleted(self._resource, object_ref(self._resource, content), content, self.source)
            )

    def _failed(self, error: KubernetesError, *, quiet: bool = False) -> None:
        """Report the error, unless a new list is all that is needed, and wait before the next attempt."""
        if self._stop.is_set():
            return
        self._failures += 1
        if quiet:
            return
        self._since = time.monotonic() if self._since is None else self._since
        self._put(WatchFailing(error, self._since, self.source))
        self._stop.wait(retry_delay(self._failures, error))

    def _recovered(self) -> None:
        if self._since is not None:
            self._since = None
            self._put(WatchRecovered(self.source))


def _uid(content: Manifest) -> str:
    return str(metadata_of(content).get("uid") or "")


def _resource_version(content: Manifest) -> str:
    return str(metadata_of(content).get("resourceVersion") or "")


class Clusters:
    """The API servers of one partition, of which tests may choose other contexts or namespaces, and their watches.

    Args:
        environ: names kubeconfig and credentials.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._apis: dict[tuple[str, str, str], KubernetesClient] = {}
        self._watchers: dict[tuple[str, str, Resource], ObjectWatcher] = {}
        self._lock = threading.Lock()

    def reach(self, settings: KubernetesSettings) -> KubernetesClient:
        """Return the client for *settings*; each is made once.

        Raises:
            UsageError: there is no such context, or no credentials.
        """
        key = (settings.kubeconfig, settings.context, settings.namespace)
        with self._lock:
            if key not in self._apis:
                self._apis[key] = connect(
                    kubeconfig=settings.kubeconfig,
                    context=settings.context,
                    namespace=settings.namespace,
                    environ=self._environ,
                )
            return self._apis[key]

    def watch(
        self, settings: KubernetesSettings, kind: WorkloadKind, put: Callable[[object], None]
    ) -> frozenset[str]:
        """Watch this user's pods and workloads of *kind* in the namespace; each watch is started once.

        Returns the sources of the watches, which identify them in reports.
        """
        api = self.reach(settings)
        sources = set()
        for resource in dict.fromkeys((POD, kind.resource)):
            key = (api.server, settings.namespace or api.namespace, resource)
            if key not in self._watchers:
                labels = label_selector(owner=label_safe(user_name()) or "unknown")
                source = f"{api.server} {key[1]}/{resource}"
                watcher = ObjectWatcher(api, resource, labels, put, namespace=key[1], source=source)
                self._watchers[key] = watcher
                watcher.start()
            sources.add(self._watchers[key].source)
        return frozenset(sources)

    def close(self) -> None:
        """End all watches and connections."""
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers.clear()
        with self._lock:
            apis = list(self._apis.values())
            self._apis.clear()
        for api in apis:
            api.close()
