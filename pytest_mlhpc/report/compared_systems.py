"""The columns of a comparison: which machines were meant by ``SYSTEM[:PARTITION]``, and how each is called. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pytest_mlhpc.errors import UsageError, did_you_mean, nearest
from pytest_mlhpc.report.keys import Benchmark, parse
from pytest_mlhpc.store.text import one_line


@dataclass(frozen=True, order=True)
class MeasuredMachine:
    """What a figure was measured on. ``device_model`` is empty where a run reported none: programs, broken runs."""

    system: str
    partition: str
    environment: str = ""
    device_model: str = ""
    fingerprint: str = ""

    @property
    def id(self) -> str:
        """``SYSTEM:PARTITION``."""
        return f"{self.system}:{self.partition}"


@dataclass(frozen=True)
class VerdictCount:
    """How many first attempts of one benchmark ended with one verdict on one machine: ever, and in the time asked for."""

    machine: MeasuredMachine
    benchmark: Benchmark
    verdict: str
    total: int
    recent: int
    newest_ns: int


@dataclass(frozen=True)
class MachineColumn:
    """One machine.

    ``heading`` is its name in parts; ``sources`` are the machines whose accepted runs are its own, ``also`` those whose
    broken runs may be.
    """

    machine: MeasuredMachine
    heading: tuple[str, ...] = ()
    sources: frozenset[MeasuredMachine] = frozenset()
    also: frozenset[MeasuredMachine] = field(default=frozenset())

    @property
    def name(self) -> str:
        """Its name in one line."""
        return " ".join(self.heading)


def choose(
    names: Sequence[str], counts: Sequence[VerdictCount], accepted: Sequence[str]
) -> tuple[MachineColumn, ...]:
    """Return the columns in the order of *names*; each ``SYSTEM`` or ``SYSTEM:PARTITION``.

    Raises:
        UsageError: a word comes twice, or nothing was ever recorded under it; with the nearest that was.
    """
    known = sorted({(one.machine.system, one.machine.partition) for one in counts})
    chosen: list[tuple[str, str]] = []
    for place, word in enumerate(names):
        if word in names[:place]:
            raise UsageError(f"{word!r} is named twice; a machine is compared with another one")
        system, colon, partition = word.partition(":")
        found = [one for one in known if one[0] == system and (not colon or one[1] == partition)]
        if not found:
            raise _unknown(word, known)
        chosen += [one for one in found if one not in chosen]
    by_place: dict[tuple[str, str], list[VerdictCount]] = {one: [] for one in chosen}
    for one in counts:
        if (one.machine.system, one.machine.partition) in by_place:
            by_place[one.machine.system, one.machine.partition].append(one)
    machines = {place: _machines(found, accepted) for place, found in by_place.items()}
    columns = [column for place in chosen for column in machines[place]]
    return tuple(
        replace(column, heading=heading) for column, heading in zip(columns, _headings(columns), strict=True)
    )


def _unknown(word: str, known: Sequence[tuple[str, str]]) -> UsageError:
    names = [*dict.fromkeys(system for system, _ in known), *(f"{s}:{p}" for s, p in known)]
    partitions = [f"{s}:{p}" for s, p in known if s == word.partition(":")[0]]
    meant = did_you_mean(word, partitions or names) or nearest(word, names)
    listed = partitions or [f"{s}:{p}" for s, p in known]
    shown = ", ".join(one_line(name, 60) for name in listed[:20]) + (", ..." if len(listed) > 20 else "")
    return UsageError(f"nothing is recorded for {word!r}{meant}; there are records of {shown}")


def _machines(counts: Iterable[VerdictCount], accepted: Sequence[str]) -> list[MachineColumn]:
    """Return the columns of one partition: one for each environment and device model, those with figures first."""
    recent = {one.machine for one in counts if one.recent}
    good = {one.machine for one in counts if one.recent and one.verdict in accepted}
    everything = {one.machine for one in counts}
    if not recent:
        place = next(iter(everything))
        return [MachineColumn(MeasuredMachine(place.system, place.partition), also=frozenset(everything))]
    columns: list[MachineColumn] = []
    for nameless in sorted({replace(machine, device_model="") for machine in recent}):
        same = {machine for machine in everything if replace(machine, device_model="") == nameless}
        models = sorted(machine for machine in good & same if machine.device_model)
        if not models:
            columns.append(MachineColumn(nameless, sources=frozenset({nameless}), also=frozenset(same)))
            continue
        for machine in models:
            also = frozenset({machine, nameless})
            # A program says no device model; where the partition has one only, it ran on that.
            sources = also if len(models) == 1 else frozenset({machine})
            columns.append(MachineColumn(machine, sources=sources, also=also))
        if len(models) > 1 and nameless in good:
            columns.append(MachineColumn(nameless, sources=frozenset({nameless}), also=frozenset({nameless})))
    return sorted(columns, key=lambda column: (not (column.sources & good), column.machine))


def _headings(columns: Sequence[MachineColumn]) -> list[tuple[str, ...]]:
    """Return each column's name in parts: partition, and environment, device model and fingerprint where they differ."""
    made: list[tuple[str, ...]] = []
    for column in columns:
        machine = column.machine
        parts = [one_line(machine.id, 80)]
        peers = [other.machine for other in columns if other.machine.id == machine.id]
        for name in ("environment", "device_model", "fingerprint"):
            if len({getattr(peer, name) for peer in peers}) > 1:
                text = one_line(getattr(machine, name), 80)
                parts.append(text or f"(no {name.replace('_', ' ')})")
                peers = [peer for peer in peers if getattr(peer, name) == getattr(machine, name)]
        made.append(tuple(parts))
    return [
        (*parts, f"#{made[:n].count(parts) + 1}") if made.count(parts) > 1 else parts
        for n, parts in enumerate(made)
    ]


def benchmarks_of(
    text: str, columns: Sequence[MachineColumn], everything: Sequence[VerdictCount]
) -> tuple[frozenset[Benchmark], list[VerdictCount]]:
    """Return the benchmarks of these machines whose name or definition holds *text*, and all that was seen of the machines.

    Raises:
        UsageError: none holds it; names the nearest test or workload.
    """
    machines = frozenset().union(*(column.sources | column.also for column in columns))
    counts = [one for one in everything if one.machine in machines]
    known = {one.benchmark for one in counts}
    chosen = frozenset(one for one in known if one.holds(text))
    if known and not chosen:
        parsed = [key for one in sorted(known) if (key := parse(one)) is not None]
        meant = did_you_mean(text, dict.fromkeys(word for key in parsed for word in (key.name, key.workload)))
        raise UsageError(f"no benchmark of these machines holds {text!r}{meant}")
    return chosen, counts
