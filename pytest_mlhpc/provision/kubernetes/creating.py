"""Bringing an allocation's objects into being: each once, whatever answers get lost, and none of half an allocation left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase
from pytest_mlhpc.provision.kubernetes.dropped import dropped
from pytest_mlhpc.provision.kubernetes.errors import Conflict, KubernetesError, QuotaExceeded, Unavailable
from pytest_mlhpc.provision.kubernetes.labels import ALLOCATION
from pytest_mlhpc.provision.kubernetes.refusals import refused
from pytest_mlhpc.provision.kubernetes.resources import CONFIG_MAP, SERVICE, ObjectRef, Resource

#: How long a creation is tried again while the server does not answer, in seconds, and the pauses between two tries.
CREATE_LIMIT_S: Final = 600.0
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

    def create(self, allocation: Allocation) -> None:
        """Create what is missing; where the server does not answer, ``try_at`` says when to try again.

        Raises:
            ProvisionError: refused; what was created already is in ``allocation.objects`` and has to be deleted.
        """
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
                self._wait_for_room(allocation, error)
                return
            except KubernetesError as error:
                raise refused(error) from error
            allocation.unborn.pop(0)
            allocation.tries = 0
            self._created(allocation, role, resource, stored)
            if gone := dropped(manifest, stored):
                raise ProvisionError(
                    "rejected",
                    f"{what}: the server ({allocation.api.version().text}) has silently dropped {', '.join(gone)}; it is too "
                    "old for that: choose another kind (kubernetes: kind, `pods` works everywhere) or leave the field out",
                )
        allocation.phase = Phase.FOLLOWED
        self._give_to_owner(allocation)

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
        except Conflict:
            there = self._there(allocation, resource, _name(manifest))
            if there is None:
                raise
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
    ) -> None:
        meta = stored["metadata"]
        ref = ObjectRef(
            resource, meta.get("namespace") or allocation.namespace, meta["name"], meta.get("uid", "")
        )
        allocation.note([ref])
        if role == "workload":
            allocation.workloads[ref.name] = ref

    def _again(self, allocation: Allocation, error: Unavailable) -> None:
        now = self._now()
        if now - allocation.since > CREATE_LIMIT_S:
            raise ProvisionError(
                "never_scheduled", f"{error}; tried for {now - allocation.since:.0f} s"
            ) from error
        pause = PAUSES_S[min(allocation.tries, len(PAUSES_S) - 1)]
        allocation.tries += 1
        allocation.waits_for = str(error)
        allocation.try_at = now + max(pause, error.retry_after_s or 0.0)

    def _wait_for_room(self, allocation: Allocation, error: QuotaExceeded) -> None:
        now, limit = self._now(), allocation.settings.patience["quota"]
        if now - allocation.since >= limit:
            raise ProvisionError(
                "quota_exceeded", f"{error}; given up after {limit:.0f} s (kubernetes: patience: quota)"
            ) from error
        allocation.waits_for = str(error)
        allocation.try_at = min(now + QUOTA_PAUSE_S, allocation.since + limit)

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
        for ref in allocation.objects:
            if ref.resource in (CONFIG_MAP, SERVICE) and owners:
                try:
                    allocation.api.patch(ref, {"metadata": {"ownerReferences": owners}})
                except KubernetesError:  # they are deleted one by one in any case
                    return


def _resource(role: str, allocation: Allocation) -> Resource:
    return {"config": CONFIG_MAP, "service": SERVICE}.get(role, allocation.kind.resource)


def _name(manifest: Mapping[str, Any]) -> str:
    meta = manifest.get("metadata") or {}
    return str(meta.get("name") or f"{meta.get('generateName', '')}...")
