"""What a test says under a scheduler's own name, ``kubernetes={...}``: put over the partition's options where it runs there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import Problem


def checked(
    node_id: str,
    scheduler: str,
    *,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    model: type[Any] | None,
    folder: Path,
) -> tuple[dict[str, Any], list[Problem]]:
    """Return *given* as *model* understands it, and what is wrong with it.

    It is checked together with the partition's *options*, as they have to fit; *folder* is that of the test's file, to which
    names of files are relative.
    """
    if model is None:
        return {}, [Problem(node_id, scheduler, "no installed package takes options of it")]
    from pytest_mlhpc.config.yaml import validate

    try:
        node = _node({**options, **given}, node_id, scheduler)
    except (TypeError, RecursionError) as error:
        return {}, [Problem(node_id, scheduler, str(error))]
    found, problems = validate(model, node, folder=folder)
    if found is None:
        return {}, problems
    effective = found.model_dump()
    return {name: effective[name] for name in given}, []


def without_manifest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return *options* for records and reports: of a manifest, in which a secret may stand, the hash alone."""
    said = {name: value for name, value in options.items() if name != "manifest"}
    if manifest := options.get("manifest"):
        text = json.dumps(manifest, sort_keys=True)
        said["manifest"] = f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return said


def _node(value: Any, where: str, key: str) -> Any:
    """Return *value* as a reader of files would: each part with the place that a problem names.

    Raises:
        TypeError: it holds what no file can, such as an object of Python's.
    """
    from pytest_mlhpc.config.yaml import Node

    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{key}: the key {name!r:.80} should be text")
        return Node({name: _node(one, where, f"{key}.{name}") for name, one in value.items()}, where, key)
    if isinstance(value, (list, tuple)):
        return Node([_node(one, where, f"{key}[{index}]") for index, one in enumerate(value)], where, key)
    if isinstance(value, Path):
        value = str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return Node(value, where, key)
    raise TypeError(f"{key}: {type(value).__name__} is neither text nor number, list or mapping")
