"""Live progress while pytest waits for a run: a block that redraws itself on a terminal, a quiet line elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable

import pytest
from rich.cells import cell_len, set_cell_size

from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import NO_DATA, JobState, cut_names, short_names
from pytest_mlhpc.session.bench import bench_of
from pytest_mlhpc.store.text import quantity

#: Most jobs that are drawn; the others are counted.
MOST = 8
#: Characters of a test's name that are shown however narrow the terminal is, and columns that its state takes.
_LEAST_NAME, _STATE = 12, 24
#: Rows of a terminal that does not say how many it has.
_ROWS = 24
#: Seconds of waiting after which, and then between which, a line is printed where nothing can be redrawn.
QUIET_FIRST_S, QUIET_EVERY_S = 30.0, 60.0
#: The same where another process on this machine is waited for, which somebody may have to end.
LOCKED_S = 2.0
_LOCKED = re.compile(r"waiting (for .*: in use by|in line behind) process ")

_OVER = {JobState.ENDED, JobState.CANCELLED}


class LiveProgress:
    """Draws below the line that pytest is writing, and leaves the cursor where it was."""

    def __init__(self, config: pytest.Config, jobs: Callable[[], Iterable[Job]]) -> None:
        self._config = config
        self._jobs = jobs
        self._writer = config.get_terminal_writer()
        reporter = config.pluginmanager.getplugin("terminalreporter")
        self._isatty = bool(getattr(reporter, "isatty", False))
        self._drawn: list[str] = []
        self._height = 0  #: lines of it that the terminal has had room for
        self._next_line: float | None = None
        self._began = 0.0  #: when waiting began, infinite once a line of it was printed

    def tick(self, waited_for: Job) -> None:
        """Show how things stand; called several times a second while *waited_for* has no outcome."""
        if self._isatty:
            self._draw(lambda columns: block(self._jobs(), columns))
            return
        now = time.monotonic()
        if self._next_line is None:
            self._began, self._next_line = now, now + QUIET_FIRST_S
        if _LOCKED.match(waited_for.reason):
            self._next_line = min(self._next_line, self._began + LOCKED_S)
        if now >= self._next_line:
            self._began, self._next_line = float("inf"), now + QUIET_EVERY_S
            with self._uncaptured():
                (name,) = short_names([waited_for.spec])
                text = describe(waited_for, _places(self._jobs()).get(waited_for, ""))
                self._writer.line(f"\nwaiting for {name}: {text}", flush=True)

    def clear(self) -> None:
        """Remove what was drawn."""
        self._next_line = None
        if self._drawn:
            self._draw(lambda _: [])

    def _draw(self, lines_of: Callable[[int], list[str]]) -> None:
        with self._uncaptured():
            columns, rows = self._size()
            lines = [fit(line, columns - 1) for line in lines_of(columns - 1)[: max(1, rows - 2)]]
            if lines == self._drawn:
                return
            height = max(len(lines), self._height)
            padded = lines + [""] * (height - len(lines))
            column = self._writer.width_of_current_line % columns
            # Newlines scroll where the screen ends, so going up as many lines is right in any case.
            text = "".join(f"\n\r\x1b[2K{line}" for line in padded) + f"\x1b[{height}A\r"
            print(text + (f"\x1b[{column}C" if column else ""), end="", flush=True)  # noqa: T201 - this is the terminal
            self._drawn, self._height = lines, len(lines)

    def _size(self) -> tuple[int, int]:
        """Return columns and rows of the terminal; to be asked while nothing is captured: else fd 1 is a file."""
        try:
            columns, rows = os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else 1)
        except (OSError, ValueError):
            columns = rows = 0
        return columns or self._writer.fullwidth, rows or _ROWS

    def _uncaptured(self) -> contextlib.AbstractContextManager[None]:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            return contextlib.nullcontext()
        return capture.global_and_fixture_disabled()  # type: ignore[no-any-return]  # a plug-in is Any


def fit(line: str, columns: int) -> str:
    """Return as much of *line* as fits into so many columns; some characters take two."""
    return line if cell_len(line) <= columns else set_cell_size(line, columns)


def block(jobs: Iterable[Job], columns: int) -> list[str]:
    """Return a line for each unfinished job, submitted ones first, and at most *MOST*; names take at most half of the *columns*."""
    unfinished = [job for job in jobs if job.state not in _OVER]
    unfinished.sort(key=lambda job: job.state is JobState.DECLARED)
    shown, places = unfinished[:MOST], _places(unfinished)
    most = max(_LEAST_NAME, min(columns // 2, columns - _STATE))
    names = cut_names([_one_line(name) for name in short_names([job.spec for job in shown])], most)
    width = max(map(cell_len, names), default=0)
    lines = [
        f"  {set_cell_size(name, width)}  {describe(job, places.get(job, ''))}"
        for name, job in zip(names, shown, strict=True)
    ]
    if len(unfinished) > MOST:
        lines.append(f"  ... and {len(unfinished) - MOST} more")
    return lines


def _places(jobs: Iterable[Job]) -> dict[Job, str]:
    """Return where each job that waits stands among those of its partition: ``2 of 5``."""
    waiting: dict[str, list[Job]] = {}
    for state in (JobState.QUEUED, JobState.DECLARED):
        for job in [job for job in jobs if job.state is state]:
            waiting.setdefault(job.spec.target.partition.id, []).append(job)
    return {
        job: f"{number} of {len(line)}" for line in waiting.values() for number, job in enumerate(line, 1)
    }


def describe(job: Job, place: str = "") -> str:
    """Return ``state place, time, steps done, samples/s (reason)`` of *job*; what trains nothing has no samples."""
    state = "waiting" if job.state is JobState.DECLARED else job.state.value
    text = f"{state} {place}, {_clock(job.since)}" if place else f"{state} {_clock(job.since)}"
    step, steps = job.progress.get("step"), job.progress.get("steps")
    if step is not None:
        text += f", step {step}/{steps}"
    rate = job.progress.get("samples_per_s")
    if isinstance(rate, (int, float)) and job.spec.data != NO_DATA:
        text += f", {quantity(rate, 'samples/s')}"
    return text + (f" ({_one_line(job.reason)})" if job.reason else "")


def _clock(since: float) -> str:
    """Return how long ago *since* was: ``0:07``, ``12:30``, ``2:05:00``."""
    minutes, seconds = divmod(int(time.monotonic() - since), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


_LIVE = pytest.StashKey[LiveProgress]()


def live_of(config: pytest.Config) -> LiveProgress | None:
    """Return who draws progress; None in processes that have no terminal or no session."""
    bench = bench_of(config)
    if bench is None or bench.session is None or not config.pluginmanager.hasplugin("terminalreporter"):
        return None
    if _LIVE not in config.stash:
        jobs = bench.session.jobs
        config.stash[_LIVE] = LiveProgress(config, jobs.values)
    return config.stash[_LIVE]
