"""Bringing an allocation's objects into being: each once, whatever answers get lost, and none of half an allocation left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase
from pytest_mlhpc.provision.kubernetes.dropped import dropped
from pytest_mlhpc.provision.kubernetes.errors import Conflict, KubernetesError, QuotaExceeded, Unavailable
from pytest_mlhpc.provision.kubernetes.inquiry import MUST_SPECIFY
from pytest_mlhpc.provision.kubernetes.labels import ALLOCATION
from pytest_mlhpc.provision.kubernetes.refusals import refused
from pytest_mlhpc.provision.kubernetes.resources import CONFIG_MAP, SERVICE, ObjectRef, Resource

#: Pauses between two tries while the server, or a webhook of its, does not answer, in seconds.
PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)

#: Time between two tries where a quota has no room, in seconds.
QUOTA_PAUSE_S: Final = 30.0


class Creator:
    """Creates what is still unborn of an allocation.

    Args:
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: id of an allocation that is being created -> uid -> manifest of its workloads
        self._made: dict[str, dict[str, Mapping[str, Any]]] = {}
        #: id of an allocation that is being created -> name of a patience -> since when it is needed
        self._since: dict[str, dict[str, float]] = {}

    def create(self, allocation: Allocation) -> None:
        """Create what is missing; where the server does not answer, ``try_at`` says when to try again.

        Raises:
            ProvisionError: refused; what was created already is in ``allocation.objects`` and has to be deleted.
        """
        try:
            self._create(allocation)
        except ProvisionError:
            self._forget(allocation)
            raise

    def _create(self, allocation: Allocation) -> None:
        made = self._made.setdefault(allocation.handle.id, {})
        while allocation.unborn:
            role, manifest = allocation.unborn[0]
            resource = _resource(role, allocation)
            what = f"{resource.kind} {_name(manifest)}"
            try:
                stored = self._once(allocation, resource, manifest)
            except Unavailable as error:
                self._again(allocation, error)
                return
            except QuotaExceeded as error:
                self._since.get(allocation.handle.id, {}).pop("unknown", None)
                if MUST_SPECIFY in error.message:
                    raise refused(error) from error
                self._wait_for_room(allocation, error)
                self._give_back(allocation)
                return
            except KubernetesError as error:
                raise refused(error) from error
            allocation.unborn.pop(0)
            allocation.tries = 0
            self._since.get(allocation.handle.id, {}).pop("unknown", None)
            ref = self._created(allocation, role, resource, stored)
            if role == "workload":
                made[ref.uid] = manifest
            if gone := dropped(manifest, stored):
                raise ProvisionError(
                    "rejected",
                    f"{what}: the server ({allocation.api.version().text}) has silently dropped {', '.join(gone)}; it is too "
                    "old for that: choose another kind (kubernetes: kind, `pods` works everywhere) or leave the field out",
                )
        allocation.phase = Phase.FOLLOWED
        self._forget(allocation)
        allocation.pods = {uid: pod for uid, pod in allocation.pods.items() if not pod.gone}  # given back
        self._give_to_owner(allocation)

    def _forget(self, allocation: Allocation) -> None:
        self._made.pop(allocation.handle.id, None)
        self._since.pop(allocation.handle.id, None)

    def _once(
        self, allocation: Allocation, resource: Resource, manifest: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Create one object, unless an earlier try whose answer was lost has done so.

        Raises:
            KubernetesError: refused, or no answer.
        """
        generated = not (manifest.get("metadata") or {}).get("name")
        if generated and allocation.tries and (there := self._there(allocation, resource)):
            return there
        try:
            return allocation.api.create(resource, dict(manifest), allocation.namespace)
        except Conflict as error:
            there = self._there(allocation, resource, _name(manifest))
            if there is None:
                raise
            if there["metadata"].get("deletionTimestamp"):
                raise Unavailable(error.call, "it is still being deleted", status=error.status) from error
            return there

    def _there(self, allocation: Allocation, resource: Resource, name: str = "") -> Mapping[str, Any] | None:
        selector = f"{ALLOCATION}={allocation.handle.id}"
        listing = allocation.api.list(resource, labels=selector, namespace=allocation.namespace)
        known = {ref.name for ref in allocation.objects if ref.resource == resource}
        for found in listing.items:
            own = found["metadata"]["name"]
            if own == name or (not name and own not in known):
                return found
        return None

    def _created(
        self, allocation: Allocation, role: str, resource: Resource, stored: Mapping[str, Any]
    ) -> ObjectRef:
        meta = stored["metadata"]
        ref = ObjectRef(
            resource, meta.get("namespace") or allocation.namespace, meta["name"], meta.get("uid", "")
        )
        allocation.note([ref])
        if role == "workload":
            allocation.workloads[ref.name] = ref
        return ref

    def _again(self, allocation: Allocation, error: Unavailable) -> None:
        pause = PAUSES_S[min(allocation.tries, len(PAUSES_S) - 1)]
        allocation.tries += 1
        self._wait(allocation, error, "unknown", max(pause, error.retry_after_s))

    def _wait_for_room(self, allocation: Allocation, error: QuotaExceeded) -> None:
        self._wait(allocation, error, "quota", QUOTA_PAUSE_S)

    def _wait(self, allocation: Allocation, error: KubernetesError, patience: str, pause: float) -> None:
        """Say when to try again, unless it was waited for as long as *patience* says."""
        now = self._now()
        since = self._since.setdefault(allocation.handle.id, {}).setdefault(patience, now)
        until = since + allocation.settings.patience[patience]
        if now >= until:
            waited = f"given up after {now - since:.0f} s (kubernetes: patience: {patience})"
            raise refused(error, waited) from error
        allocation.waits_for = str(error)
        allocation.try_at = min(now + pause, until)

    def _give_back(self, allocation: Allocation) -> None:
        """Delete the pods that were made before the quota was full: half an allocation would hold devices and wait.

        What cannot be deleted now stays made; its agent waits for the others.
        """
        made = self._made[allocation.handle.id]
        for ref in [ref for ref in allocation.objects if ref.uid in made]:
            try:
                allocation.api.delete(ref, grace_s=0)
            except KubernetesError:
                continue
            allocation.objects.remove(ref)
            del allocation.workloads[ref.name]
            allocation.unborn.append(("workload", made.pop(ref.uid)))

    def _give_to_owner(self, allocation: Allocation) -> None:
        """Let the cluster delete the lesser objects with the workload, also where nobody of us lives to do so."""
        owners = [
            {
                "apiVersion": ref.resource.api_version,
                "kind": ref.resource.kind,
                "name": ref.name,
                "uid": ref.uid,
            }
            for ref in allocation.workloads.values()
        ]
        for ref in [ref for ref in allocation.objects if ref.resource in (CONFIG_MAP, SERVICE) and owners]:
            try:
                allocation.api.patch(ref, {"metadata": {"ownerReferences": owners}})
            except KubernetesError:
                return  # it is deleted by itself
            allocation.objects = [one for one in allocation.objects if one != ref]
            allocation.given.append(ref)


def _resource(role: str, allocation: Allocation) -> Resource:
    return {"config": CONFIG_MAP, "service": SERVICE}.get(role, allocation.kind.resource)


def _name(manifest: Mapping[str, Any]) -> str:
    meta = manifest.get("metadata") or {}
    return str(meta.get("name") or f"{meta.get('generateName', '')}...")
