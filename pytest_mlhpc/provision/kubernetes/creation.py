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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.software import POD_FILES_BYTES
from pytest_mlhpc.node.files import outcome_of, read_json, read_private, unwritten
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import copy_files, regular_files, size_of, staged_sets
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation
from pytest_mlhpc.provision.kubernetes.causes import MUST_SPECIFY
from pytest_mlhpc.provision.kubernetes.errors import (
    Conflict,
    KubernetesError,
    QuotaExceeded,
    Unavailable,
    provision_error,
)
from pytest_mlhpc.provision.kubernetes.manifest import render
from pytest_mlhpc.provision.kubernetes.objects import (
    ALLOCATION,
    SECRET,
    SERVICE,
    Identity,
    Manifest,
    Resource,
    dropped_fields,
    object_ref,
)
from pytest_mlhpc.provision.kubernetes.reap import LOCATION_FILE, location_json, location_of
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings
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


def render_objects(
    allocation: PodAllocation, partition: Partition, payload: Callable[[str], Path], identity: Identity
) -> None:
    """Set which objects *allocation* needs, and write plan, location and manifests into its directory.

    *payload* returns the zip of a sha256; *identity* is of this session, for labels.

    Raises:
        ProvisionError: ``disk_full`` or ``not_writable``; ``rejected``: the payload is gone, or rendering failed.
    """
    settings, plan = allocation.settings, allocation.plan
    try:
        zipped = read_private(payload(plan.payload_sha256))
    except OSError as error:
        text = f"cannot read the payload {error.filename}: {error.strerror}"
        raise ProvisionError(outcome_of(error, "rejected"), text) from error
    excluded = tuple(dict.fromkeys((*plan.excluded_nodes, *allocation.excluded)))
    environment = environment_of(plan, partition)
    plan = _on_volume(plan, settings)
    avoiding = replace(plan, excluded_nodes=excluded)
    try:
        rendered = render(settings, partition, environment, avoiding, zipped, identity, allocation.round)
    except UsageError as error:
        raise ProvisionError("rejected", str(error)) from error
    allocation.kind, allocation.phase = rendered.kind, Phase.CREATING
    allocation.to_create = rendered.objects()
    location = location_of(settings, allocation.namespace, allocation.api, rendered.kind)
    _write_files(plan, [manifest for _, manifest in allocation.to_create], location_json(location))


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


def _write_files(plan: Plan, manifests: Sequence[Manifest], location: str) -> None:
    """Write plan, location and manifests beside the logs, for later sessions and for people. Secrets are left out."""
    directory = Path(plan.directory)
    shown = [{key: value for key, value in one.items() if key != "data"} for one in manifests]
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


def create_objects(allocation: PodAllocation, now: float) -> None:
    """Create what is missing. Without an answer, ``retry_at`` is set.

    Raises:
        ProvisionError: refused. ``allocation.objects`` has what was created, and has to be deleted.
    """
    try:
        while allocation.to_create:
            resource, manifest = allocation.to_create[0]
            try:
                stored = _create_one(allocation, resource, manifest)
            except Unavailable as error:
                pause = CREATE_RETRY_S[min(allocation.failed_creations, len(CREATE_RETRY_S) - 1)]
                allocation.failed_creations += 1
                _retry_later(allocation, error, "unknown", now, max(pause, error.retry_after_s))
                return
            except QuotaExceeded as error:
                allocation.waits.pop("unknown", None)
                if MUST_SPECIFY in error.message:
                    raise
                _retry_later(allocation, error, "quota", now, QUOTA_RETRY_S)
                _delete_created(allocation)
                return
            allocation.failed_creations = 0
            allocation.waits.pop("unknown", None)
            _take_created(allocation, resource, allocation.to_create.pop(0)[1], stored)
    except KubernetesError as error:
        raise provision_error(error) from error
    allocation.phase = Phase.FOLLOWED
    allocation.created, allocation.waits = {}, {}
    # Pods that were deleted while a quota was full.
    allocation.pods = {uid: pod for uid, pod in allocation.pods.items() if not pod.deleted}
    _set_owner(allocation)


