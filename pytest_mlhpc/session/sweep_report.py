"""What a sweep found: each node against the median of its peers, as tables and as ``sweep.json``.

The rule is that of node vetting: a figure is marked beyond max(3.5 robust sigma, 3 %), robust sigma being 1.4826 x MAD.
Of an honest machine with a spread of 1 % that marks next to none, and it does not go blind when several nodes are slow, as
a mean with its standard deviation would (F. Hampel, "The influence curve and its role in robust estimation", JASA 69, 1974).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA, drop
from pytest_mlhpc.node.private import make_private
from pytest_mlhpc.session.sweep import NotMeasured, Sweep
from pytest_mlhpc.store.files import make_directories
from pytest_mlhpc.store.text import figure, one_line, quantity, table

SCHEMA: Final = 1
#: A node is marked beyond so many robust sigmas of its peers, and never below the second figure.
SIGMAS, SMALLEST = 3.5, 0.03
#: With fewer nodes, or more than this share of them beyond the bound, the median may itself be that of unfit nodes.
FEWEST, SHARE = 4, 1 / 3
#: Most rows of a table on the terminal; marked nodes are always shown.
MOST_ROWS = 40
#: Most metrics of a test that are shown where it names none.
MOST_METRICS = 3


@dataclass(frozen=True)
class NodeFigure:
    """``deviation`` is relative to the peers' median, None where that is zero; ``mark`` is worse, better or empty."""

    node: str
    value: float
    deviation: float | None
    mark: str = ""


@dataclass(frozen=True)
class Comparison:
    """One metric of one test over all nodes, worst first. ``limit`` is relative; ``note`` says why nothing is marked."""

    metric: str
    unit: str
    better: str
    median: float
    sigma: float
    limit: float
    nodes: tuple[NodeFigure, ...]
    note: str = ""


@dataclass(frozen=True)
class TestTable:
    """All metrics of one test on one partition."""

    __test__ = False  # for pytest, whose tests' names begin like this

    partition: str
    environment: str
    name: str
    benchmark: str
    metrics: tuple[Comparison, ...]


def compare(metric: str, unit: str, better: str, values: Mapping[str, float]) -> Comparison:
    """Return *values* (node -> value, at least one) against their median, worst first. Pure."""
    median = statistics.median(values.values())
    if not median > 0:
        figures = tuple(NodeFigure(node, value, None) for node, value in values.items())
        return Comparison(metric, unit, better, median, 0.0, SMALLEST, figures, "the median is not positive")
    mad = statistics.median(abs(value - median) for value in values.values())
    sigma = MAD_TO_SIGMA * mad / median
    limit = max(SIGMAS * sigma, SMALLEST)
    beyond = [node for node, value in values.items() if abs(value - median) / median > limit]
    note = ""
    if len(values) < FEWEST:
        note = f"fewer than {FEWEST} nodes: none is marked"
    elif len(beyond) > len(values) * SHARE:
        note = f"{len(beyond)} of {len(values)} nodes are far from the median: who is right is not known"
    figures = tuple(
        NodeFigure(
            node,
            value,
            value / median - 1,
            "" if node not in beyond or len(values) < FEWEST else _mark(value, median, better),
        )
        for node, value in sorted(values.items(), key=lambda pair: -_badness(pair[1], median, better))
    )
    return Comparison(metric, unit, better, median, sigma, limit, figures, note)


def _badness(value: float, median: float, better: str) -> float:
    return abs(value - median) / median if better == "none" else drop(value, median, better)


def _mark(value: float, median: float, better: str) -> str:
    if better == "none":
        return "differs"
    return "worse" if drop(value, median, better) > 0 else "better"


def tables_of(jobs: Iterable[Job]) -> tuple[TestTable, ...]:
    """Return a table for each test that was measured on any node."""
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        target = job.spec.target
        groups.setdefault((target.partition.id, target.environment.name, job.spec.benchmark), []).append(job)
    return tuple(
        TestTable(partition, environment, group[0].spec.name, benchmark, _comparisons(group))
        for (partition, environment, benchmark), group in groups.items()
        if any(_figures(job) for job in group)
    )


def _comparisons(group: Sequence[Job]) -> tuple[Comparison, ...]:
    spec = group[0].spec
    by_node = {job.spec.node: _figures(job) for job in group}
    described = {name: one for figures in by_node.values() for name, one in figures.items()}
    names = list(spec.judged or spec.expected_metrics) or list(described)[:MOST_METRICS]
    found = []
    for name in names:
        if name in described:
            _, unit, better = described[name]
            values = {node: figures[name][0] for node, figures in by_node.items() if name in figures}
            found.append(compare(name, unit, better, values))
    return tuple(found)


