"""Ending what dead sessions have left in a cluster: found by label, deleted with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.reaping import Reaper
from pytest_mlhpc.jobs.submitted import Submitted
from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.errors import Forbidden, NotFound
from pytest_mlhpc.provision.kubernetes.labels import selector
from pytest_mlhpc.provision.kubernetes.resources import CONFIG_MAP, POD, SERVICE, ObjectRef, ref_of
from pytest_mlhpc.provision.kubernetes.where import Where, read

Connect = Callable[[Where], KubernetesApi]


def kubernetes_reaper(entries: Sequence[Submitted], connect: Connect) -> Reaper:
    """Return what ends one entry. Connections are shared; a server that does not answer leaves its entries as they are."""
    del entries  # nothing can be asked for several namespaces at once
    apis: dict[tuple[str, str, str], KubernetesApi] = {}

    def reaper(entry: Submitted) -> str:
        try:
            where = read(Path(entry.directory))
        except (OSError, ValueError) as error:
            raise MlhpcError(f"nobody knows in which cluster it is: {error}") from error
        if where is None:
            return _never_made(entry)
        key = (where.kubeconfig, where.context, where.namespace)
        if key not in apis:
            apis[key] = connect(where)
        api = apis[key]
        if not where.is_at(api):
            raise MlhpcError(f"{where.elsewhere(api)}; run `mlhpc reap` with the right one")
        return end(api, where, entry.id)

    return reaper


def end(api: KubernetesApi, where: Where, allocation_id: str) -> str:
    """Delete everything of an allocation and say what that was; the workload first, which would make its pods anew.

    Raises:
        KubernetesError: the server does not answer, or refuses.
    """
    deleted: list[ObjectRef] = []
    for resource in dict.fromkeys((where.resource, SERVICE, CONFIG_MAP, POD)):
        try:
            found = api.list(resource, labels=selector(allocation=allocation_id), namespace=where.namespace)
        except NotFound:  # a kind that the server has not (any more): nothing can be of it
            continue
        except Forbidden:
            if resource is not SERVICE:
                raise
            continue  # whoever has no right on Services has made none
        for item in found.items:
            ref = ref_of(resource, item)
            if not (item.get("metadata") or {}).get("deletionTimestamp"):
                api.delete(ref, propagation="Background")
                deleted.append(ref)
    if not deleted:
        return f"nothing to delete: {where.server} has nothing of it any more"
    return "deleted " + ", ".join(map(str, deleted))


def _never_made(entry: Submitted) -> str:
    folder = Path(entry.directory)
    if entry.native_id or not (folder.is_dir() or folder.parent.is_dir() or folder.parent.parent.is_dir()):
        raise MlhpcError(
            f"nobody knows in which cluster it is: {folder} cannot be seen here; run `mlhpc reap` where it can"
        )
    return "nothing to delete: its session was killed before it created anything"


def connector(environ: Mapping[str, str]) -> Connect:
    """Return what reaches the server of an allocation; the client is imported once there is something to end."""

    def connect_to(where: Where) -> KubernetesApi:
        from pytest_mlhpc.provision.kubernetes.connect import connect

        return connect(
            kubeconfig=where.kubeconfig, context=where.context, namespace=where.namespace, environ=environ
        )

    return connect_to


def leads_to(where: Where, environ: Mapping[str, str]) -> bool:
    """Whether the kubeconfig still leads to *where*; nothing is asked of a server.

    Raises:
        UsageError: it leads nowhere.
    """
    from pytest_mlhpc.provision.kubernetes.connect import connect

    api = connect(kubeconfig=where.kubeconfig, context=where.context, namespace="", environ=environ)
    try:
        return where.is_at(api)
    finally:
        api.close()


def prepare(environ: Mapping[str, str]) -> Callable[[Sequence[Submitted]], Reaper]:
    """Return the maker of reapers."""
    return lambda entries: kubernetes_reaper(entries, connector(environ))
