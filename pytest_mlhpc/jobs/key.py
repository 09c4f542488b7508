"""The key of a benchmark: canonical text of all that changes what is computed, and of nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.jobs.spec import NO_DATA, JobSpec
from pytest_mlhpc.worker.data.errors import DataError
from pytest_mlhpc.worker.data.files import read_manifest
from pytest_mlhpc.worker.workloads.definitions import Workload
from pytest_mlhpc.worker.workloads.fields.arithmetic import MANNER

#: Text that needs no quoting in a key.
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+\Z")


def benchmark_key(spec: JobSpec, workload: Workload) -> str:
    """Return ``workload[k=v ...] k=v ...``: identity fields, then scale, preset, data and name, each sorted.

    Paths and node ids are no part of it: files may move. A data set counts by its kind (see
    :func:`data_kind`), the cache by what was asked for, as cold figures compare with cold ones only. What ``tuning``
    chose counts where it changes what is computed (precision), and not where it is the device's manner of doing so.
    """
    chosen = set(MANNER) - set(spec.asked) if spec.parameters.get("tuning") else set()
    identity = {
        name: value
        for name, value in spec.parameters.items()
        if name in workload.fields
        and workload.fields[name].identity
        and value is not None
        and name not in chosen
    }
    rest: dict[str, Any] = {
        "name": spec.name,
        "preset": spec.preset,
        "nodes": spec.nodes,
        "devices": spec.ranks,
    }
    if spec.workload != "command" and not spec.about_nodes and spec.data != NO_DATA:
        rest["data"] = data_kind(spec)
    if spec.cache != "unknown":
        rest["cache"] = spec.cache
    return f"{spec.workload}[{_pairs(identity)}] {_pairs(rest)}"


def data_kind(spec: JobSpec) -> str:
    """Return memory, device, synthetic (files), or the kind of the named set with its name.

    A path gives ``path``, or ``path-synthetic`` where a set of ours lies: it shares no series with real data.
    """
    if spec.data in {"memory", "device"}:
        return spec.data
    if spec.data == "files":
        return "synthetic"
    if dataset := spec.target.datasets.get(spec.data):
        return f"{dataset.kind}-{dataset.name}"
    return "path" if path_kind(spec.data) == "real" else "path-synthetic"


def path_kind(path: str) -> str:
    """Return the kind of the set at *path*: as its manifest says if it is one of ours, else real.

    Looks where the worker looks (worker/data/source.py). What cannot be read here is left to the worker, which says why.
    """
    try:
        manifest = read_manifest(Path(path)) or read_manifest(Path(path).parent)
    except (DataError, OSError):
        return "real"
    return manifest.kind if manifest is not None else "real"


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_text(values[key])}" for key in sorted(values))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # 1.0 and 1 compute the same
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str) and _PLAIN.match(value):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
