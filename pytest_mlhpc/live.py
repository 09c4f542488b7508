"""Live progress while pytest waits for a run: a block that redraws itself on a terminal, a quiet line elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import pytest

from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import NO_DATA, JobState

#: Most jobs that are drawn; the others are counted.
MOST = 8
#: Seconds of waiting after which, and then between which, a line is printed where nothing can be redrawn.
QUIET_FIRST_S, QUIET_EVERY_S = 30.0, 60.0

_OVER = {JobState.ENDED, JobState.CANCELLED}


class Live:
    """Draws below the line that pytest is writing, and leaves the cursor where it was."""

    def __init__(self, config: pytest.Config, jobs: Callable[[], Iterable[Job]]) -> None:
        self._config = config
        self._jobs = jobs
        self._writer = config.get_terminal_writer()
        reporter = config.pluginmanager.getplugin("terminalreporter")
        self._isatty = bool(getattr(reporter, "isatty", False))
        self._drawn: list[str] = []
        self._next_line: float | None = None

    def tick(self, waited_for: Job) -> None:
        """Show how things stand; called several times a second while *waited_for* has no outcome."""
        if self._isatty:
            self._draw(block(self._jobs(), self._writer.fullwidth - 1))
            return
        now = time.monotonic()
        if self._next_line is None:
            self._next_line = now + QUIET_FIRST_S
        elif now >= self._next_line:
            self._next_line = now + QUIET_EVERY_S
            with self._uncaptured():
                self._writer.line(f"\nwaiting for {describe(waited_for)}", flush=True)

    def clear(self) -> None:
        """Remove what was drawn."""
        self._next_line = None
        if self._drawn:
            self._draw([])

    def _draw(self, lines: list[str]) -> None:
        if lines == self._drawn:
            return
        height = max(len(lines), len(self._drawn))
        padded = lines + [""] * (height - len(lines))
        column = self._writer.width_of_current_line
        # Newlines scroll where the screen ends, so going up as many lines is right in any case.
        text = "".join(f"\n\r\x1b[2K{line}" for line in padded) + f"\x1b[{height}A\r"
        with self._uncaptured():
            print(text + (f"\x1b[{column}C" if column else ""), end="", flush=True)  # noqa: T201 - this is the terminal
        self._drawn = lines

    def _uncaptured(self) -> contextlib.AbstractContextManager[None]:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            return contextlib.nullcontext()
        return capture.global_and_fixture_disabled()  # type: ignore[no-any-return]  # a plug-in is Any


def block(jobs: Iterable[Job], width: int) -> list[str]:
    """Return the lines that tell of all unfinished jobs, submitted ones first, and at most *MOST*."""
    unfinished = [job for job in jobs if job.state not in _OVER]
    unfinished.sort(key=lambda job: job.state is JobState.DECLARED)
    lines = [f"  {describe(job)}"[:width] for job in unfinished[:MOST]]
    if len(unfinished) > MOST:
        lines.append(f"  ... and {len(unfinished) - MOST} more"[:width])
    return lines


def describe(job: Job) -> str:
    """Return ``name on target: state, steps done, samples/s``; what trains nothing has steps and no samples."""
    text = f"{job.spec.name} on {job.spec.target.id}: {job.state.value}"
    step, steps = job.progress.get("step"), job.progress.get("steps")
    if step is not None:
        text += f", step {step}/{steps}"
    rate = job.progress.get("samples_per_s")
    if isinstance(rate, (int, float)) and job.spec.data != NO_DATA:
        text += f", {rate:.4g} samples/s"
    return text + (f" ({_one_line(job.reason)})" if job.reason else "")


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
