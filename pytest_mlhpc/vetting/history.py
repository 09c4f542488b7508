"""What earlier vettings found: their journal, how often each node was unfit, what good ones reach, and repeated offenders.

    vetting/history/YYYY-MM-DD/<writer>.jsonl   a line for each node, one for each quantity's figures: small, permanent
    vetting/reports/YYYY-MM-DD/<writer>.jsonl   all that nodes said, to be used again (``reuse.py``): taken away after days

Lines of one vetting are one write, synced. Whoever dies while writing leaves a torn last line, which readers name and skip.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node.files import append_lines, read_json
from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.node.vet.figures import mad
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
from pytest_mlhpc.node.vet.verdict_files import node_name
from pytest_mlhpc.store.locations import is_shared, make_directories
from pytest_mlhpc.store.store import read_lines

HISTORY, REPORTS = "history", "reports"

#: How the folder of one day is called.
_DAY = "%Y-%m-%d"

#: A writer whose clock is that far ahead cannot be believed, in ns.
AHEAD_NS = 3_600_000_000_000

_WRITER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")

#: Where a line of figures says what they are of; see :func:`quantity_of`.
QUANTITY = re.compile(rb'"key":"(?:[^"\\]|\\.)*","model":"(?:[^"\\]|\\.)*"')

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class NodeEntry:
    """What one vetting said of one node.

    ``host`` is the node's own name, ``fitness`` a Fitness's value, ``reason`` the worst one with its prefix; ``scope`` says what
    was left out: empty (nothing), ``single`` (what takes several nodes), ``no_load`` (what computes; it implies the other).
    """

    vetting: str
    at_ns: int
    system: str
    partition: str
    level: str
    scope: str
    host: str
    boot_id: str
    fitness: str
    reason: str = ""
    check: str = ""  #: of the worst finding, where there is trouble
    device: str = ""
    kind: str = "node"
    schema: int = SCHEMA


@dataclass(frozen=True)
class FigureEntry:
    """Figures of one quantity in one vetting: host of a good node -> a value for each of its devices, in ``unit``."""

    vetting: str
    at_ns: int
    system: str
    partition: str
    key: str
    model: str
    unit: str
    values: Mapping[str, tuple[float, ...]]
    kind: str = "figures"
    schema: int = SCHEMA


@dataclass(frozen=True)
class EpochEntry:
    """From here on figures are learned anew: driver, firmware or the machine itself have changed, as ``reason`` says."""

    at_ns: int
    system: str
    partition: str
    reason: str
    user: str
    kind: str = "epoch"
    schema: int = SCHEMA


def append(state_dir: Path, what: str, writer: str, at_ns: int, entries: Sequence[Any]) -> Path | None:
    """Append *entries* in one durable write to the writer's own file; return it, None where there is nothing to write.

    Where the state directory is writable for its group, so is what is made in it: users can share one.

    Args:
        state_dir: the state directory.
        what: :data:`HISTORY` or :data:`REPORTS`.
        writer: id of this session or vetting; nobody else writes a file of this name.
        at_ns: when, ns UTC; chooses the folder.
        entries: dataclasses of this module or of ``reuse.py``.

    Raises:
        StoreError: it cannot be written; nothing torn is left behind.
    """
    if not entries:
        return None
    if not _WRITER.match(writer):
        raise StoreError(f"{writer!r:.120} cannot be a file name")
    path = state_dir / "vetting" / what / day_of(at_ns) / f"{writer}.jsonl"
    try:
        lines = [json.dumps(to_json(entry), allow_nan=False, separators=(",", ":")) for entry in entries]
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: a vetting cannot be stored as JSON: {error}") from error
    try:
        make_directories(path.parent, state_dir)
        _append(path, "".join(f"{line}\n" for line in lines).encode())
        if is_shared(state_dir):
            with contextlib.suppress(OSError):  # another user's file is as they made it
                path.chmod(0o664)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def _append(path: Path, content: bytes) -> None:
    """Append *content* whole, or leave the file as it was."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o664)
    try:
        append_lines(descriptor, content)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class JournalQuery:
    """What is looked for: entries from ``since_ns`` on whose fields equal ``where`` (``{"system": "alps"}``), as of ``now_ns``.

    Torn and damaged lines, a newer schema, files that cannot be read, and times that have not come yet are reported to
    ``on_problem`` and skipped.
    """

    since_ns: int
    now_ns: int
    where: Mapping[str, str] = field(default_factory=dict)
    on_problem: Callable[[str], None] | None = None

    def tell(self, problem: str) -> None:
        """Tell it, if anybody listens."""
        if self.on_problem is not None:
            self.on_problem(problem)

    def also(self, name: str, value: str) -> JournalQuery:
        """Return this query with one more field that is to be equal."""
        return replace(self, where={**self.where, name: value})


def node_entries_since(state_dir: Path, query: JournalQuery) -> Iterator[NodeEntry]:
    """Yield what is known of nodes, streaming, oldest day first."""
    for day in days_since(state_dir, HISTORY, query):
        yield from entries_of_day(state_dir, HISTORY, day, NodeEntry, query.also("kind", "node"))


