"""Results of other tools become records: each once, whatever is killed and however often a source is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_mlhpc.history.foreign import ForeignRun, UnreadableRun
from pytest_mlhpc.jobs.spec import uuid7
from pytest_mlhpc.node.protocol.schema import Measurement, to_json
from pytest_mlhpc.store.definition import text_of
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.store import Store
from pytest_mlhpc.store.text import count, iso, tell
from pytest_mlhpc.store.verdict import Verdict

#: Problems and notes that a report shows, at most.
SHOWN = 5


@dataclass
class Ingested:
    """What became of a source's runs."""

    stored: int = 0
    known: int = 0  #: were stored before
    failed: int = 0  #: of the stored ones, those that measured nothing
    benchmarks: set[str] = field(default_factory=set)
    systems: set[str] = field(default_factory=set)
    first_ns: int = 0
    last_ns: int = 0
    problems: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    undirected: set[str] = field(default_factory=set)  #: metrics of which no direction is better

    def text(self) -> str:
        """Return some lines for people."""
        if not (self.stored or self.known or self.problems):
            return "no run was found in it\n"
        lines = [f"{count(self.stored, 'record')} stored, {self.known} there already"]
        if self.stored:
            about = f"{count(len(self.benchmarks), 'benchmark')} of {', '.join(sorted(self.systems))}"
            lines[0] += f": {about}, {iso(self.first_ns)} to {iso(self.last_ns)}"
        if self.failed:
            lines.append(f"{self.failed} of them measured nothing")
        if self.undirected:
            names = ", ".join(sorted(self.undirected)[:SHOWN])
            lines.append(
                f"recorded, and not watched, as it is not known which direction is better: {names}; say --better METRIC=higher"
            )
        lines += [
            f"left out {count(number, 'time')}: {note}" for note, number in list(self.notes.items())[:SHOWN]
        ]
        lines += [f"not read: {one}" for one in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"not read: {len(self.problems) - SHOWN} more")
        return "\n".join(lines) + "\n"


class Ingester:
    """Stores runs as records of one session.

    Args:
        state_dir: where they are stored.
        tool: whose runs they are.
        branch: the default branch, whose nights are watched.
    """

    def __init__(self, state_dir: Path, tool: str, branch: str) -> None:
        self._state_dir, self._tool, self._branch = state_dir, tool, branch
        self._session = uuid7()
        self._index = Index(state_dir, tell)
        self._stores: dict[str, Store] = {}
        self._new: set[str] = set()
        self.found = Ingested()

    def take(self, runs: Iterable[ForeignRun | UnreadableRun]) -> None:
        """Store those of *runs* that are not stored yet.

        Raises:
            StoreError: the disk is full, or not writable; what was stored before stays.
        """
        found = self.found
        for run in runs:
            if isinstance(run, UnreadableRun):
                if (text := f"{run.where}: {run.why}") not in found.problems:
                    found.problems.append(text)
                continue
            record = record_of(run, self._session, self._tool, self._branch)
            if record.id in self._new or self._index.has(record.id):
                found.known += record.id not in self._new
                continue
            self._store(run.time_ns).append(record)
            self._new.add(record.id)
            self._count(run)

    def close(self) -> None:
        """Close the files."""
        for store in self._stores.values():
            store.close()
        self._index.close()

    def _store(self, time_ns: int) -> Store:
        """Return the store of the month in which the run was made: records lie by month."""
        month = iso(time_ns)[:7]
        if month not in self._stores:
            self._stores[month] = Store(self._state_dir, self._session)
        return self._stores[month]

    def _count(self, run: ForeignRun) -> None:
        found = self.found
        found.stored += 1
        found.failed += not run.metrics
        found.benchmarks.add(run.benchmark)
        found.systems.add(run.system)
        found.first_ns = min(found.first_ns or run.time_ns, run.time_ns)
        found.last_ns = max(found.last_ns, run.time_ns)
        found.undirected |= {one.name for one in run.metrics if one.better == "none"}
        for note in run.notes:
            found.notes[note] = found.notes.get(note, 0) + 1


def record_of(run: ForeignRun, session: str, tool: str, branch: str) -> Record:
    """Return the record of *run*. The same run has the same id whenever it is read."""
    run_id = _id_of(run)
    measurement = None
    if run.metrics:
        measurement = Measurement(
            run_id=run_id, nonce="", attempt=0, workload="command", device_type="none", device_model="",
            nodes=run.nodes, ranks=1, devices=0, steps=0, samples=0, started_ns=run.time_ns, ended_ns=run.time_ns,
            metrics=run.metrics,
        )  # fmt: skip
    return Record(
        id=run_id,
        session=session,
        node_id=run.benchmark,
        benchmark=run.benchmark,
        definition=text_of("program", {"from": tool}),
        system=run.system,
        partition=run.partition,
        environment=run.environment,
        device_model="",
        attempt=0,
        created_ns=run.time_ns,
        verdict=Verdict.UNJUDGED.value if measurement else "no_result",
        purpose="nightly",
        branch=branch,
        commit=run.commit,
        failure="" if measurement else f"no_result: {run.failure}",
        nodes=run.nodes,
        job_id=run.job_id,
        judged=tuple(one.name for one in run.metrics if one.better != "none"),
        measurement=measurement,
    )


def _id_of(run: ForeignRun) -> str:
    """Return a UUIDv7 of the run's time, whose random part is a digest of what the run is."""
    place = [run.system, run.partition, run.environment, run.benchmark, run.job_id, run.time_ns]
    said = json.dumps([place, [to_json(one) for one in run.metrics]], sort_keys=True)
    digest = hashlib.sha256(said.encode("utf-8", "surrogateescape")).digest()
    return uuid7(run.time_ns, digest[:10])
