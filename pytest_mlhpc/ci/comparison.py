"""What a change did to benchmarks: which records a pipeline is about, and their comparison as plain data, Markdown and OpenMetrics."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.node.protocol.schema import SCHEMA
from pytest_mlhpc.report.morning import Morning, change_morning
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import FINE, GOOD, NOTABLE, WORSE, Epoch, Record, SeriesKey, Verdict
from pytest_mlhpc.store.text import markdown_row, markdown_table, one_line

#: Nights of the default branch whose median a change is compared with.
NIGHTS = 5


@dataclass(frozen=True)
class MetricRow:
    """One judged metric of one benchmark. ``change`` and ``nightly_change`` are shares, positive when better."""

    test: str
    metric: str
    unit: str
    verdict: str
    value: float
    accepted: float | None = None
    change: float | None = None
    nightly: float | None = None  #: median of the last nights of the default branch
    nightly_change: float | None = None
    nights: int = 0


@dataclass(frozen=True)
class BenchmarkTrouble:
    """A benchmark that did not pass, with the judge's text or that of its failure."""

    test: str
    verdict: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class CommitComparison:
    """All that was measured of one commit on one system. ``page`` is its morning page."""

    system: str
    commit: str
    rows: tuple[MetricRow, ...] = ()
    troubles: tuple[BenchmarkTrouble, ...] = ()
    page: Morning = field(default_factory=lambda: Morning("change", "nothing was measured"))
    schema: int = SCHEMA


def compare(
    records: Iterable[Record],
    accepted: Callable[[SeriesKey, Epoch], Entry | None],
    nights: Callable[[SeriesKey, Epoch, int], Sequence[float]],
) -> list[CommitComparison]:
    """Return one comparison for each system and commit of *records*.

    Args:
        records: First attempts, each benchmark once for each commit.
        accepted: Finds the accepted value of a series.
        nights: Finds so many last figures of a series and an epoch in nights of the default branch.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.system, record.commit), []).append(record)
    found = []
    for (system, commit), members in sorted(groups.items()):
        rows = [row for one in members for row in _rows(one, accepted, nights)]
        troubles = [_trouble(one) for one in members if one.verdict not in {"passed", "unjudged"}]
        found.append(CommitComparison(system, commit, tuple(rows), tuple(troubles), change_morning(members)))
    return found


def _rows(
    record: Record,
    accepted: Callable[[SeriesKey, Epoch], Entry | None],
    nights: Callable[[SeriesKey, Epoch, int], Sequence[float]],
) -> Iterable[MetricRow]:
    for name in record.judged:
        metric = record.measurement.metric(name) if record.measurement else None
        if metric is None:
            continue
        key = record.series(name)
        entry, last = accepted(key, record.epoch), nights(key, record.epoch, NIGHTS)
        if entry is not None and changed(entry.epoch, record.epoch):
            entry = None
        middle = statistics.median(last) if last else None
        yield MetricRow(
            test=record.node_id,
            metric=name,
            unit=metric.unit,
            verdict=record.verdict,
            value=metric.value,
            accepted=entry.value if entry else None,
            change=_better_by(metric.value, entry.value if entry else None, metric.better),
            nightly=middle,
            nightly_change=_better_by(metric.value, middle, metric.better),
            nights=len(last),
        )


def _better_by(value: float, reference: float | None, better: str) -> float | None:
    return None if not reference or better == "none" else -drop(value, reference, better)


def _trouble(record: Record) -> BenchmarkTrouble:
    lines = record.explanation or tuple(record.failure.splitlines())
    return BenchmarkTrouble(record.node_id, record.verdict, lines[:20])


@dataclass(frozen=True)
class Selection:
    """Which records are asked for; an empty text is no condition."""

    since_ns: int = 0
    system: str = ""
    commit: str = ""  #: or how it begins
    changes: bool = False  #: only of merge requests, not of nights


def chosen(index: Index, wanted: Selection) -> list[Record]:
    """Return what is asked for, in the order in which it was recorded.

    Raises:
        StoreError: The records cannot be read.
    """
    return newest(
        one
        for one in index.since(wanted.since_ns)
        if (not wanted.system or one.system == wanted.system)
        and one.commit.startswith(wanted.commit)
        and (not wanted.changes or one.purpose == "change")
    )


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest first attempt of each benchmark of each commit on each machine, oldest first.

    Args:
        records: Newest first.
    """
    found: dict[tuple[str, ...], Record] = {}
    for one in records:
        if one.attempt == 0:
            # A run that failed before it had a device would else stand beside the one that was made again.
            found.setdefault(
                (one.commit, one.system, one.partition, one.environment, one.benchmark, one.node_id), one
            )
    return list(found.values())[::-1]


#: Rows and troubles that are shown, worst first; the rest is counted.
_MOST_ROWS, _MOST_TROUBLES = 100, 20
_ORDER = (*WORSE, "no_baseline", *NOTABLE)
_FINE = frozenset({*FINE, *GOOD, Verdict.SUSPECT})
#: What may be meant to be so, and can be accepted.
_MEANT = frozenset({*WORSE, Verdict.IMPROVED, Verdict.WRONG_BASELINE, "no_baseline"})


def marker(system: str) -> str:
    """Return what a comment is found again by: invisible where Markdown is shown."""
    return f"<!-- mlhpc comparison {re.sub('[^A-Za-z0-9_]', '-', system)} -->"