def days_since(state_dir: Path, what: str, query: JournalQuery) -> list[str]:
    """Return the days of which there are files, oldest first."""
    folder, first = state_dir / "vetting" / what, day_of(query.since_ns)
    try:
        return sorted(path.name for path in folder.iterdir() if path.name >= first)
    except FileNotFoundError:
        return []
    except OSError as error:
        query.tell(f"{folder}: cannot be listed: {error.strerror}")
        return []


def entries_of_day(
    state_dir: Path,
    what: str,
    day: str,
    cls: type[Entry],
    query: JournalQuery,
    *,
    skip: Callable[[bytes], bool] = lambda _line: False,
) -> Iterator[Entry]:
    """Yield one day's entries of *cls*, files in order of name; *skip* may refuse lines before they are parsed."""
    unlike = _unlike(query.where)
    folder = state_dir / "vetting" / what / day
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    except OSError as error:
        query.tell(f"{folder}: cannot be listed: {error.strerror}")
        return
    for path in paths:
        try:
            for offset, line in read_lines(path, query.tell):
                if unlike(line) or skip(line):
                    continue
                entry = _entry(line, f"{path}: byte {offset}", cls, query)
                if entry is not None:
                    yield entry
        except StoreError as error:
            query.tell(str(error))


def _unlike(where: Mapping[str, str]) -> Callable[[bytes], bool]:
    """Return whether a line surely has another value of some field: most lines need not be parsed to be refused.

    All writers are :func:`append`, so a field and its value always stand there in the same bytes.
    """
    tokens = [
        (f'"{name}":'.encode(), f'"{name}":{json.dumps(value)}'.encode()) for name, value in where.items()
    ]
    return lambda line: any(whole not in line and name in line for name, whole in tokens)


def _entry(line: bytes, place: str, cls: type[Entry], query: JournalQuery) -> Entry | None:
    data = _parsed(line, place, query.tell)
    if data is None or any(data.get(name) != value for name, value in query.where.items()):
        return None
    at_ns = data.get("at_ns")
    if isinstance(at_ns, int) and at_ns < query.since_ns:
        return None
    if isinstance(at_ns, int) and at_ns > query.now_ns + AHEAD_NS:
        query.tell(f"{place}: is of a time that has not come yet (skipped, left as it is)")
        return None
    try:
        return from_json(cls, data)
    except SchemaError as error:
        query.tell(f"{place}: {error} (skipped, left as it is)")
        return None


def _parsed(line: bytes, place: str, tell: Callable[[str], None]) -> dict[str, Any] | None:
    try:
        data = read_json(line)
    except (ValueError, RecursionError) as error:
        tell(f"{place}: damaged line: {error} (skipped, left as it is)")
        return None
    if not isinstance(data, dict):
        tell(f"{place}: is no object (skipped, left as it is)")
        return None
    return data


def quantity_of(entry: FigureEntry) -> bytes:
    """Return how the quantity of *entry* stands in its line, as :data:`QUANTITY` finds it."""
    return f'"key":{json.dumps(entry.key)},"model":{json.dumps(entry.model)}'.encode()


def day_of(moment_ns: int) -> str:
    """Return the name of the folder for a moment, UTC."""
    return dt.datetime.fromtimestamp(max(0, moment_ns) / 1e9, tz=dt.UTC).strftime(_DAY)


#: How long an unfit node is excluded from later submissions, in seconds.
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
    """One vetting as it is stored: ``id`` unique, ``at_ns`` its end in ns UTC; system and partition may be empty where nobody knows."""

    id: str
    verdict: VetVerdict
    report: Report | None
    settings: VetSettings
    system: str = ""
    partition: str = ""
    at_ns: int = field(default_factory=time.time_ns)


def keep(state_dir: Path, vetting: StoredVetting, writer: str = "") -> None:
    """Add a vetting to the history, in the file of *writer* (a session's id; empty: the vetting's own).

    One that broke (exit 2 and 4) says nothing of nodes and is not stored. Without a report verdicts are stored, figures not.

    Raises:
        StoreError: it cannot be written.
    """
    if vetting.verdict.exit in {Exit.USAGE, Exit.INTERNAL}:
        return
    entries = [*node_entries(vetting), *figure_entries(vetting)]
    append(state_dir, HISTORY, writer or vetting.id, vetting.at_ns, entries)


def node_entries(vetting: StoredVetting) -> list[NodeEntry]:
    """Return what is stored of each node."""
    boots = {node.host: node.boot_id for node in vetting.report.nodes} if vetting.report else {}
    settings = vetting.settings
    scope = "no_load" if settings.no_load else "single" if settings.single else ""
    entries = []
    for node in vetting.verdict.nodes:
        worst = _worst(node)
        entry = NodeEntry(
            vetting.id, vetting.at_ns, vetting.system, vetting.partition, vetting.verdict.level, scope,
            node_name(node.host), boots.get(node.host, ""), node.fitness.value, worst.labelled_reason if worst else node.reason,
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
    """Return node -> why it is excluded from submissions: unfit by a problem of its own within *exclude_s* seconds.

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