def _create_one(allocation: PodAllocation, resource: Resource, manifest: Manifest) -> Manifest:
    """Create one object, unless an earlier attempt without an answer has done so.

    Raises:
        KubernetesError: refused, or no answer.
    """
    generated = not manifest["metadata"].get("name")
    if generated and allocation.failed_creations and (there := _find_existing(allocation, resource)):
        return there
    try:
        return allocation.api.create(resource, manifest, allocation.namespace)
    except Conflict as error:
        there = _find_existing(allocation, resource, _manifest_name(manifest))
        if there is None:
            raise
        if there["metadata"].get("deletionTimestamp"):
            raise Unavailable(error.call, "it is still being deleted", status=error.status) from error
        return there


def _find_existing(allocation: PodAllocation, resource: Resource, name: str = "") -> Manifest | None:
    selector = f"{ALLOCATION}={allocation.handle.id}"
    listing = allocation.api.list(resource, labels=selector, namespace=allocation.namespace)
    known = {ref.name for ref in allocation.objects if ref.resource == resource}
    for found in listing.items:
        own = found["metadata"]["name"]
        if own == name or (not name and own not in known):
            return found
    return None


def _take_created(
    allocation: PodAllocation, resource: Resource, manifest: Manifest, stored: Manifest
) -> None:
    """Add an object that the server has stored.

    Raises:
        ProvisionError: it lacks a part.
    """
    ref = object_ref(resource, stored)
    allocation.add_objects([ref])
    if resource == allocation.kind.resource:
        allocation.workloads[ref.name] = ref
        allocation.created[ref.uid] = manifest
    if gone := dropped_fields(manifest, stored):
        raise ProvisionError(
            "rejected",
            f"{resource.kind} {_manifest_name(manifest)}: the server ({allocation.api.version()}) has silently dropped "
            f"{', '.join(gone)}; it is too old for that: choose another kind (kubernetes: kind, `pods` works everywhere) or "
            "leave the field out",
        )


def _retry_later(
    allocation: PodAllocation, error: KubernetesError, patience: str, now: float, pause: float
) -> None:
    """Set when to try again.

    Raises:
        ProvisionError: the limit of *patience* is over.
    """
    since = allocation.waits.setdefault(patience, now)
    until = since + allocation.settings.patience[patience]
    if now >= until:
        waited = f"given up after {now - since:.0f} s (kubernetes: patience: {patience})"
        raise provision_error(error, waited) from error
    allocation.waiting_text = str(error)
    allocation.retry_at = min(now + pause, until)


def _delete_created(allocation: PodAllocation) -> None:
    """Delete the pods that were created before the quota was full: half an allocation would hold devices in vain.

    A pod that cannot be deleted stays; its agent waits for the others.
    """
    for ref in [ref for ref in allocation.objects if ref.uid in allocation.created]:
        with contextlib.suppress(KubernetesError):
            allocation.api.delete(ref, grace_s=0)
            allocation.objects.remove(ref)
            del allocation.workloads[ref.name]
            allocation.to_create.append((ref.resource, allocation.created.pop(ref.uid)))


def _set_owner(allocation: PodAllocation) -> None:
    """Make the workloads owners of the other objects, so that the cluster deletes them together."""
    owners = [
        {"apiVersion": ref.resource.api_version, "kind": ref.resource.kind, "name": ref.name, "uid": ref.uid}
        for ref in allocation.workloads.values()
    ]
    for ref in [ref for ref in allocation.objects if ref.resource in (SECRET, SERVICE) and owners]:
        try:
            allocation.api.patch(ref, {"metadata": {"ownerReferences": owners}})
        except KubernetesError:
            return  # then this session deletes it
        allocation.objects = [one for one in allocation.objects if one != ref]
        allocation.owned.append(ref)


def _manifest_name(manifest: Manifest) -> str:
    meta = manifest["metadata"]
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
