"""Progress on a terminal, and quiet elsewhere."""

import contextlib
import os
import pty
import re
import termios
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from pytest_mlhpc.jobs.spec import NO_DATA, JobState
from pytest_mlhpc.session.runtest import MOST, LiveProgress, block, describe
from pytest_mlhpc.session.terminal import table


def job(  # noqa: PLR0917 - only names are given
    test="test_it", state=JobState.RUNNING, data="memory", reason="", since=0.0, target="sys:part", **progress
):
    place = SimpleNamespace(id=target, partition=SimpleNamespace(id=target))
    spec = SimpleNamespace(node_id=f"test_a.py::{test}", data=data, target=place)
    return Waiting(spec=spec, state=state, progress=progress, reason=reason, since=since)


class Waiting(SimpleNamespace):
    """A job, told from others by identity."""

    __hash__ = object.__hash__


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that stands at five past two hours."""
    now = SimpleNamespace(s=2 * 3600 + 5 * 60 + 7.0)
    monkeypatch.setattr("pytest_mlhpc.session.runtest.time.monotonic", lambda: now.s)
    return now


AT_3 = {"step": 3, "steps": 40, "samples_per_s": 12.345}


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        pytest.param(job(**AT_3), "running 2:05:07, step 3/40, 12.35 samples/s", id="a run"),
        pytest.param(
            job(data=NO_DATA, **AT_3), "running 2:05:07, step 3/40", id="a probe, which has no samples"
        ),
        pytest.param(
            job(state=JobState.QUEUED, reason="Priority\x1b[2J\nnext", since=7500.0),
            "queued 0:07 (Priority [2J next)",
            id="a queued job, with the scheduler's reason on one line",
        ),
    ],
)
def test_a_job_is_described(shown, text):
    assert describe(shown) == text


def test_submitted_jobs_come_first_and_the_rest_is_counted():
    jobs = [
        job("later", JobState.DECLARED),
        *[job(f"j{i}") for i in range(MOST)],
        job("done", JobState.ENDED),
    ]
    lines = block(jobs, 80)
    assert lines[0] == "  j0  running 2:05:07"
    assert lines[-1] == "  ... and 1 more"


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (40, ["test_cop...y[16]", "test_cop...y[64]", "test_cop...[256]"]),
        (300, [f"test_copy_of_a_large_array[{size}]" for size in (16, 64, 256)]),
    ],
)
def test_tests_that_differ_by_a_parameter_are_distinguished_at_any_width(columns, names):
    tests = [f"test_copy_of_a_large_array[sys:part-{size}]" for size in (16, 64, 256)]
    lines = block([job(test) for test in tests], columns)
    assert [line.split()[0] for line in lines] == names


def test_jobs_that_wait_have_a_place_among_those_of_their_partition():
    waiting = [
        job("test_a[sys:part]", JobState.DECLARED),
        job("test_b[sys:part]", JobState.QUEUED),
        job("test_c[other:part]", JobState.QUEUED, target="other:part"),
    ]
    assert block(waiting, 80) == [
        "  test_b[sys:part]    queued 1 of 2, 2:05:07",
        "  test_c[other:part]  queued 1 of 1, 2:05:07",
        "  test_a[sys:part]    waiting 2 of 2, 2:05:07",
    ]


@pytest.mark.parametrize("columns", [40, 80, 300])
def test_what_is_drawn_fits_the_terminal_and_goes_away_again(monkeypatch, capsys, columns):
    monkeypatch.setattr("pytest_mlhpc.session.runtest.os.get_terminal_size", lambda _fd: (columns, 5))
    jobs = [job(reason="語" * 200) for _ in range(MOST)]
    live = LiveProgress(Terminal(isatty=True), lambda: jobs)
    live.tick(jobs[0])
    live.clear()
    drawn, cleared = (
        text.split("\n\r\x1b[2K")[1:] for text in capsys.readouterr().out.split("\x1b[3A\r\x1b[7C")[:2]
    )
    assert [cell_len(line) for line in drawn] == [columns - 1] * 3
    assert cleared == [""] * 3


class Terminal:
    """A config with a terminal of a given kind."""

    fullwidth = 80
    width_of_current_line = 7

    def __init__(self, *, isatty: bool) -> None:
        self.lines: list[str] = []
        self._plugins = {"terminalreporter": SimpleNamespace(isatty=isatty)}
        self.pluginmanager = SimpleNamespace(getplugin=self._plugins.get)

    def get_terminal_writer(self):
        return self

    def line(self, text, **flags):
        self.lines.append(text)


def test_drawing_returns_to_where_pytest_was_writing(capsys):
    running = job(step=1, steps=2)
    live = LiveProgress(Terminal(isatty=True), lambda: [running])
    live.tick(running)
    drawn = capsys.readouterr().out
    assert drawn == "\n\r\x1b[2K  test_it  running 2:05:07, step 1/2\x1b[1A\r\x1b[7C"
    live.tick(running)
    assert capsys.readouterr().out == ""  # nothing new, nothing written
    live.clear()
    assert capsys.readouterr().out == "\n\r\x1b[2K\x1b[1A\r\x1b[7C"
    live.clear()
    assert capsys.readouterr().out == ""


def test_elsewhere_a_line_is_written_only_after_a_long_wait(clock, capsys):
    terminal, waited_for = Terminal(isatty=False), job()
    live = LiveProgress(terminal, lambda: [waited_for])
    for clock.s in (0.0, 29.0, 31.0, 60.0, 92.0):
        live.tick(waited_for)
    assert terminal.lines == [f"\nwaiting for test_it: running {time}" for time in ("0:31", "1:32")]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "reason",
    ["waiting for the machine: in use by process 7 of user bob (uid 7)", "waiting in line behind process 7"],
)
def test_who_has_the_machine_that_is_waited_for_is_said_after_two_seconds(clock, reason):
    terminal, waited_for = Terminal(isatty=False), job(state=JobState.QUEUED, reason=reason)
    live = LiveProgress(terminal, lambda: [waited_for])
    for clock.s in (0.0, 1.9, 2.1, 30.0, 61.0, 63.0):
        live.tick(waited_for)
    assert terminal.lines == [
        f"\nwaiting for test_it: queued 1 of 1, {time} ({reason})" for time in ("0:02", "1:03")
    ]


def test_a_table_is_aligned_and_an_empty_one_is_nothing():
    assert table([]) == []
    long = ("test_copy_of_a_large_array[16]", "rate", "1 s", "-", "-", "new")
    assert [len(line) for line in table([long], 70)] == [69, 65]
    heading, row = table([("b", "metric_with_a_name", "1 s", "-", "-", "new")])
    assert heading.index("value") == row.index("1 s")


def test_a_real_terminal_shows_progress_and_no_trace_of_it_at_the_end(suite):
    suite.write("""
    @pytest.mark.parametrize("name", ["slow-" * 20])
    @script("until [ -e go ]; do sleep 0.05; done; echo rate: 4", cwd=str(pathlib.Path.cwd()))
    def test_slow(run): pass
    """)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 300))
    written = ""
    with (
        os.fdopen(ours, "rb", buffering=0) as terminal,
        suite.start(stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process,
    ):
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end has closed: Linux answers EIO
            while chunk := terminal.read(65536):
                written += chunk.decode(errors="replace")
                if f"test_slow[{'slow-' * 20}]  running 0:0" in written:
                    suite.file("go", "")
        assert process.wait() == 0
    # Longer than the 80 columns of what is no terminal.
    assert f"test_slow[{'slow-' * 20}]  running 0:0" in written
    assert re.search(r"\x1b\[2K\x1b\[1A\r\x1b\[\d+C", written)  # taken away again
