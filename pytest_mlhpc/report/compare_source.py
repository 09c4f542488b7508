"""What a comparison needs from the records, by way of their index: who ran what, and the newest accepted runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.report.figures import ACCEPTED, Run, run_of
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.report.machines import Column, Machine, Seen
from pytest_mlhpc.store.index import Index

#: For each run that is wanted, so many records are looked at: some were made with other settings (--mlhpc-set).
_LOOKED_AT = 20

_MACHINE = "system, partition, environment, device_model, fingerprint"


def summarise(index: Index, since_ns: int) -> list[Seen]:
    """Return what all first attempts became, by machine, benchmark and verdict.

    Raises:
        StoreError: the record files cannot be read.
    """
    rows = index.ask(
        f"SELECT {_MACHINE}, benchmark, definition, verdict, count(*), sum(created_ns >= :since), max(created_ns) FROM records"  # noqa: S608 - our own words
        f" WHERE attempt = 0 GROUP BY {_MACHINE}, benchmark, definition, verdict",
        {"since": since_ns},
    )
    return [Seen(Machine(*row[:5]), Benchmark(*row[5:7]), *row[7:]) for row in rows]


def newest(
    index: Index, columns: Sequence[Column], benchmarks: Collection[Benchmark], since_ns: int, count: int
) -> dict[tuple[int, Benchmark], list[Run]]:
    """Return (place of the column, benchmark) -> its last *count* accepted runs since then, newest first.

    Records with settings that change figures (--mlhpc-set) are left out, as the judge leaves them out; so are second copies.

    Raises:
        StoreError: the record files cannot be read.
    """
    places: dict[Machine, list[int]] = {}
    for place, column in enumerate(columns):
        for machine in column.sources:
            places.setdefault(machine, []).append(place)
    verdicts = ", ".join(f"'{verdict}'" for verdict in ACCEPTED)
    rows = index.ask(
        f"SELECT path, start, record_id, benchmark, definition, {_MACHINE} FROM records WHERE attempt = 0"  # noqa: S608 - our own words
        f" AND created_ns >= :since AND verdict IN ({verdicts}) ORDER BY created_ns DESC, id DESC",
        {"since": since_ns},
    )
    found: dict[tuple[int, Benchmark], dict[str, tuple[str, int]]] = {}
    for path, start, record_id, name, definition, *machine in rows:
        benchmark = Benchmark(name, definition)
        if benchmark not in benchmarks:
            continue
        for place in places.get(Machine(*machine), ()):
            lines = found.setdefault((place, benchmark), {})
            if len(lines) < count * _LOOKED_AT:
                lines.setdefault(record_id, (path, start))
    runs = {key: list(_counting(index, list(lines.values()), count)) for key, lines in found.items()}
    return {key: some for key, some in runs.items() if some}


def _counting(index: Index, lines: Sequence[tuple[str, int]], count: int) -> Iterator[Run]:
    left = count
    for record in index.read(lines):
        run = run_of(record) if neutral(record.overrides) else None
        if run is not None:
            yield run
            left -= 1
        if not left:
            return
