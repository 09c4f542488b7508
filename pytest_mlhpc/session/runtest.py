"""The phases of a benchmark: its run is awaited in setup, with live progress, and judged around the call; its reports carry properties for JUnit files.

Here, too, is the bridge to pytest-benchmark: with one of its options, every run is a row in its table, its JSON and its
comparisons. pytest-benchmark has no public call for a measurement that was made elsewhere; this uses one private attribute of
its plug-in (``config._benchmarksession``) and does nothing where that is not there. Judging stays ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
import types
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr
from rich.cells import cell_len, set_cell_size

from pytest_mlhpc.errors import InfrastructureError, RunFailure, SpecError
from pytest_mlhpc.jobs.job import Job, Outcome
from pytest_mlhpc.jobs.spec import NO_DATA, JobState, cut_names, short_names
from pytest_mlhpc.options import options_of_target, repeated_options
from pytest_mlhpc.session.bench import INFRA_ATTRIBUTE, Bench, bench_of
from pytest_mlhpc.session.run import WARNINGS, explain
from pytest_mlhpc.store.record import WORSE, Judgement, Verdict
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


def properties(outcome: Outcome) -> list[tuple[str, object]]:
    """Return JUnit properties: benchmark, run id, verdict, and each metric as ``mlhpc.metric.NAME`` with its unit."""
    found: list[tuple[str, object]] = [
        ("mlhpc.benchmark", outcome.benchmark),
        ("mlhpc.run", outcome.record_id),
        ("mlhpc.attempts", outcome.attempts),
    ]
    if outcome.failure is not None:
        found.append(("mlhpc.failure", outcome.failure.outcome))
    if outcome.judgement is not None:
        found.append(("mlhpc.verdict", outcome.judgement.verdict.value))
    for one in outcome.comparison:
        result = one.result
        bounds = f"{result.change:.6g} [{result.low:.6g}, {result.high:.6g}]"
        found.append((f"mlhpc.against.{one.metric}", f"{result.verdict.value} {bounds}"))
    if outcome.vetting is not None:
        found.append(("mlhpc.fit", ",".join(outcome.vetting.good)))
        found.append(("mlhpc.unfit", ",".join(outcome.vetting.exclude)))
    if outcome.granted is not None:
        found.append(("mlhpc.nodes", ",".join(outcome.granted.nodes)))
    if outcome.measurement is not None:
        found.append(("mlhpc.nodes", ",".join(outcome.measurement.nodes)))
        found.extend(
            (f"mlhpc.metric.{metric.name}", f"{metric.value!r} {metric.unit}")
            for metric in outcome.measurement.metrics
        )
    return found


OUTCOME = pytest.StashKey[Outcome]()

#: Only a session that is about to end gives up the run of a test that still asks for it (cancelled, detached); and a device
#: whose compiler cannot take a workload says nothing against either.
_SKIPPED = frozenset({"cancelled", "detached", "cannot_lower"})


def take(item: pytest.Item, bench: Bench) -> Outcome:
    """Wait for the run of *item* and return its outcome.

    Raises:
        InfrastructureError: no measurement could be made, and that is not the test's fault.
    """
    __tracebackhide__ = True
    outcome = item.stash.get(OUTCOME, None)
    if outcome is None:
        if item.nodeid not in bench.specs:
            pytest.fail("this test declares no run: decorate it, as by @train('cosmoflow')", pytrace=False)
        assert bench.source is not None  # noqa: S101 - tests run, so there is one
        live = live_of(item.config)
        try:
            outcome = bench.source.wait(item.nodeid, live.tick if live else None)
        finally:
            if live:
                live.clear()
        item.stash[OUTCOME] = outcome
        item.user_properties.extend(properties(outcome))
    if outcome.failure is not None and outcome.failure.outcome in _SKIPPED:
        pytest.skip(outcome.failure.text)
    if outcome.failure is not None and outcome.failure.infrastructure:
        failure = outcome.failure
        raise InfrastructureError(failure.outcome, str(failure).removeprefix(f"{failure.outcome}: "))
    return outcome


def around_call(item: pytest.Function, bench: Bench) -> Generator[None, object, object]:
    """Fail a test whose run was broken before its body runs, and one whose run was slow after it."""
    __tracebackhide__ = True
    outcome = take(item, bench)
    if outcome.failure is not None:
        failure = outcome.failure
        text = str(failure).removeprefix(f"{failure.outcome}: ")
        if outcome.judgement is not None and outcome.judgement.verdict is not Verdict.UNJUDGED:
            text = "\n".join([text, *explain(outcome.judgement)])
        raise RunFailure(failure.outcome, text)
    judgement = outcome.judgement or Judgement(Verdict.UNJUDGED)
    try:
        result = yield
    except (pytest.skip.Exception, pytest.xfail.Exception):
        if judgement.verdict in WORSE:
            raise _slow(judgement) from None  # a body that bows out does not hide what its run has shown
        raise
    if judgement.verdict in WORSE:
        raise _slow(judgement)
    if category := WARNINGS.get(judgement.verdict):
        with warnings.catch_warnings():
            # The test has passed: a project that turns warnings into errors still gets this one as a warning.
            warnings.simplefilter("always", category)
            item.warn(category("\n".join(explain(judgement))))
    return result


def _slow(judgement: Judgement) -> RunFailure:
    return RunFailure(judgement.verdict.value, "\n".join(explain(judgement)), whole=True)


def finish_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, bench: Bench
) -> None:
    """Give a failed report our text instead of a traceback of our own, and the command that repeats the test."""
    error = call.excinfo.value if call.excinfo else None
    if call.excinfo is not None and isinstance(error, (RunFailure, InfrastructureError, SpecError)):
        report.longrepr = _message_alone(call.excinfo)
    if item.nodeid not in bench.specs:
        return
    if isinstance(error, InfrastructureError):
        setattr(report, INFRA_ATTRIBUTE, True)
    outcome = item.stash.get(OUTCOME, None)
    expected = isinstance(error, (RunFailure, InfrastructureError))
    if (
        outcome is not None
        and outcome.judgement is not None
        and outcome.judgement.verdict in WORSE
        and not expected
    ):
        first, *_ = lines = explain(outcome.judgement)
        report.sections.append(("why", "\n".join(lines) + "\n"))
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and "run >= baseline" in str(error).partition("\n")[0]:
            crash.message = first
    report.sections.append(("mlhpc", f"to repeat just this test: {repeat_command(item, bench)}\n"))


def _message_alone(error: pytest.ExceptionInfo[BaseException]) -> TerminalRepr:
    """Return what pytest prints of *error*: its text, in the short summary too, without the name of its class."""
    shown = error.getrepr(style="value", chain=False)
    if shown.reprcrash is not None:
        problems = getattr(error.value, "problems", ())
        shown.reprcrash.message = problems[0].what if problems else str(error.value).partition("\n")[0]
    return shown


def repeat_command(item: pytest.Item, bench: Bench) -> str:
    """Return the shell command that runs *item* again on the same target."""
    settings, target = bench.settings, bench.specs[item.nodeid].target
    path, separator, rest = item.nodeid.partition("::")
    path = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir)
    argv = ["pytest", path + separator + rest, settings.system_option, target.partition.id]
    argv += (*options_of_target(settings, target), *repeated_options(settings, item.config.rootpath))
    return shlex.join(argv)


def add_row(config: pytest.Config, job: Job) -> None:
    """Add the run of *job* as one benchmark: its rounds are the slowest rank's step times, in seconds.

    A run without steps (`command`) is one round, as long as the program ran. A test that is run again
    (pytest-rerunfailures) has the same run, and no second row.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    outcome = job.outcome
    if benchmarks is None or outcome is None or outcome.measurement is None:
        return
    if any(row.fullname == job.spec.node_id for row in benchmarks.benchmarks[-1:]):
        return
    from pytest_benchmark.stats import Metadata

    measurement, spec = outcome.measurement, job.spec
    fixture = types.SimpleNamespace(
        name=spec.node_id.rpartition("::")[2],
        fullname=spec.node_id,
        group=spec.workload,
        param=spec.target.id,
        params={"system": spec.target.id, **{name: str(value) for name, value in spec.asked.items()}},
        extra_info=_extra_info(job),
        cprofile_stats=None,
        has_error=False,
    )
    row: Any = Metadata(fixture, iterations=1, options={"timer": "remote"})  # type: ignore[no-untyped-call]  # theirs
    whole = (measurement.ended_ns - measurement.started_ns) / 1e9
    for seconds in measurement.step_times_s or (whole,):
        row.update(seconds)
    benchmarks.benchmarks.append(row)


def add_machine(machine_info: dict[str, Any], bench: Bench) -> None:
    """Say where the figures were made: pytest-benchmark itself only knows the machine that pytest runs on."""
    machine_info["mlhpc"] = sorted(target.id for target in bench.targets)


def _extra_info(job: Job) -> dict[str, Any]:
    outcome = job.outcome
    if outcome is None or outcome.measurement is None:
        return {}
    return {
        "benchmark": outcome.benchmark,
        "run": outcome.record_id,
        "verdict": outcome.judgement.verdict.value if outcome.judgement else "",
        "device_model": outcome.measurement.device_model,
        "nodes": list(outcome.measurement.nodes),
        "metrics": {metric.name: metric.value for metric in outcome.measurement.metrics},
    }
