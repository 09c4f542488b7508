"""Strict checks of manifests: Kubernetes' own kinds by the models of its official client, others by published schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes.client
import pydantic

SCHEMAS = Path(__file__).parent / "provision/kubernetes/schemas"
_OWN = {("v1", "Pod"), ("v1", "Service"), ("v1", "Secret"), ("batch/v1", "Job")}


def complaints(manifest: dict[str, Any]) -> list[str]:
    """Return what the published schema of its kind does not know, or wants otherwise, in *manifest*."""
    kind = manifest["kind"]
    if (manifest["apiVersion"], kind) in _OWN:
        return by_model(manifest, f"V1{kind}")
    schema = json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    extended = jsonschema.validators.extend(validator, {"x-model": _x_model})
    return [f"{error.json_path}: {error.message}" for error in extended(schema).iter_errors(manifest)]


def by_model(found: Any, name: str) -> list[str]:
    """Return what the client's model *name*, which knows every field of the API and takes no other, refuses."""
    try:
        getattr(kubernetes.client, name).model_validate(found)
    except pydantic.ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return []


def _x_model(_: Any, name: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    for text in by_model(instance, name):
        yield jsonschema.ValidationError(text)
