"""What the hook (``hook/``) wrote of each process that trains: read, whatever state a killed program left it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.screen.trace import Profile, profile_of

#: Largest file that is read, in bytes: a trace of three steps of a large model has some tens of MiB.
MOST_BYTES = 256 << 20

#: What is said of a file whose last line is not whole.
CUT = "all that the program told (what it wrote is cut short: killed, or TMPDIR full?)"

#: Steps at the beginning that count for nothing: memory is allocated, kernels are chosen.
FIRST_STEPS = 2


@dataclass(frozen=True)
class Told:
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


def read_told(folder: Path) -> tuple[Told, ...]:
    """Return what all processes told; a file that cannot be read in part is read in the other part."""
    found = [_one(path) for path in sorted(folder.glob("*.jsonl"))]
    return tuple(one for one in found if one is not None)


def _one(path: Path) -> Told | None:
    if not path.stem.isdigit():
        return None
    lines, whole = _lines(path)
    ends, waits = _numbers(lines, "ends"), _numbers(lines, "waits")
    ranks = [line["rank"] for line in lines if isinstance(line.get("rank"), int)]
    notes = [str(line[key]) for line in lines for key in ("lacks", "profile") if key in line]
    profiled = next((line for line in lines if "profiled" in line), None)
    profile, words = _profile(path.with_suffix(".trace.json"))
    return Told(
        pid=int(path.stem),
        host=str(lines[0].get("host", "")) if lines else "",
        rank=ranks[-1] if ranks else None,
        ends=tuple(ends[: len(waits)]),
        waits=tuple(waits[: len(ends)]),
        profiled=_pair(profiled),
        profile_cost_s=_cost(profiled),
        profile=profile,
        notes=(*notes, *words, *(() if whole else (CUT,))),
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
