"""What cannot be of a job spec: values beside one another or on its partition, and two tests of one identity. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import Problem, nearest
from pytest_mlhpc.jobs.programs import names_in
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.cores import ON_NODE
from pytest_mlhpc.node.worker.workloads.definitions import Workload
from pytest_mlhpc.node.worker.workloads.fields.quality import WINDOW, to_quality
from pytest_mlhpc.store.text import count

_OWN_NAME = "give one of them a name of its own (name='...'), or call its parameter `name`"
#: Shown in tables and file names: one line without control characters.
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}\Z")


def contradictions(spec: JobSpec, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (field, text) for values that are fine alone but not together."""
    found = []
    if not _NAME.match(spec.name):
        found.append(("name", f"{spec.name!r} is empty, too long or holds control characters"))
    if spec.agentless:
        found += _without_agent(spec)
    if spec.workload == "command":
        found += _wrong_command(spec)
    elif spec.steps < 1 and not spec.about_nodes:
        found.append(("steps", "a run of no steps measures nothing"))
    if to_quality(values):
        text = "means nothing with until='quality', which ends where the target is reached (see max_epochs, max_seconds)"
        found += [(key, text) for key in WINDOW if key in spec.asked]
    known = ["memory", "device", "files", *spec.target.datasets]
    data = values["data"]
    if data not in known and "/" not in data:
        hint = nearest(data, known)
        text = f"{data!r} is neither a data set of {spec.target.partition.system} nor a path"
        found.append(("data", text + (f" (did you mean {hint!r}?)" if hint else "")))
    return found


def unknown_judged(spec: JobSpec, workload: Workload, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is wrong with metrics that the test names to be judged, where all that may be reported are known."""
    if not isinstance(values["judge"], (list, tuple)):
        return []
    known = tuple(spec.metrics) or workload.may_report(values)
    unknown = [name for name in spec.judged if known and name not in known]
    hints = [(name, nearest(name, known)) for name in unknown]
    return [
        ("judge", f"{name} is not among the metrics" + (f" (did you mean {hint!r}?)" if hint else ""))
        for name, hint in hints
    ]


def lacking(spec: JobSpec) -> str:
    """Return what the partition does not have although *spec* asks for it, or an empty string."""
    partition = spec.target.partition
    if spec.node and spec.nodes > 1:
        return f"--mlhpc-each-node runs tests of one node, {spec.nodes} asked"
    if spec.nodes > partition.nodes.max:
        return f"{partition.id} gives at most {count(partition.nodes.max, 'node')}, {spec.nodes} asked"
    one_node = max(spec.ranks, spec.processes if partition.accelerator == "cpu" else 0) // spec.nodes
    if partition.accelerator == "cpu":
        if one_node > partition.nodes.cores:
            return (
                f"a node of {partition.id} has {count(partition.nodes.cores, 'core')}, {one_node} ranks asked"
            )
    elif one_node > partition.nodes.devices:
        return f"a node of {partition.id} has {count(partition.nodes.devices, 'device')}, {one_node} asked"
    return ""


def unfulfilled(requires: Sequence[str], partition: Partition) -> str:
    """Return what *partition* has, or has not, against a test's ``requires``; its kind of accelerator is a feature, too."""
    has = {*partition.features, partition.accelerator}
    found = [
        f"the feature {word[1:]!r}" if word.startswith("-") else f"no feature {word.removeprefix('+')!r}"
        for word in requires
        if (word.lstrip("+-") in has) == word.startswith("-")
    ]
    return f"{partition.id} has {' and '.join(found)}" if found else ""


def duplicates(specs: Sequence[JobSpec]) -> list[Problem]:
    """Return a problem for each test that would share its series with another one, which is named."""
    series: dict[tuple[str, str, str, str], list[str]] = {}
    for spec in specs:
        if not spec.about_nodes:  # such a run is compared with nothing
            target = spec.target
            key = (target.partition.id, target.environment.name, spec.node, spec.benchmark)
            series.setdefault(key, []).append(spec.node_id)
    return [
        Problem(
            node_id,
            "name",
            f"the test has the same identity as {same[0] if number else same[1]}; {_OWN_NAME}",
        )
        for same in series.values()
        if len(same) > 1
        for number, node_id in enumerate(same)
    ]


def _without_agent(spec: JobSpec) -> list[tuple[str, str]]:
    """Return what a program cannot have that is its container's own command."""
    place = f"{spec.target.partition.id} has no agent in its pods (kubernetes: {{agent: false}})"
    if spec.workload != "command":
        return [("", f"{place}, which only programs can do without")]
    found = []
    if spec.started > 1 and spec.started > spec.nodes:
        each = spec.started // spec.nodes
        found.append(
            ("ranks_per_node", f"{place}: a pod runs one process, {each} asked; say ranks_per_node=1")
        )
    if spec.nodes > 1 and spec.started == 1:
        found.append(
            ("nodes", f"{place} that would start it once; for one process on each node say ranks_per_node=1")
        )
    if spec.files:
        found.append(("files", f"{place} that would take them; put them on a volume, or into the image"))
    if spec.artifacts:
        text = f"{place} that would send them, or files of metrics; write to a volume, or print"
        found.append(("artifacts", text))
    if named := sorted(names_in((*spec.argv, *spec.env.values())) & spec.needs.keys()):
        found.append(
            (named[0], f"{place} that would take its artifacts; write to a volume, and name the path there")
        )
    if spec.builds:
        found.append((spec.builds[0].name, f"{place} that would build; build it into the image"))
    texts = (*spec.argv, *spec.env.values())
    if on_node := [name for name in ON_NODE if any(f"{{{name}}}" in text for text in texts)]:
        found.append(("command", f"{place} that would read {{{on_node[0]}}} on the node"))
    return found


def _wrong_command(spec: JobSpec) -> list[tuple[str, str]]:
    found = []
    if not spec.argv or not spec.argv[0]:
        found.append(("command", "names no program; write './bench -n 4' or ['./bench', '-n', '4']"))
    if any("\0" in argument for argument in spec.argv):
        found.append(("command", "holds a NUL character"))
    if spec.cwd is not None and spec.artifacts:
        found.append(
            (
                "artifacts",
                "are files of the run's own folder, as those of metrics are; leave out cwd, and name what the program reads by files",
            )
        )
    if spec.cwd is not None and spec.files:
        found.append(("files", "are put into the run's own folder; leave out cwd"))
    if spec.target.partition.apart and not spec.agentless:
        found += _not_apart(spec)
    return found


def _not_apart(spec: JobSpec) -> list[tuple[str, str]]:
    """Return what nodes apart cannot have of the runs that a program names: it finds their artifacts among its files."""
    nodes = "pods" if spec.target.partition.scheduler == "kubernetes" else "nodes behind ssh"
    found = []
    for name in sorted(names_in((*spec.argv, *spec.env.values())) & spec.needs.keys()):
        if not spec.needs[name].artifacts:
            text = f"{nodes} find its artifacts in that folder, and it has none; add artifacts=[...] to prepare(...)"
            found.append((name, text))
        if spec.cwd is not None:
            found.append((name, f"{nodes} find its artifacts in the run's own folder; leave out cwd"))
    return found
