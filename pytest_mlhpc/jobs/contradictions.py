"""What cannot be of a job spec: values beside one another or on its partition, and two tests of one key. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_mlhpc.errors import Problem, nearest
from pytest_mlhpc.jobs.patterns import wrong_pattern
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.results.schema import BETTER, UNITS
from pytest_mlhpc.worker.workloads.fields.quality import WINDOW, to_quality

#: Fields that say how a run is measured; the workload `nodes` measures nothing.
_NOT_HELD = ("steps", "warmup", "data", "cache", "launcher")
_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
#: Shown in tables, file names and keys: one line without control characters.
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}\Z")


def contradictions(spec: JobSpec, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (field, text) for values that are fine alone but not together."""
    found = []
    if not _NAME.match(spec.name):
        found.append(("name", f"{spec.name!r} is empty, too long or holds control characters"))
    if spec.ranks % spec.nodes:
        found.append(("devices", f"{spec.ranks} devices do not divide over {spec.nodes} nodes"))
    if spec.workload == "command":
        found += _wrong_command(spec)
    elif spec.about_nodes:
        found += [
            (key, "is nothing that nodes of a test's own have") for key in _NOT_HELD if key in spec.asked
        ]
    elif spec.steps < 1:
        found.append(("steps", "a run of no steps measures nothing"))
    if to_quality(values):
        text = "means nothing with until='quality', which ends where the target is reached (see max_epochs, max_seconds)"
        found += [(key, text) for key in WINDOW if key in spec.asked]
    known = ["memory", "device", "files", *spec.target.datasets]
    data = values["data"]
    # a test that lacks a feature here is skipped, with what it lacks
    skipped = not spec.target.partition.features.issuperset(spec.features)
    if data not in known and "/" not in data and not skipped:
        hint = nearest(data, known)
        text = f"{data!r} is neither a data set of {spec.target.partition.system} nor a path"
        found.append(("data", text + (f" (did you mean {hint!r}?)" if hint else "")))
    unknown = [name for name in spec.judged if name not in spec.expected_metrics]
    if isinstance(values["judge"], (list, tuple)) and unknown:
        found.append(("judge", f"not among the metrics: {', '.join(map(str, unknown))}"))
    return found


def lacking(spec: JobSpec) -> str:
    """Return what the partition does not have although *spec* asks for it, or an empty string."""
    partition = spec.target.partition
    if spec.node and spec.nodes > 1:
        return f"--each-node runs tests of one node, {spec.nodes} asked"
    if missing := sorted(set(spec.features) - partition.features):
        return f"{partition.id} has no feature {', '.join(map(repr, missing))}"
    if spec.nodes > partition.nodes.max:
        return f"{partition.id} gives at most {partition.nodes.max} nodes, {spec.nodes} asked"
    one_node = spec.ranks // spec.nodes
    if partition.accelerator == "cpu":
        if one_node > partition.nodes.cores:
            return f"a node of {partition.id} has {partition.nodes.cores} cores, {one_node} ranks asked"
    elif one_node > partition.nodes.devices:
        return f"a node of {partition.id} has {partition.nodes.devices} devices, {one_node} asked"
    return ""


def duplicates(specs: Sequence[JobSpec]) -> list[Problem]:
    """Return a problem for every two tests that would share one series."""
    seen: dict[tuple[str, str, str, str], str] = {}
    problems = []
    for spec in specs:
        if spec.about_nodes:
            continue  # it is never compared with anything
        target = spec.target
        series = (target.partition.id, target.environment.name, spec.node, spec.benchmark)
        first = seen.setdefault(series, spec.node_id)
        if first != spec.node_id:
            text = f"has the same key as {first}: {spec.benchmark}; give one of them another name="
            problems.append(Problem(spec.node_id, "name", text))
    return problems


def _wrong_command(spec: JobSpec) -> list[tuple[str, str]]:
    found = []
    if not spec.argv or not spec.argv[0]:
        found.append(("argv", "names no program; give a list such as ['./bench', '-n', '4']"))
    if any("\0" in argument for argument in spec.argv):
        found.append(("argv", "holds a NUL character"))
    if not spec.metrics:
        found.append(("metrics", "names no metric, so nothing would be measured"))
    for name, rule in spec.metrics.items():
        found += [(f"metrics.{name}", text) for text in _wrong_metric(name, rule)]
    return found


def _wrong_metric(name: Any, rule: Any) -> list[str]:
    if not isinstance(name, str) or not _METRIC_NAME.match(name):
        return ["a metric's name is snake_case of at most 64 characters"]
    if not isinstance(rule, Mapping):
        return [f"expected a mapping of pattern, unit and better, found {rule!r}"]
    texts = []
    for key in rule:
        if key not in {"pattern", "unit", "better"}:
            hint = nearest(str(key), ("pattern", "unit", "better"))
            texts.append(f"unknown key {key!r}" + (f" (did you mean {hint!r}?)" if hint else ""))
    if rule.get("unit") not in UNITS:
        texts.append(f"unit {rule.get('unit')!r} is not one of {', '.join(UNITS)}")
    if rule.get("better") not in BETTER:
        texts.append(f"better {rule.get('better')!r} is not one of {', '.join(BETTER)}")
    if rule.get("pattern") is not None and (text := wrong_pattern(rule["pattern"])):
        texts.append(text)
    return texts
