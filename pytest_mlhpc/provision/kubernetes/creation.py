"""Create an allocation's objects, each once, and write the files beside its plan.

Open it to see what happens if a creation gets no answer, is refused, or exceeds a quota.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.ledger_entry import user_name
from pytest_mlhpc.jobs.software import POD_FILES_BYTES
from pytest_mlhpc.node.files import outcome_of, read_json, read_private, unwritten
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import copy_files, regular_files, size_of, staged_sets
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation
from pytest_mlhpc.provision.kubernetes.errors import (
    Conflict,
    KubernetesError,
    QuotaExceeded,
    Unavailable,
    provision_error,
)
from pytest_mlhpc.provision.kubernetes.kinds import WorkloadKind
from pytest_mlhpc.provision.kubernetes.manifest import render
from pytest_mlhpc.provision.kubernetes.objects import (
    ALLOCATION,
    SECRET,
    SERVICE,
    Identity,
    ObjectRef,
    Resource,
    dropped_fields,
)
from pytest_mlhpc.provision.kubernetes.reap import LOCATION_FILE, location_json, location_of
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.verdict import MUST_SPECIFY
from pytest_mlhpc.provision.payload import (
    cannot_write,
    environment_of,
    make_directory,
    no_room,
    write_private,
)

#: Delays before a creation is retried if the server, or one of its webhooks, does not answer, in seconds.
CREATE_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)

#: Delay before a creation is retried if a quota is used up, in seconds.
QUOTA_RETRY_S: Final = 30.0


@dataclass(frozen=True)
class AllocationManifests:
    """Manifests in the order of creation, each with its role: secret, service or workload."""

    kind: WorkloadKind
    manifests: tuple[tuple[str, Mapping[str, Any]], ...]


class ManifestMaker:
    """Renders the manifests of allocations.

    Args:
        partition: of systems.yaml.
        payload: sha256 -> the zip.
        session_id: of this session, for labels.
    """

    def __init__(self, partition: Partition, payload: Callable[[str], Path], session_id: str) -> None:
        self._partition = partition
        self._payload = payload
        self._identity = Identity(session=session_id, owner=user_name())

    def make(self, allocation: PodAllocation) -> AllocationManifests:
        """Return the manifests of *allocation*, and write plan, location and manifests into its directory.

        Raises:
            ProvisionError: ``disk_full`` or ``not_writable``; ``rejected``: the payload is gone, or rendering failed.
        """
        settings, plan = allocation.settings, allocation.plan
        try:
            zipped = read_private(self._payload(plan.payload_sha256))
        except OSError as error:
            text = f"cannot read the payload {error.filename}: {error.strerror}"
            raise ProvisionError(outcome_of(error, "rejected"), text) from error
        excluded = tuple(dict.fromkeys((*plan.excluded_nodes, *allocation.excluded)))
        environment = environment_of(plan, self._partition)
        plan = _on_volume(plan, settings)
        try:
            rendered = render(
                settings,
                self._partition,
                environment,
                replace(plan, excluded_nodes=excluded),
                zipped,
                self._identity,
                allocation.round,
            )
        except UsageError as error:
            raise ProvisionError("rejected", str(error)) from error
        manifests = [("secret", one) for one in (rendered.secret, rendered.files) if one is not None]
        manifests += [("service", rendered.service)] if rendered.service is not None else []
        manifests += [("workload", manifest) for manifest in rendered.workloads]
        made = AllocationManifests(rendered.kind, tuple(manifests))
        location = location_of(settings, allocation.namespace, allocation.api, rendered.kind)
        _write_files(plan, made, location_json(location))
        return made


#: Folder of a volume in which this package puts files of tests, and the age of a set there from which on no allocation can need
#: it any more, in seconds: its time is renewed by each allocation that uses it.
FILES_FOLDER, OLD_S = "mlhpc-files", 7 * 86400.0


def _on_volume(plan: Plan, settings: KubernetesSettings) -> Plan:
    """Return *plan* with its sets of files on the volume that this machine sees, where they are too large for a Secret.

    Raises:
        ProvisionError: one cannot be read, or the volume cannot be written.
    """
    sets = staged_sets(plan)
    volume = next((one for one in settings.volumes if one.here), None)
    if volume is None or not settings.agent:
        return plan
    root = Path(volume.here) / FILES_FOLDER
    try:
        if sum(map(size_of, sets.values())) <= POD_FILES_BYTES:
            return plan
        root.mkdir(mode=0o755, exist_ok=True)
        _remove_old(root)
        found = {
            name: f"{volume.mount}/{FILES_FOLDER}/{_staged(files, root)}" for name, files in sets.items()
        }
    except OSError as error:
        raise cannot_write(error, root) from error
    return replace(plan, on_volume=found)


def _staged(files: Mapping[str, str], root: Path) -> str:
    """Return the name of the folder below *root* that has *files*: it is made unless equal ones lie there."""
    digest = hashlib.sha256()
    for place, source in sorted(files.items()):
        for path, inside in regular_files(Path(source)):
            status = path.stat()
            known = [
                place,
                inside,
                str(path),
                status.st_size,
                status.st_mtime_ns,
                status.st_ino,
                status.st_mode,
            ]
            digest.update(json.dumps(known).encode("utf-8", "surrogateescape"))
    name = digest.hexdigest()[:24]
    if not (root / name).is_dir():
        folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=root))
        try:
            copy_files(files, folder)
            folder.chmod(0o755)  # pods may run as another user
            with contextlib.suppress(OSError):  # another session was first
                folder.rename(root / name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    os.utime(root / name)
    return name


def _remove_old(root: Path) -> None:
    for folder in root.iterdir():
        with contextlib.suppress(OSError):  # another user's, or another session removes it
            if time.time() - folder.stat().st_mtime > OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def _write_files(plan: Plan, made: AllocationManifests, location: str) -> None:
    """Write plan, location and manifests beside the logs, for later sessions and for people. Secrets are left out."""
    directory = Path(plan.directory)
    shown: list[Any] = []
    for _, manifest in made.manifests:
        shown.append({key: value for key, value in manifest.items() if key != "data"})
    try:
        make_directory(directory, "pods", *(run.run_id for run in plan.runs))
        if not (directory / "plan.json").exists():
            (directory / LOCATION_FILE).unlink(missing_ok=True)
            # Before the plan: with a plan there is always the location of its pods.
            write_private(directory / LOCATION_FILE, location)
            write_private(directory / "plan.json", json.dumps(to_json(plan)))
        (directory / "manifests.json").unlink(missing_ok=True)
        listed = {"apiVersion": "v1", "kind": "List", "items": shown}
        write_private(directory / "manifests.json", json.dumps(listed, indent=1) + os.linesep)
    except OSError as error:
        raise cannot_write(error, directory) from error


class ObjectCreator:
    """Creates the objects of allocations.

    Args:
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: allocation's id -> uid -> manifest of a created workload
        self._made: dict[str, dict[str, Mapping[str, Any]]] = {}
        #: allocation's id -> name of a patience -> since when it waits
        self._since: dict[str, dict[str, float]] = {}

    def create(self, allocation: PodAllocation) -> None:
        """Create what is missing. Without an answer, ``retry_at`` is set.

        Raises:
            ProvisionError: refused. ``allocation.objects`` has what was created, and has to be deleted.
        """
        try:
            self._create(allocation)
        except ProvisionError:
            self._forget(allocation)
            raise

    def _create(self, allocation: PodAllocation) -> None:
        made = self._made.setdefault(allocation.handle.id, {})
        while allocation.to_create:
            role, manifest = allocation.to_create[0]
            resource = _role_resource(role, allocation)
            what = f"{resource.kind} {_manifest_name(manifest)}"
            try:
                stored = self._create_one(allocation, resource, manifest)
            except Unavailable as error:
                self._retry_later(allocation, error)
                return
            except QuotaExceeded as error:
                self._since.get(allocation.handle.id, {}).pop("unknown", None)
                if MUST_SPECIFY in error.message:
                    raise provision_error(error) from error
                self._wait_unless_overdue(allocation, error, "quota", QUOTA_RETRY_S)
                self._delete_created(allocation)
                return
            except KubernetesError as error:
                raise provision_error(error) from error
            allocation.to_create.pop(0)
            allocation.failed_creations = 0
            self._since.get(allocation.handle.id, {}).pop("unknown", None)
            ref = self._record_created(allocation, role, resource, stored)
            if role == "workload":
                made[ref.uid] = manifest
            if gone := dropped_fields(manifest, stored):
                raise ProvisionError(
                    "rejected",
                    f"{what}: the server ({allocation.api.version().text}) has silently dropped {', '.join(gone)}; it is too "
                    "old for that: choose another kind (kubernetes: kind, `pods` works everywhere) or leave the field out",
                )
        allocation.phase = Phase.FOLLOWED
        self._forget(allocation)
        # Pods that were deleted while a quota was full.
        allocation.pods = {uid: pod for uid, pod in allocation.pods.items() if not pod.deleted}
        self._set_owner(allocation)

    def _forget(self, allocation: PodAllocation) -> None:
        self._made.pop(allocation.handle.id, None)
        self._since.pop(allocation.handle.id, None)

    def _create_one(
        self, allocation: PodAllocation, resource: Resource, manifest: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Create one object, unless an earlier attempt without an answer has done so.

        Raises:
            KubernetesError: refused, or no answer.
        """
        generated = not (manifest.get("metadata") or {}).get("name")
        if generated and allocation.failed_creations and (there := self._find_existing(allocation, resource)):
            return there
        try:
            return allocation.api.create(resource, dict(manifest), allocation.namespace)
        except Conflict as error:
            there = self._find_existing(allocation, resource, _manifest_name(manifest))
            if there is None:
                raise
            if there["metadata"].get("deletionTimestamp"):
                raise Unavailable(error.call, "it is still being deleted", status=error.status) from error
            return there

    def _find_existing(
        self, allocation: PodAllocation, resource: Resource, name: str = ""
    ) -> Mapping[str, Any] | None:
        selector = f"{ALLOCATION}={allocation.handle.id}"
        listing = allocation.api.list(resource, labels=selector, namespace=allocation.namespace)
        known = {ref.name for ref in allocation.objects if ref.resource == resource}
        for found in listing.items:
            own = found["metadata"]["name"]
            if own == name or (not name and own not in known):
                return found
        return None

    def _record_created(
        self, allocation: PodAllocation, role: str, resource: Resource, stored: Mapping[str, Any]
    ) -> ObjectRef:
        meta = stored["metadata"]
        ref = ObjectRef(
            resource, meta.get("namespace") or allocation.namespace, meta["name"], meta.get("uid", "")
        )
        allocation.add_objects([ref])
        if role == "workload":
            allocation.workloads[ref.name] = ref
        return ref

    def _retry_later(self, allocation: PodAllocation, error: Unavailable) -> None:
        pause = CREATE_RETRY_S[min(allocation.failed_creations, len(CREATE_RETRY_S) - 1)]
        allocation.failed_creations += 1
        self._wait_unless_overdue(allocation, error, "unknown", max(pause, error.retry_after_s))

    def _wait_unless_overdue(
        self, allocation: PodAllocation, error: KubernetesError, patience: str, pause: float
    ) -> None:
        """Set when to try again.

        Raises:
            ProvisionError: the limit of *patience* is over.
        """
        now = self._now()
        since = self._since.setdefault(allocation.handle.id, {}).setdefault(patience, now)
        until = since + allocation.settings.patience[patience]
        if now >= until:
            waited = f"given up after {now - since:.0f} s (kubernetes: patience: {patience})"
            raise provision_error(error, waited) from error
        allocation.waiting_text = str(error)
        allocation.retry_at = min(now + pause, until)

    def _delete_created(self, allocation: PodAllocation) -> None:
        """Delete the pods that were created before the quota was full: half an allocation would hold devices in vain.

        A pod that cannot be deleted stays; its agent waits for the others.
        """
        made = self._made[allocation.handle.id]
        for ref in [ref for ref in allocation.objects if ref.uid in made]:
            try:
                allocation.api.delete(ref, grace_s=0)
            except KubernetesError:
                continue
            allocation.objects.remove(ref)
            del allocation.workloads[ref.name]
            allocation.to_create.append(("workload", made.pop(ref.uid)))

    def _set_owner(self, allocation: PodAllocation) -> None:
        """Make the workloads owners of the other objects, so that the cluster deletes them together."""
        owners = [
            {
                "apiVersion": ref.resource.api_version,
                "kind": ref.resource.kind,
                "name": ref.name,
                "uid": ref.uid,
            }
            for ref in allocation.workloads.values()
        ]
        for ref in [ref for ref in allocation.objects if ref.resource in (SECRET, SERVICE) and owners]:
            try:
                allocation.api.patch(ref, {"metadata": {"ownerReferences": owners}})
            except KubernetesError:
                return  # then this session deletes it
            allocation.objects = [one for one in allocation.objects if one != ref]
            allocation.owned.append(ref)


def _role_resource(role: str, allocation: PodAllocation) -> Resource:
    return {"secret": SECRET, "service": SERVICE}.get(role, allocation.kind.resource)


def _manifest_name(manifest: Mapping[str, Any]) -> str:
    meta = manifest.get("metadata") or {}
    return str(meta.get("name") or f"{meta.get('generateName', '')}...")


def note_unfit(allocation: PodAllocation) -> None:
    """Append a line to ``unfit.jsonl`` beside the plan for each node that the probe found unfit in this round.

    Raises:
        ProvisionError: ``disk_full`` or ``not_writable``.
    """
    path = Path(allocation.plan.directory) / "unfit.jsonl"
    lines = [
        json.dumps({"round": allocation.round, "node": pod.node, "text": pod.unfit})
        for pod in allocation.views
        if pod.unfit
    ]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ProvisionError(unwritten(error), no_room(error, path)) from error


def read_unfit(plan: Plan) -> dict[str, str]:
    """Return the nodes in ``unfit.jsonl`` with the probe's text; damaged lines are skipped."""
    unfit: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (Path(plan.directory) / "unfit.jsonl").read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                found = read_json(line)
                unfit[str(found["node"])] = str(found["text"])
    return unfit


def unfit_messages(plan: Plan) -> list[Message]:
    """Return a message for each run about the unfit nodes; none if there are none.

    The first run's message also says that a probe found them, which the history of nodes needs once.
    """
    unfit = read_unfit(plan)
    level = plan.vetting.level if plan.vetting else "off"
    body = {"level": level, "seconds": 0.0, "fit": [], "unfit": unfit, "warnings": {}}
    first = {**body, "probed": unfit}
    return [
        Message(run.run_id, run.nonce, "vetted", first if run is plan.runs[0] else body)
        for run in plan.runs
        if unfit
    ]