def render(comparison: CommitComparison) -> str:
    """Return the whole comment: the page as in a terminal, figures, and what did not pass in full."""
    parts = [marker(comparison.system), f"### Benchmarks on {code(comparison.system)}: {_counts(comparison)}"]
    parts.append(fenced("\n".join(comparison.page.lines())))
    rows = sorted(comparison.rows, key=_urgency)
    if rows:
        parts.append("Better is positive, whatever the metric's direction.")
        parts.append(_table(rows[:_MOST_ROWS]))
    if len(rows) > _MOST_ROWS:
        parts.append(f"{len(rows) - _MOST_ROWS} more are in the job's artefacts.")
    shown = sorted(comparison.troubles, key=lambda one: one.verdict in _FINE)
    for trouble in shown[:_MOST_TROUBLES]:
        parts.append(f"**{_word(trouble.verdict)}** {code(trouble.test)}")
        if trouble.lines:
            parts.append(fenced("\n".join(trouble.lines)))
    if len(shown) > _MOST_TROUBLES:
        parts.append(f"{len(shown) - _MOST_TROUBLES} more did not pass.")
    if any(one.verdict in _MEANT for one in comparison.troubles):
        parts.append(
            "A change that is meant to be so is accepted by a pipeline with `MLHPC_ACCEPT` (the test) and `MLHPC_REASON`, "
            "which makes a merge request of the new value."
        )
    return "\n\n".join(parts) + "\n"


def code(text: str) -> str:
    """Return *text* as code within a line or a cell of a table."""
    shown = one_line(text, 200).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else "`-`"


def fenced(text: str) -> str:
    """Return *text* as a block of code."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{clean(text)}\n{fence}"


def _counts(comparison: CommitComparison) -> str:
    ordered = sorted(comparison.page.counts.items(), key=lambda item: (_rank(item[0]), item[0]))
    return ", ".join(f"{int(count)} {_word(verdict)}" for verdict, count in ordered) or "nothing was measured"


def _table(rows: Sequence[MetricRow]) -> str:
    head = ("test", "metric", "now", "accepted", "better by", "last nights", "better by", "verdict")
    lines = markdown_table(head, ())
    for row in rows:
        now, accepted = _figure(row.value, row.unit), _figure(row.accepted, "")
        nightly = "" if row.nightly is None else f"{_figure(row.nightly, '')} (of {int(row.nights)})"
        verdict = _word(row.verdict) if row.verdict in _FINE else f"**{_word(row.verdict)}**"
        line = code(row.test), code(row.metric), now, accepted, _share(row.change), nightly
        lines.append(markdown_row((*line, _share(row.nightly_change), verdict)))
    return "\n".join(lines)


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.5g} {_plain(unit)}".strip()


def _share(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"


def _word(verdict: str) -> str:
    return re.sub("[^a-z_]", "", verdict)[:40].replace("_", " ")


def _plain(unit: str) -> str:
    return re.sub("[^A-Za-z0-9/]", "", unit)[:20]


def _urgency(row: MetricRow) -> tuple[int, float]:
    return _rank(row.verdict), row.change if row.change is not None else 0.0


def _rank(verdict: str) -> int:
    if verdict in _ORDER:
        return _ORDER.index(verdict)
    return len(_ORDER) if verdict not in _FINE else len(_ORDER) + 1


#: Base units of node/protocol/schema.py as suffixes of names. A unit without a word of its own has none.
_UNITS: Mapping[str, str] = {
    "1": "", "s": "seconds", "B": "bytes", "B/s": "bytes_per_second", "FLOP": "flop", "FLOP/s": "flop_per_second",
    "J": "joules", "W": "watts", "Hz": "hertz", "K": "kelvins", "samples": "samples",
    "samples/s": "samples_per_second", "samples/J": "samples_per_joule", "items": "items",
    "items/s": "items_per_second", "tokens": "tokens", "tokens/s": "tokens_per_second",
}  # fmt: skip
_VERDICTS_HELP = "1 for the verdict of the newest run, by label"


def openmetrics(records: Iterable[Record]) -> str:
    """Return one gauge for each metric, and ``mlhpc_verdict``; of one series measured twice the last counts."""
    families: dict[str, tuple[str, str, dict[str, str]]] = {}
    for record in records:
        labels = {
            "system": record.system,
            "partition": record.partition,
            "environment": record.environment,
            "test": record.node_id,
            "benchmark": record.benchmark,
        }
        verdicts = families.setdefault("mlhpc_verdict", ("", _VERDICTS_HELP, {}))[2]
        verdicts[_labels(labels)] = _labels({**labels, "verdict": record.verdict}) + " 1"
        for metric in record.measurement.metrics if record.measurement else ():
            unit = _UNITS.get(metric.unit, "")
            name = "_".join(word for word in ("mlhpc", metric.name, unit) if word)
            annotation = f"better: {metric.better}" + ("; judged" if metric.name in record.judged else "")
            samples = families.setdefault(name, (unit, annotation, {}))[2]
            samples[_labels(labels)] = f"{_labels(labels)} {metric.value!r}"
    lines = []
    for name, (unit, annotation, samples) in sorted(families.items()):
        lines.append(f"# TYPE {name} gauge")
        if unit:
            lines.append(f"# UNIT {name} {unit}")
        lines.append(f"# HELP {name} {_escaped(annotation)}")
        lines.extend(f"{name}{sample}" for sample in samples.values())
    return "".join(f"{line}\n" for line in [*lines, "# EOF"])


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    # Half of a character cannot be written at all; a carriage return would end a line for some readers.
    clean = text.encode("utf-8", "replace").decode().replace("\r", "\n")
    return clean.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
