"""The definition of a job: canonical text of all that changes what is computed, and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.jobs.spec import NO_DATA, JobSpec
from pytest_mlhpc.node.worker.data.errors import DataError
from pytest_mlhpc.node.worker.data.files import read_manifest
from pytest_mlhpc.node.worker.workloads.definitions import Workload
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import MANNER
from pytest_mlhpc.node.worker.workloads.fields.quality import to_quality
from pytest_mlhpc.store.definition import text_of

#: A path that says where something lies on one machine: a whole word, or what follows an option.
_ABSOLUTE: Final = re.compile(r"(^|=)(/[^=]+)")


def definition_of(spec: JobSpec, workload: Workload) -> str:
    """Return the canonical text: the workload's fields that count, scale, and of trainings preset, steps and data.

    A path counts by what lies there (see :func:`data_kind`), the cache by what was asked for: cold figures compare with cold
    ones only. What ``tuning`` chose counts where it changes what is computed (precision), and not where it is the device's
    manner of doing so.
    """
    chosen = set(MANNER) - set(spec.asked) if spec.parameters.get("tuning") else set()
    fields: dict[str, Any] = {
        name: value
        for name, value in spec.parameters.items()
        if name in workload.fields
        and workload.fields[name].identity
        and value is not None
        and name not in chosen
    }
    fields |= {"nodes": spec.nodes, "devices": spec.ranks}
    if spec.workload == "command":
        return text_of("program", {**fields, **_program(spec)})
    fields["preset"] = spec.preset
    if not spec.about_nodes and not to_quality(spec.parameters):
        fields |= {"steps": spec.steps, "warmup": spec.warmup_steps}
    if not spec.about_nodes and spec.data != NO_DATA:
        fields["data"] = data_kind(spec)
    if spec.cache != "unknown":
        fields["cache"] = spec.cache
    return text_of(spec.workload, fields)


def _program(spec: JobSpec) -> dict[str, Any]:
    """Return what counts of a program: its arguments, of paths only the name, and how samples become a figure."""
    reduced = {name: rule["reduce"] for name, rule in spec.metrics.items() if rule.get("reduce")}
    command = [_ABSOLUTE.sub(lambda found: found[1] + Path(found[2]).name, word) for word in spec.argv]
    return {"command": command, **({"reduce": reduced} if reduced else {})}


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

    Looks where the worker looks (node/worker/data/source.py). What cannot be read here is left to the worker, which says why.
    """
    try:
        manifest = read_manifest(Path(path)) or read_manifest(Path(path).parent)
    except (DataError, OSError):
        return "real"
    return manifest.kind if manifest is not None else "real"
