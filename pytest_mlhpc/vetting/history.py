"""What is known of nodes from earlier vettings: how often each was unfit, what good ones reach, and repeated offenders."""

from __future__ import annotations

import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.finding import (
    Exit,
    Finding,
    Fitness,
    NodeVerdict,
    Origin,
    Report,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.statistics import mad
from pytest_mlhpc.node.vet.text import reason
from pytest_mlhpc.node.vet.verdict_files import node_name
from pytest_mlhpc.vetting.journal import (
    HISTORY,
    QUANTITY,
    EpochEntry,
    FigureEntry,
    JournalQuery,
    NodeEntry,
    append,
    days_since,
    entries_of_day,
    node_entries_since,
    quantity_of,
)

#: How long an unfit node is kept out of later submissions, in seconds.
EXCLUDE_S = 86400.0

#: Figures are learned from so many days: a driver or firmware of last year is another machine.
LEARN_S = 90 * 86400.0

#: Fewest figures and vettings from which anything is learned, and most vettings (the latest ones) that count.
LEAST_FIGURES, LEAST_VETTINGS, MOST_VETTINGS = 20, 5, 30

#: A node's score is the best of its first rounds, as many as a quick vetting has: the best of more would be higher.
PAIR_ROUNDS = 3

#: Key, model, unit.
Quantity = tuple[str, str, str]

_NODE_PROBLEM = f"[{Origin.NODE.value}]"


@dataclass(frozen=True)
class StoredVetting:
    """One vetting as it is kept: ``id`` unique, ``at_ns`` its end in ns UTC; system and partition may be empty where nobody knows."""

    id: str
    verdict: VetVerdict
    report: Report | None
    settings: VetSettings
    system: str = ""
    partition: str = ""
    at_ns: int = field(default_factory=time.time_ns)


def keep(state_dir: Path, vetting: StoredVetting, writer: str = "") -> None:
    """Add a vetting to the history, in the file of *writer* (a session's id; empty: the vetting's own).

    One that broke (exit 2 and 4) says nothing of nodes and is not kept. Without a report verdicts are kept, figures not.

    Raises:
        StoreError: it cannot be written.
    """
    if vetting.verdict.exit in {Exit.USAGE, Exit.INTERNAL}:
        return
    entries = [*node_entries(vetting), *figure_entries(vetting)]
    append(state_dir, HISTORY, writer or vetting.id, vetting.at_ns, entries)


def node_entries(vetting: StoredVetting) -> list[NodeEntry]:
    """Return what is kept of each node."""
    boots = {node.host: node.boot_id for node in vetting.report.nodes} if vetting.report else {}
    settings = vetting.settings
    scope = "no_load" if settings.no_load else "single" if settings.single else ""
    entries = []
    for node in vetting.verdict.nodes:
        worst = _worst(node)
        entry = NodeEntry(
            vetting.id, vetting.at_ns, vetting.system, vetting.partition, vetting.verdict.level, scope,
            node_name(node.host), boots.get(node.host, ""), node.fitness.value, reason(worst) if worst else node.reason,
            worst.check if worst else "", worst.device if worst else "",
        )  # fmt: skip
        entries.append(entry)
    return entries


def _worst(node: NodeVerdict) -> Finding | None:
    """Return what is to be remembered of a node: a fault of its own before one of its user's; None without trouble."""
    if not node.reason:
        return None
    critical = [finding for finding in node.findings if finding.severity is Severity.CRITICAL]
    own = [finding for finding in critical if finding.origin is Origin.NODE]
    return next(iter([*own, *node.findings]), None)


def figure_entries(vetting: StoredVetting) -> list[FigureEntry]:
    """Return the figures of good nodes: each device's mean of its rounds, each node's best exchange.

    Those that had nothing to be compared with are among them: else a kind of node without floor would never get a history.
    """
    if vetting.report is None:
        return []
    good = set(vetting.verdict.good)
    common = (vetting.id, vetting.at_ns, vetting.system, vetting.partition)
    entries = []
    for (key, model, unit), figures in [*_readings(vetting.report, good), *_scores(vetting.report, good)]:
        values: dict[str, tuple[float, ...]] = {}
        for host, value in figures:
            values[node_name(host)] = (*values.get(node_name(host), ()), value)
        entries.append(FigureEntry(*common, key, model, unit, values))
    return entries


def _readings(report: Report, good: Collection[str]) -> Iterator[tuple[Quantity, list[tuple[str, float]]]]:
    """Yield each quantity with host and mean of the rounds for every device of good nodes; without a model nothing compares."""
    rounds: dict[Quantity, dict[tuple[str, str], list[float]]] = {}
    for node in report.nodes:
        if node.host not in good:
            continue
        for reading in (one for outcome in node.outcomes for one in outcome.readings):
            if reading.model:
                devices = rounds.setdefault((reading.key, reading.model, reading.unit), {})
                devices.setdefault((node.host, reading.device), []).append(reading.value)
    for quantity, devices in rounds.items():
        yield quantity, [(host, statistics.fmean(values)) for (host, _), values in devices.items()]


def _scores(report: Report, good: Collection[str]) -> Iterator[tuple[Quantity, list[tuple[str, float]]]]:
    """Yield each kind of exchange with host and best value for every good node."""
    best: dict[Quantity, dict[str, float]] = {}
    for pair in report.pairs:
        if pair.trouble or pair.stage != "rounds" or pair.round >= PAIR_ROUNDS:
            continue
        scores = best.setdefault((pair.key, "", "B/s"), {})
        for host in (pair.first, pair.second):
            if host in good:
                scores[host] = max(pair.value, scores.get(host, pair.value))
    yield from ((quantity, list(scores.items())) for quantity, scores in best.items() if scores)


def learned(
    state_dir: Path,
    system: str,
    partition: str,
    now_ns: int,
    *,
    hosts: Collection[str] = (),
    on_problem: Callable[[str], None] | None = None,
) -> tuple[Learned, ...]:
    """Return what good nodes of a partition reach, for ``settings.Settings``: see :func:`learn` and, of *hosts*, :func:`learn_own`.

    Days are read from the latest on; of a quantity that was measured often enough, lines of earlier days are not even parsed.
    What was measured before figures were forgotten (:func:`forget`) teaches nothing.
    """
    place = JournalQuery(
        now_ns - int(LEARN_S * 1e9), now_ns, {"system": system, "partition": partition}, on_problem
    )
    query, marks = place.also("kind", "figures"), place.also("kind", "epoch")
    found: list[FigureEntry] = []
    vettings: dict[bytes, set[str]] = {}
    for day in reversed(days_since(state_dir, HISTORY, query)):
        done = {quantity for quantity, ids in vettings.items() if len(ids) >= MOST_VETTINGS}
        skip = partial(_is_of, done)
        epochs = [entry.at_ns for entry in entries_of_day(state_dir, HISTORY, day, EpochEntry, marks)]
        for entry in entries_of_day(state_dir, HISTORY, day, FigureEntry, query, skip=skip):
            if not epochs or entry.at_ns > max(epochs):
                found.append(entry)
                vettings.setdefault(quantity_of(entry), set()).add(entry.vetting)
        if epochs:
            break
    return (*learn(found), *learn_own(found, hosts))


def forget(state_dir: Path, entry: EpochEntry) -> None:
    """Have figures of a partition learned anew from now on; nothing is deleted.

    Raises:
        StoreError: it cannot be written.
    """
    append(state_dir, HISTORY, f"epoch-{uuid.uuid4().hex}", entry.at_ns, [entry])


def _is_of(quantities: Collection[bytes], line: bytes) -> bool:
    match = QUANTITY.search(line)
    return match is not None and match[0] in quantities


def learn(entries: Iterable[FigureEntry]) -> tuple[Learned, ...]:
    """Return median and spread of each quantity over the latest vettings, where enough of both are there."""
    found = []
    for (key, model), latest in _latest(entries).items():
        figures = [value for entry in latest for values in entry.values.values() for value in values]
        if len({entry.vetting for entry in latest}) < LEAST_VETTINGS or len(figures) < LEAST_FIGURES:
            continue
        found.append(_learned(key, model, figures))
    return tuple(found)


def learn_own(entries: Iterable[FigureEntry], hosts: Collection[str]) -> tuple[Learned, ...]:
    """Return what each of *hosts* has itself reached, however seldom it was vetted."""
    found = []
    for (key, model), latest in _latest(entries).items():
        for host in hosts if model else ():
            name = node_name(host)
            figures = [value for entry in latest for value in entry.values.get(name, ())]
            if figures:
                found.append(_learned(key, model, figures, host))
    return tuple(found)


def _latest(entries: Iterable[FigureEntry]) -> dict[tuple[str, str], list[FigureEntry]]:
    """Return the latest entries of each quantity."""
    groups: dict[tuple[str, str], list[FigureEntry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.at_ns):
        groups.setdefault((entry.key, entry.model), []).append(entry)
    return {quantity: group[-MOST_VETTINGS:] for quantity, group in sorted(groups.items())}


def _learned(key: str, model: str, figures: Sequence[float], host: str = "") -> Learned:
    middle = statistics.median(figures)
    return Learned(key, model, middle, mad(figures, middle), len(figures), host)


def excluded(
    state_dir: Path,
    system: str,
    partition: str,
    now_ns: int,
    *,
    exclude_s: float = EXCLUDE_S,
    on_problem: Callable[[str], None] | None = None,
) -> dict[str, str]:
    """Return node -> why it is kept out of submissions: unfit by a problem of its own within *exclude_s* seconds.

    It ends early when a later vetting that looked as closely passed the node: one without load sees no slow GPU, but as many
    devices.
    """
    query = JournalQuery(
        now_ns - int(exclude_s * 1e9), now_ns, {"system": system, "partition": partition}, on_problem
    )
    return unfit_now(node_entries_since(state_dir, query))


def unfit_now(entries: Iterable[NodeEntry]) -> dict[str, str]:
    """Return the nodes whose last word is that they are unfit, with the reason."""
    found: dict[str, NodeEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.at_ns):
        if is_offence(entry):
            found[entry.host] = entry
        elif _passes(entry, found.get(entry.host)):
            del found[entry.host]
    return {host: entry.reason for host, entry in sorted(found.items())}


def is_offence(entry: NodeEntry) -> bool:
    """Whether a node was found unfit by a problem of its own."""
    return entry.fitness == Fitness.UNFIT.value and entry.reason.startswith(_NODE_PROBLEM)


def _passes(entry: NodeEntry, offence: NodeEntry | None) -> bool:
    """Whether *entry* ends the exclusion for *offence*."""
    if offence is None or entry.fitness != Fitness.FIT.value:
        return False
    if _closeness(entry) >= _closeness(offence):
        return True
    from pytest_mlhpc.node.vet.checks import names_of

    return offence.check in names_of(purpose="", level=entry.level, unloaded=True)


def _closeness(entry: NodeEntry) -> tuple[int, int]:
    """Return how closely a vetting looked: what it left out, then its level."""
    scopes: Sequence[str] = ("no_load", "single", "")
    return (scopes.index(entry.scope) if entry.scope in scopes else 0, int(entry.level == "deep"))


@dataclass
class Offender:
    """A node's past: ``vettings`` it was in, how often it was unfit, in which checks, and when last (ns UTC) and why."""

    host: str
    system: str
    partition: str
    vettings: int = 0
    unfit: int = 0
    unknown: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    last_ns: int = 0
    last_reason: str = ""


def offenders(entries: Iterable[NodeEntry]) -> tuple[list[Offender], int]:
    """Return the nodes that were ever unfit by a problem of their own, repeated offenders first, and how many never were."""
    found: dict[tuple[str, str, str], Offender] = {}
    for entry in entries:
        place = (entry.system, entry.partition, entry.host)
        node = found.setdefault(place, Offender(entry.host, entry.system, entry.partition))
        node.vettings += 1
        node.unknown += entry.fitness == Fitness.UNKNOWN.value
        if is_offence(entry):
            node.unfit += 1
            node.checks[f"{entry.check} {entry.device}".strip() or "unknown"] += 1
            if entry.at_ns >= node.last_ns:
                node.last_ns, node.last_reason = entry.at_ns, entry.reason
    bad = [node for node in found.values() if node.unfit]
    bad.sort(key=lambda node: (-node.unfit, -node.unfit / node.vettings, -node.last_ns, node.host))
    return bad, len(found) - len(bad)