def _figures(job: Job) -> dict[str, tuple[float, str, str]]:
    """Return metric -> value (median of the attempts), unit, better, of attempts without a fault."""
    measured = [one.measurement for one in job.attempts if one.measurement is not None and not one.failures]
    values: dict[str, list[float]] = {}
    described: dict[str, tuple[str, str]] = {}
    for measurement in measured:
        for metric in measurement.metrics:
            values.setdefault(metric.name, []).append(metric.value)
            described[metric.name] = (metric.unit, metric.better)
    return {name: (statistics.median(all_), *described[name]) for name, all_ in values.items()}


def not_measured(sweep: Sweep, jobs: Iterable[Job]) -> tuple[NotMeasured, ...]:
    """Return nodes that were left out, then those whose runs gave no figure, with the reason."""
    failed = []
    for job in jobs:
        failure = job.outcome.failure if job.outcome else None
        sound = job.outcome is not None and failure is None  # nodes were held, for the test to use
        if not _figures(job) and not sound:
            words = one_line(f"{failure.outcome}: {failure.text}") if failure else "no result"
            failed.append(
                NotMeasured(job.spec.target.partition.id, job.spec.node, f"{job.spec.name}: {words}")
            )
    return (*sweep.left_out, *failed)


def lines_of(tables: Sequence[TestTable], missing: Sequence[NotMeasured]) -> list[str]:
    """Return what the terminal shows."""
    lines: list[str] = []
    for one in tables:
        lines.append(f"{one.name} on {one.partition}, each node against the median of all:")
        lines += [f"  {line}" for line in _rows(one)]
        for metric in one.metrics:
            bound = f"median {quantity(metric.median, metric.unit)}, bound {metric.limit:.1%}"
            lines.append(f"  {metric.metric}: {bound}" + (f"; {metric.note}" if metric.note else ""))
    if missing:
        lines.append("nodes not measured:")
        lines += [f"  {one.node} ({one.partition}): {one.reason}" for one in missing]
    return lines


def _rows(one: TestTable) -> list[str]:
    by_node: dict[str, dict[str, NodeFigure]] = {}
    for metric in one.metrics:
        for found in metric.nodes:
            by_node.setdefault(found.node, {})[metric.metric] = found

    def worst(item: tuple[str, dict[str, NodeFigure]]) -> float:
        found = [(item[1].get(m.metric), m) for m in one.metrics if m.median > 0]
        return max((_badness(f.value, m.median, m.better) for f, m in found if f is not None), default=0.0)

    ordered = sorted(by_node.items(), key=worst, reverse=True)
    marked = [item for item in ordered if any(found.mark for found in item[1].values())]
    shown = [item for item in ordered if item in marked or item in ordered[:MOST_ROWS]]
    head = ["node"]
    for metric in one.metrics:
        head += [f"{metric.metric} [{metric.unit}]", "vs peers"]
    rows = [[*head, ""]]
    for node, figures in shown:
        row = [node]
        for metric in one.metrics:
            row += _cells(figures.get(metric.metric))
        rows.append([*row, ", ".join(f"{n}: {f.mark}" for n, f in figures.items() if f.mark)])
    lines = table(rows).splitlines()
    if len(shown) < len(ordered):
        lines.append(f"... and {len(ordered) - len(shown)} more nodes within the bound")
    return lines


def _cells(found: NodeFigure | None) -> list[str]:
    if found is None:
        return ["-", "-"]
    return [
        figure(found.value),
        "-" if found.deviation is None else f"{round(found.deviation, 3) + 0.0:+.1%}",
    ]


def write(
    folder: Path,
    sweep: Sweep,
    tables: Sequence[TestTable],
    *,
    state_dir: Path,
    missing: Sequence[NotMeasured],
    overrides: Mapping[str, str],
) -> Path:
    """Write ``sweep.json`` below *folder* and return its path; an earlier one is replaced whole.

    Raises:
        StoreError: it cannot be written.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "created_ns": time.time_ns(),
        "which": sweep.which,
        "overrides": dict(overrides),
        "nodes": sweep.nodes,
        "tests": [asdict(one) for one in tables],
        "not_measured": [asdict(one) for one in missing],
    }
    path, new = folder / "sweep.json", folder / "sweep.json.new"
    try:
        make_directories(folder.parent, state_dir)
        make_private(folder)
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {error.strerror}") from error
    return path
