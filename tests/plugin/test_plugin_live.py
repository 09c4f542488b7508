"""Progress on a terminal, and quiet elsewhere."""

from __future__ import annotations

import contextlib
import os
import pty
import re
from types import SimpleNamespace

import pytest

from pytest_mlhpc.jobs.spec import NO_DATA, JobState
from pytest_mlhpc.live import MOST, Live, block, describe
from pytest_mlhpc.terminal import table


def job(name="test_it", state=JobState.RUNNING, data="memory", reason="", **progress):
    spec = SimpleNamespace(name=name, data=data, target=SimpleNamespace(id="sys:part"))
    return SimpleNamespace(spec=spec, state=state, progress=progress, reason=reason)


AT_3 = {"step": 3, "steps": 40, "samples_per_s": 12.345}


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        pytest.param(job(**AT_3), "running, step 3/40, 12.35 samples/s", id="a run"),
        pytest.param(job(data=NO_DATA, **AT_3), "running, step 3/40", id="a probe, which has no samples"),
        pytest.param(
            job(state=JobState.QUEUED, reason="Priority\x1b[2J\nnext"),
            "queued (Priority [2J next)",
            id="a queued job, with the scheduler's reason on one line",
        ),
    ],
)
def test_a_job_is_described(shown, text):
    assert describe(shown) == f"test_it on sys:part: {text}"


def test_submitted_jobs_come_first_and_the_rest_is_counted():
    jobs = [
        job("later", JobState.DECLARED),
        *[job(f"j{i}") for i in range(MOST)],
        job("done", JobState.ENDED),
    ]
    lines = block(jobs, 30)
    assert lines[0].startswith("  j0 on")
    assert lines[-1] == "  ... and 1 more"
    assert all(len(line) <= 30 for line in lines)


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
    live = Live(Terminal(isatty=True), lambda: [running])
    live.tick(running)
    drawn = capsys.readouterr().out
    assert drawn == "\n\r\x1b[2K  test_it on sys:part: running, step 1/2\x1b[1A\r\x1b[7C"
    live.tick(running)
    assert capsys.readouterr().out == ""  # nothing new, nothing written
    live.clear()
    assert capsys.readouterr().out == "\n\r\x1b[2K\x1b[1A\r\x1b[7C"
    live.clear()
    assert capsys.readouterr().out == ""


def test_elsewhere_a_line_is_written_only_after_a_long_wait(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("pytest_mlhpc.live.time.monotonic", lambda: now)
    terminal = Terminal(isatty=False)
    live = Live(terminal, list)
    for now in (0.0, 29.0, 31.0, 60.0, 92.0):  # noqa: B007 - the clock reads it
        live.tick(job())
    assert terminal.lines == ["\nwaiting for test_it on sys:part: running"] * 2
    assert capsys.readouterr().out == ""


def test_a_table_is_aligned_and_an_empty_one_is_nothing():
    assert table([]) == []
    heading, row = table([("b", "metric_with_a_name", "1 s", "-", "-", "new")])
    assert heading.index("value") == row.index("1 s")


def test_a_real_terminal_shows_progress_and_no_trace_of_it_at_the_end(suite):
    suite.write("""
    @script("until [ -e go ]; do sleep 0.05; done; echo rate: 4", cwd=str(pathlib.Path.cwd()))
    def test_slow(run): pass
    """)
    ours, theirs = pty.openpty()
    written = ""
    with (
        os.fdopen(ours, "rb", buffering=0) as terminal,
        suite.start(stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process,
    ):
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end has closed: Linux answers EIO
            while chunk := terminal.read(65536):
                written += chunk.decode(errors="replace")
                if "test_slow on local:cpu: running" in written:
                    suite.file("go", "")
        assert process.wait() == 0
    assert "test_slow on local:cpu: running" in written
    assert re.search(r"\x1b\[2K\x1b\[1A\r\x1b\[\d+C", written)  # taken away again
