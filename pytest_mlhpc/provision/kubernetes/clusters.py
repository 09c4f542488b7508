"""The API servers of one partition - a test may name another context or namespace - with a watch for each kind of object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

from pytest_mlhpc.jobs.submitted import user_name
from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.errors import NotFound
from pytest_mlhpc.provision.kubernetes.kinds import Kind
from pytest_mlhpc.provision.kubernetes.labels import label_safe, selector
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.resources import CONFIG_MAP, POD, SERVICE, ObjectRef, Resource
from pytest_mlhpc.provision.kubernetes.watch import Watcher

#: What an allocation may consist of beside its workload.
LESSER: Final = (CONFIG_MAP, SERVICE)


class Clusters:
    """Connections and watches, each made once.

    Args:
        environ: where kubeconfig and credentials are found.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._apis: dict[tuple[str, str, str], KubernetesApi] = {}
        self._watchers: dict[tuple[str, str, Resource], Watcher] = {}
        self._lock = threading.Lock()

    def reach(self, settings: KubernetesSettings) -> KubernetesApi:
        """Return the server that *settings* lead to.

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
        self, settings: KubernetesSettings, kind: Kind, put: Callable[[object], None]
    ) -> frozenset[str]:
        """Watch pods, and the workload's own kind, of this user in the namespace; once however often it is asked for.

        Returns by which sources the watches' reports can be told.
        """
        api = self.reach(settings)
        sources = set()
        for resource in dict.fromkeys((POD, kind.resource)):
            key = (api.server, settings.namespace or api.namespace, resource)
            if key not in self._watchers:
                labels = selector(owner=label_safe(user_name()) or "unknown")
                source = f"{api.server} {key[1]}/{resource}"
                watcher = Watcher(api, resource, labels, put, namespace=key[1], source=source)
                self._watchers[key] = watcher
                watcher.start()
            sources.add(self._watchers[key].source)
        return frozenset(sources)

    def objects_of(self, allocation: Allocation) -> list[ObjectRef]:
        """Ask the server for everything of an allocation; only where that may differ from what was seen.

        Raises:
            KubernetesError: it does not tell.
        """
        found: list[ObjectRef] = []
        # Whoever asks for no Service needs no right on Services.
        lesser = LESSER if allocation.settings.service else (CONFIG_MAP,)
        for resource in dict.fromkeys((allocation.kind.resource, *lesser)):
            try:
                listing = allocation.api.list(
                    resource, labels=selector(allocation=allocation.handle.id), namespace=allocation.namespace
                )
            except NotFound:  # a kind that the server has not: nothing can be of it
                continue
            for item in listing.items:
                meta = item["metadata"]
                found.append(ObjectRef(resource, meta["namespace"], meta["name"], meta["uid"]))
        return found

    def close(self) -> None:
        """End all watches, and connections."""
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers.clear()
        with self._lock:
            apis = list(self._apis.values())
            self._apis.clear()
        for api in apis:
            api.close()
