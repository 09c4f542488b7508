"""What the hook in a screened program wrote: its training steps, and the profile of a few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.node.files import read_json

Interval = tuple[float, float]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
LOADER = "enumerate(DataLoader)#"
#: Operations that are named.
TOP = 3


@dataclass(frozen=True)
class Profile:
    """Seconds of a profiled stretch of one rank, and what filled them.

    ``computing_s``: some operation (or kernel) ran that is no collective. ``communicating_s``: some collective was under
    way; ``exposed_s`` the part of it in which nothing was computed. ``data_s``: in ``next()`` of a DataLoader. ``host_s``: none
    of these on a CPU; on a device, the time without any kernel that is not waiting for data. ``top`` has operations and their
    shares of ``computing_s``.
    """

    seconds: float
    computing_s: float
    communicating_s: float
    exposed_s: float
    data_s: float
    host_s: float
    on_device: bool
    launches: int
    top: tuple[tuple[str, float], ...] = ()


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what is left of *intervals* outside of *others*; both as :func:`union` makes them."""
    left, at = [], 0
    for begin, end in intervals:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        place, start = at, begin
        while place < len(others) and others[place][0] < end:
            if others[place][0] > start:
                left.append((start, others[place][0]))
            start = max(start, others[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of lengths."""
    return sum(end - begin for begin, end in intervals)


def profile_of(trace: Any) -> Profile | None:
    """Return what *trace* says, or None if there is nothing in it that could be read."""
    events = [event for event in _events(trace) if _number(event.get("ts")) and _number(event.get("dur"))]
    spans = [(event, (float(event["ts"]), float(event["ts"]) + float(event["dur"]))) for event in events]
    whole = union(span for _, span in spans)
    if not whole:
        return None
    window = (whole[0][0], whole[-1][1])
    seconds = window[1] - window[0]
    kernels = [(event, span) for event, span in spans if event.get("cat") in ON_DEVICE]
    loading = union(span for event, span in spans if str(event.get("name")).startswith(LOADER))
    if kernels:
        collective = union(span for event, span in kernels if "nccl" in str(event.get("name")).lower())
        work = [(event, span) for event, span in kernels if "nccl" not in str(event.get("name")).lower()]
    else:
        collective = union(span for event, span in spans if str(event.get("name")).startswith(COLLECTIVES))
        work = [(event, span) for event, span in spans if _computes(event)]
    # What a loader without workers computes is no training: it counts as waiting for data.
    computing = without(union(span for _, span in work), () if kernels else loading)
    busy = union([*computing, *collective, *loading])
    return Profile(
        seconds=seconds / 1e6,
        computing_s=length(computing) / 1e6,
        communicating_s=length(collective) / 1e6,
        exposed_s=length(without(without(collective, computing), () if kernels else loading)) / 1e6,
        data_s=length(loading) / 1e6,
        host_s=length(without([window], busy)) / 1e6,
        on_device=bool(kernels),
        launches=sum(event.get("cat") == "kernel" for event, _ in kernels),
        top=_top(work),
    )


def _computes(event: Mapping[str, Any]) -> bool:
    name = str(event.get("name"))
    # The engine's and DDP's frames hold waiting for collectives too; operations below them are what computes.
    return event.get("cat") == "cpu_op" and name.startswith(
        ("aten::", "mkldnn", "torch::distributed::reducer::mul")
    )


def _top(work: Sequence[tuple[Mapping[str, Any], Interval]]) -> tuple[tuple[str, float], ...]:
    """Return the operations with most time of their own, without what they call, and their shares."""
    own: Counter[str] = Counter()
    by_thread: dict[Any, list[tuple[Interval, str]]] = {}
    for event, span in work:
        thread = (str(event.get("pid")), str(event.get("tid")))
        by_thread.setdefault(thread, []).append((span, str(event.get("name"))))
    for spans in by_thread.values():
        open_: list[tuple[float, str]] = []
        for (begin, end), name in sorted(spans, key=lambda one: (one[0][0], -one[0][1])):
            while open_ and open_[-1][0] <= begin:
                open_.pop()
            if open_:
                own[open_[-1][1]] -= end - begin  # type: ignore[assignment]  # a Counter counts floats as well
            own[name] += end - begin  # type: ignore[assignment]
            open_.append((end, name))
    total = sum(own.values())
    return tuple((name, value / total) for name, value in own.most_common(TOP)) if total > 0 else ()


def _events(trace: Any) -> list[Mapping[str, Any]]:
    found = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(found, list):
        return []
    wanted = ("cpu_op", "user_annotation", *ON_DEVICE)
    return [
        event
        for event in found
        if isinstance(event, Mapping)
        and event.get("ph") == "X"
        and event.get("cat") in wanted
        and not str(event.get("name")).startswith("PyTorch Profiler")
    ]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


#: Largest file that is read, in bytes: a trace of three steps of a large model has some tens of MiB.
MOST_BYTES = 256 << 20

#: What is said of a file whose last line is not whole.
CUT = "all that the program told (what it wrote is cut short: killed, or TMPDIR full?)"

#: Steps at the beginning that count for nothing: memory is allocated, kernels are chosen.
FIRST_STEPS = 2


@dataclass(frozen=True)
class TrainingTrace:
    """One process that trains: when its steps ended (monotonic clock) and the wait for data within each, in seconds.

    ``profiled`` is (first step, number of steps) that the profiler watched; ``notes`` are sentences on what the hook could
    not do.
    """

    pid: int
    host: str
    rank: int | None
    ends: tuple[float, ...]
    waits: tuple[float, ...]
    profiled: tuple[int, int] | None = None
    profile_cost_s: float = 0.0
    profile: Profile | None = None
    notes: tuple[str, ...] = ()

    def steps(self) -> list[tuple[float, float]]:
        """Return (seconds, wait for data) of each step that counts: neither the first ones nor those under the profiler."""
        skipped = set(range(FIRST_STEPS))
        if self.profiled is not None:
            first, count = self.profiled
            skipped |= set(range(first, first + count + 1))  # the one after holds the writing of the trace
        pairs = zip(self.ends, self.ends[1:], self.waits[1:], strict=False)
        found = [
            (after - before, wait)
            for place, (before, after, wait) in enumerate(pairs, 1)
            if place not in skipped
        ]
        return [pair for pair in found if pair[0] > 0]


def read_traces(folder: Path) -> tuple[TrainingTrace, ...]:
    """Return what all processes reported; a file that cannot be read in part is read in the other part."""
    found = [_one(path) for path in sorted(folder.glob("*.jsonl"))]
    return tuple(one for one in found if one is not None)


def _one(path: Path) -> TrainingTrace | None:
    if not path.stem.isdigit():
        return None
    lines, whole = _lines(path)
    ends, waits = _numbers(lines, "ends"), _numbers(lines, "waits")
    ranks = [line["rank"] for line in lines if isinstance(line.get("rank"), int)]
    notes = [str(line[key]) for line in lines for key in ("lacks", "profile") if key in line]
    profiled = next((line for line in lines if "profiled" in line), None)
    profile, remarks = _profile(path.with_suffix(".trace.json"))
    return TrainingTrace(
        pid=int(path.stem),
        host=str(lines[0].get("host", "")) if lines else "",
        rank=ranks[-1] if ranks else None,
        ends=tuple(ends[: len(waits)]),
        waits=tuple(waits[: len(ends)]),
        profiled=_pair(profiled),
        profile_cost_s=_cost(profiled),
        profile=profile,
        notes=(*notes, *remarks, *(() if whole else (CUT,))),
    )


def _lines(path: Path) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the lines of a file, and whether it is whole: to its last line's end."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return [], False
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], False
    found = []
    for line in text.splitlines():
        try:
            value = read_json(line)
        except ValueError:  # cut short: the program was killed while it wrote
            continue
        if isinstance(value, Mapping):
            found.append(value)
    return found, text.endswith("\n")


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    every = [value for line in lines if isinstance(line.get(key), list) for value in line[key]]
    return [float(value) for value in every if isinstance(value, (int, float)) and value == value]  # noqa: PLR0124 - NaN


def _pair(line: Mapping[str, Any] | None) -> tuple[int, int] | None:
    value = None if line is None else line["profiled"]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return value[0], min(value[1], 1000)
    return None


def _cost(line: Mapping[str, Any] | None) -> float:
    value = 0.0 if line is None else line.get("profile_cost_s", 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _profile(path: Path) -> tuple[Profile | None, list[str]]:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            return None, [f"the trace of {path.stem.split('.')[0]} has {size >> 20} MiB and was not read"]
        return profile_of(read_json(path.read_bytes())), []
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, RecursionError) as error:
        return None, [f"a trace cannot be read: {error}"]
