"""The kinds that are shipped as data, and from a mapping (of a file here, or ``custom:`` of a site) to a :class:`Kind`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.provision.kubernetes.kinds.model import (
    Kind,
    QueueRule,
    RankRule,
    StatusRule,
    TemplateRule,
)
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.paths import Path, at
from pytest_mlhpc.provision.kubernetes.resources import Resource


def builtin_kinds() -> tuple[str, ...]:
    """Return the names of the kinds that are shipped."""
    found = (file.name for file in resources.files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def kind_of(settings: KubernetesSettings) -> Kind:
    """Return the kind that *settings* name: the site's own one, else one that is shipped.

    Raises:
        UsageError: there is no such kind.
    """
    if settings.custom:
        return _with_container(make_kind(settings.kind, settings.custom), settings.manifest)
    if settings.kind not in builtin_kinds():
        hint = nearest(settings.kind, builtin_kinds())
        did = f" (did you mean {hint!r}?)" if hint else ""
        raise UsageError(
            f"kind {settings.kind!r} is not one of {', '.join(builtin_kinds())}{did}; describe another under custom:"
        )
    return _with_container(shipped(settings.kind), settings.manifest)


def _with_container(kind: Kind, manifest: Mapping[str, Any]) -> Kind:
    """Return *kind* with the container of *manifest* that is to run our agent: the kind's, ``worker``, or the first."""
    containers = at(manifest, (*kind.templates[0].path, "spec", "containers"))
    found = (
        [one.get("name") for one in containers if isinstance(one, Mapping)]
        if isinstance(containers, list)
        else []
    )
    names = [name for name in found if isinstance(name, str) and name]
    if not names or kind.container in names:
        return kind
    return replace(kind, container="worker" if "worker" in names else names[0])


@cache
def shipped(name: str) -> Kind:
    """Return the kind of the file *name*.yaml here."""
    import yaml

    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return make_kind(name, yaml.safe_load(text))


def make_kind(name: str, said: Mapping[str, Any]) -> Kind:
    """Return the kind that a mapping describes, which ``schema.CustomKind`` has found well-formed."""
    status, rank = said.get("status") or {}, said.get("rank") or {}
    return Kind(
        name=name,
        resource=_resource(said["resource"]),
        templates=tuple(map(_template, said["templates"])),
        rank=RankRule(**{key: value for key, value in rank.items() if value}),
        status=StatusRule(
            conditions=path_of(status.get("conditions") or "status.conditions"),
            phase=path_of(status.get("phase")),
            **{key: tuple(status.get(key) or ()) for key in ("succeeded", "failed", "suspended", "running")},
        ),
        each_pod=bool(said.get("each_pod")),
        own_service=bool(said.get("own_service")),
        most=said.get("most") or 0,
        container=said.get("container") or "worker",
        manifest=said.get("manifest") or {},
        must=said.get("must") or {},
        several=said.get("several") or {},
        deadline=path_of(said.get("deadline")),
        ttl=path_of(said.get("ttl")),
        suspend=path_of(said.get("suspend")),
        devices=path_of(said.get("devices")),
        leader=said.get("leader") or "",
        queue_label=said.get("queue_label") or "",
        queue=_queue(said["queue"]) if said.get("queue") else None,
        limit_label=said.get("limit_label") or "",
    )


def path_of(text: str | None) -> Path:
    """Return the parts of ``spec.template``; of nothing, none."""
    return tuple(text.split(".")) if text else ()


def _resource(said: Mapping[str, Any]) -> Resource:
    return Resource(said.get("group") or "", said["version"], said["kind"], said["plural"])


def _queue(said: Mapping[str, Any]) -> QueueRule:
    return QueueRule(
        _resource(said["resource"]), said["label"], tuple(said["admitted"]), tuple(said.get("evicted") or ())
    )


def _template(said: Mapping[str, Any]) -> TemplateRule:
    return TemplateRule(
        path=path_of(said.get("path")),
        pods=said.get("pods"),
        count=tuple(map(path_of, said.get("count") or ())),
        remove=path_of(said.get("remove")),
    )
