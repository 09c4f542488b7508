"""What later sessions and ``mlhpc reap`` need to delete an allocation: its location, the notes of retained ones.

Open it to see how an allocation is found and deleted without the session that created it. Each retained allocation has a
note, ``<state>/kept/<allocation>.json``; the annotation with the same time is for people.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.ledger import Reaper
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry
from pytest_mlhpc.node.files import make_private, own_folder, read_json, read_private, replace_file
from pytest_mlhpc.provision.kubernetes.errors import Forbidden, NotFound
from pytest_mlhpc.provision.kubernetes.objects import (
    POD,
    SECRET,
    SERVICE,
    ObjectRef,
    Resource,
    label_selector,
    metadata_of,
    object_ref,
)
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, WorkloadKind

if TYPE_CHECKING:
    from pytest_mlhpc.provision.kubernetes.client import KubernetesClient


NOTES_FOLDER: Final = "kept"
LOCATION_FILE: Final = "cluster.json"
_LOCATION_SCHEMA: Final = 1

Connect: TypeAlias = "Callable[[ClusterLocation], KubernetesClient]"
#: Clients by kubeconfig, context and namespace.
Clients: TypeAlias = "dict[tuple[str, str, str], KubernetesClient]"


@dataclass(frozen=True)
class ClusterLocation:
    """The cluster of an allocation: how systems.yaml reached it, which server it was, and the workload's kind."""

    kubeconfig: str
    context: str
    namespace: str  #: never empty
    server: str
    group: str
    version: str
    kind: str
    plural: str
    authority: str = ""  #: its certificate authority: one URL may lead to several clusters, by tunnels

    def is_at(self, api: KubernetesClient) -> bool:
        """Return whether *api* is a client of this cluster."""
        known = api.authority if self.authority else ""
        return (self.server, self.authority) == (api.server, known)

    def mismatch_text(self, api: KubernetesClient) -> str:
        """Return the text for an *api* of another cluster."""
        same_url = " (with other certificates)" if api.server == self.server else ""
        return f"it is in {self.server}, and the kubeconfig leads to {api.server}{same_url} now"

    @property
    def resource(self) -> Resource:
        """The workload's kind."""
        return Resource(self.group, self.version, self.kind, self.plural)


def location_of(
    settings: KubernetesSettings, namespace: str, api: KubernetesClient, kind: WorkloadKind
) -> ClusterLocation:
    """Return the location of an allocation of *kind*."""
    group, version, name, plural, _ = astuple(kind.resource)
    place = (settings.kubeconfig, settings.context, namespace, api.server)
    return ClusterLocation(*place, group, version, name, plural, api.authority)


def settings_at(settings: KubernetesSettings, location: ClusterLocation | None) -> KubernetesSettings:
    """Return *settings* changed to lead to *location*, whatever the partition says now."""
    if location is None:
        return settings
    return replace(
        settings, kubeconfig=location.kubeconfig, context=location.context, namespace=location.namespace
    )


def location_json(location: ClusterLocation) -> str:
    """Return the content of the location file."""
    return json.dumps({"schema": _LOCATION_SCHEMA, **asdict(location)}, indent=1) + "\n"


def read_location(directory: Path) -> ClusterLocation | None:
    """Return the location in an allocation's *directory*; None if there is no file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has another schema.
    """
    try:
        found = read_json(read_private(directory / LOCATION_FILE))
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or found.pop("schema", None) != _LOCATION_SCHEMA:
        raise ValueError(f"{directory / LOCATION_FILE} is not of schema {_LOCATION_SCHEMA}")
    try:
        return ClusterLocation(**found)
    except TypeError as error:
        raise ValueError(f"{directory / LOCATION_FILE} lacks something: {error}") from None


@dataclass(frozen=True)
class OverdueDeletion:
    """The deletion of one retained allocation whose time is over; if it failed, it is retried another time."""

    allocation_id: str
    text: str
    done: bool

    def __str__(self) -> str:
        """Return one line."""
        return f"kept allocation {self.allocation_id}: {self.text}"


def note_retained(directory: Path, until_s: int) -> None:
    """Note that the allocation of *directory* (``<state>/runs/<session>/<id>``) is retained until *until_s* (Unix time).

    Raises:
        OSError: the note cannot be written.
    """
    folder = own_folder(directory.parents[2], NOTES_FOLDER)
    make_private(folder)
    note = json.dumps({"until": until_s, "directory": str(directory)}) + "\n"
    replace_file(folder / f"{directory.name}.json", note.encode(), mode=0o600)


