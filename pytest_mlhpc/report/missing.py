"""Why a comparison has no figure for a benchmark on a machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import ACCEPTED, DIVISIBLE, RowKey, Run, Runs
from pytest_mlhpc.report.machines import Column, Seen
from pytest_mlhpc.store.text import iso

#: Most benchmarks of one test that are looked through for the nearest; tests with more are not told apart by people.
_MOST_NEAR: Final = 200
#: Most fields that are named as different.
_MOST_FIELDS: Final = 4


@dataclass(frozen=True)
class Past:
    """What was recorded of one benchmark on one column, figures aside."""

    accepted: int = 0
    failed: int = 0
    last_verdict: str = ""
    last_ns: int = 0  #: of those in the time asked for
    older_ns: int = 0  #: newest of all


@dataclass
class History:
    """All that was recorded, by column: ``past`` of each benchmark, ``near``: those that were measured, by workload and name."""

    past: dict[tuple[int, keys.Benchmark], Past] = field(default_factory=dict)
    near: dict[tuple[int, str, str], dict[keys.Benchmark, keys.Key]] = field(default_factory=dict)


def history_of(columns: Sequence[Column], seen: Sequence[Seen]) -> History:
    """Return *seen* by column."""
    history = History()
    places: dict[object, list[int]] = {}
    for place, column in enumerate(columns):
        for machine in column.sources | column.also:
            places.setdefault(machine, []).append(place)
    for one in seen:
        for place in places.get(one.machine, ()):
            key = place, one.benchmark
            history.past[key] = _added(history.past.get(key, Past()), one)
            parts = keys.parse(one.benchmark) if one.recent and one.verdict in ACCEPTED else None
            if parts is not None:
                history.near.setdefault((place, parts.workload, parts.name), {})[one.benchmark] = parts
    return history


def _added(past: Past, one: Seen) -> Past:
    good = one.verdict in ACCEPTED
    later = one.recent and one.newest_ns >= past.last_ns and not good
    return Past(
        accepted=past.accepted + one.recent * good,
        failed=past.failed + one.recent * (not good),
        last_verdict=one.verdict if later else past.last_verdict,
        last_ns=one.newest_ns if later else past.last_ns,
        older_ns=max(past.older_ns, one.newest_ns),
    )


def why(row: RowKey, place: int, runs: Runs, history: History, *, per_device: bool) -> tuple[str, str]:
    """Return a kind that can be counted, and a sentence, for an empty cell of *row* in column *place*."""
    found = runs.get((place, row.benchmark), ())
    if found:
        return _of_figures(row, found, per_device=per_device)
    past = history.past.get((place, row.benchmark))
    if past is not None and past.accepted:
        text = "only runs with other settings (--mlhpc-set), without a measurement, or that cannot be read"
        return "no run that counts", text
    if past is not None and past.failed:
        times = f"{past.failed} run{'s' * (past.failed > 1)}"
        return (
            "only failed",
            f"only failed: {times}, the last {past.last_verdict} on {iso(past.last_ns)[:10]}",
        )
    if past is not None:
        return "not since", f"not run since then; the last on {iso(past.older_ns)[:10]}"
    if text := _nearest(row.benchmark, place, history.near):
        return "only other scale or preset", text
    return "never run", "never run"


def _of_figures(row: RowKey, found: Sequence[Run], *, per_device: bool) -> tuple[str, str]:
    """Return why runs that were accepted are not comparable with the row."""
    with_metric = [run for run in found if row.metric in run.metrics]
    if not with_metric:
        return "not reported", f"{row.metric} is not reported"
    _value, unit, better = with_metric[0].metrics[row.metric]
    if (unit, better) != (row.unit, row.better):
        return "another unit", f"only in {unit}, better {better} (not {row.unit}, better {row.better})"
    if per_device and unit not in DIVISIBLE:
        return "not per device", f"{row.metric} is not divided by devices"
    run = with_metric[0]
    parts = []
    if run.cache != row.cache:
        parts.append(f"{run.cache} cache (not {row.cache})")
    if run.data_kind != row.data_kind:
        parts.append(f"{run.data_kind} data (not {row.data_kind})")
    return "only other cache or data", f"only with {', '.join(parts) or 'other data'}"


def _nearest(
    benchmark: keys.Benchmark,
    place: int,
    near: Mapping[tuple[int, str, str], Mapping[keys.Benchmark, keys.Key]],
) -> str:
    wanted = keys.parse(benchmark)
    if wanted is None:
        return ""
    there = near.get((place, wanted.workload, wanted.name), {})
    candidates = list(there.values())[-_MOST_NEAR:]
    told = [keys.differences(wanted, other) for other in candidates]
    if not told:
        return ""
    best = min(told, key=lambda one: (len(one), [keys.natural(text) for text in one]))
    more = f" and {len(best) - _MOST_FIELDS} more" if len(best) > _MOST_FIELDS else ""
    return f"only with {', '.join(best[:_MOST_FIELDS])}{more}"