def overdue_retained(state_dir: Path, now_s: float) -> list[str]:
    """Return one line for each allocation whose time is over at *now_s*; unreadable notes are skipped."""
    found = []
    for path in sorted(own_folder(state_dir, NOTES_FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            until, _ = _read_note(path)
            if now_s >= until:
                found.append(
                    f"kept allocation {path.stem}: it was kept until {_date(until)}: would be deleted"
                )
    return found


def delete_overdue(
    state_dir: Path,
    end: Callable[[KubernetesClient, ClusterLocation, str], str],
    connect: Connect,
    now_s: float,
) -> Iterator[OverdueDeletion]:
    """Let *end* delete each allocation whose time is over at *now_s*.

    Two sessions may do so at once: an allocation that is gone is no error.
    """
    apis: Clients = {}
    try:
        for path in sorted(own_folder(state_dir, NOTES_FOLDER).glob("*.json")):
            try:
                until, directory = _read_note(path)
                if now_s >= until:
                    text = _delete_noted(directory, apis, end, connect)
                    path.unlink(missing_ok=True)
                    yield OverdueDeletion(path.stem, f"{text}; it was kept until {_date(until)}", done=True)
            except FileNotFoundError:
                continue  # another session was faster
            except (MlhpcError, OSError, ValueError) as error:
                yield OverdueDeletion(path.stem, f"not deleted, stays noted in {path}: {error}", done=False)
    finally:
        for api in apis.values():
            api.close()


def _delete_noted(
    directory: Path,
    apis: Clients,
    end: Callable[[KubernetesClient, ClusterLocation, str], str],
    connect: Connect,
) -> str:
    location = read_location(directory)
    if location is None:
        raise MlhpcError(f"{directory} does not say in which cluster it is")
    return end(_client_at(location, apis, connect), location, directory.name)


def _client_at(
    location: ClusterLocation, clients: Clients, connect: Connect, advice: str = ""
) -> KubernetesClient:
    """Return the client for *location*, made once.

    Raises:
        MlhpcError: it leads to another cluster, with *advice*.
    """
    key = (location.kubeconfig, location.context, location.namespace)
    if key not in clients:
        clients[key] = connect(location)
    if not location.is_at(clients[key]):
        raise MlhpcError(location.mismatch_text(clients[key]) + advice)
    return clients[key]


def _read_note(path: Path) -> tuple[int, Path]:
    found = read_json(read_private(path))
    try:
        return int(found["until"]), Path(found["directory"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is no note of ours ({error!r})") from error


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def kubernetes_reaper(connect: Connect) -> Reaper:
    """Return the function that deletes one entry's allocation. Connections are shared.

    A server that does not answer leaves its entries as they are.
    """
    apis: Clients = {}

    def reaper(entry: LedgerEntry) -> str:
        try:
            location = read_location(Path(entry.directory))
        except (OSError, ValueError) as error:
            raise MlhpcError(f"its cluster is unknown: {error}") from error
        if location is None:
            return _never_created(entry)
        api = _client_at(location, apis, connect, "; run `mlhpc reap` with the right one")
        return delete_allocation(api, location, entry.id)

    return reaper


def find_objects(
    api: KubernetesClient,
    resources: Iterable[Resource],
    allocation_id: str,
    namespace: str,
    optional: Resource | None = None,
) -> Iterator[tuple[ObjectRef, bool]]:
    """Yield an allocation's objects, and whether each is being deleted. The kinds are listed one after the other.

    Without a right on the *optional* kind none was created.

    Raises:
        KubernetesError: the server does not answer, or refuses.
    """
    labels = label_selector(allocation=allocation_id)
    for resource in dict.fromkeys(resources):
        try:
            items = api.list(resource, labels=labels, namespace=namespace).items
        except NotFound:  # the server lacks the kind (now), so it has no such objects
            continue
        except Forbidden:
            if resource is not optional:
                raise
            continue
        for item in items:
            yield object_ref(resource, item), bool(metadata_of(item).get("deletionTimestamp"))


def delete_allocation(api: KubernetesClient, location: ClusterLocation, allocation_id: str) -> str:
    """Delete all objects of an allocation and return what was deleted; the workload first, as it would replace pods.

    Raises:
        KubernetesError: the server does not answer, or refuses.
    """
    deleted: list[ObjectRef] = []
    kinds = (location.resource, SERVICE, SECRET, POD)
    for ref, is_going in find_objects(api, kinds, allocation_id, location.namespace, optional=SERVICE):
        if not is_going:
            api.delete(ref, propagation="Background")
            deleted.append(ref)
    if not deleted:
        return f"nothing to delete: {location.server} has no objects of it"
    return "deleted " + ", ".join(map(str, deleted))


def _never_created(entry: LedgerEntry) -> str:
    folder = Path(entry.directory)
    if entry.native_id or not (folder.is_dir() or folder.parent.is_dir() or folder.parent.parent.is_dir()):
        raise MlhpcError(
            f"its cluster is unknown: {folder} cannot be read here; run `mlhpc reap` on a machine that can read it"
        )
    return "nothing to delete: its session was killed before it created anything"


def location_connector(environ: Mapping[str, str]) -> Connect:
    """Return the function that connects to a location; the official client is imported when it is called."""

    def connect_to(location: ClusterLocation) -> KubernetesClient:
        from pytest_mlhpc.provision.kubernetes.connect import connect

        return connect(
            kubeconfig=location.kubeconfig,
            context=location.context,
            namespace=location.namespace,
            environ=environ,
        )

    return connect_to


def is_reachable(location: ClusterLocation, environ: Mapping[str, str]) -> bool:
    """Return whether the kubeconfig still leads to *location*; nothing is sent to a server.

    Raises:
        UsageError: it leads nowhere.
    """
    api = location_connector(environ)(location)
    try:
        return location.is_at(api)
    finally:
        api.close()
