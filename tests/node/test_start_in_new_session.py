"""A program in a session of its own is started although a signal of the terminal comes while it is started."""

import os
import signal
import subprocess

import pytest

from pytest_mlhpc.node.processes import MAX_STARTS, start_in_new_session


@pytest.fixture
def killed_starts(monkeypatch):
    """Let SIGHUP kill the first so many processes before they execute their program; the list has all that were started."""
    real, started = subprocess.Popen, []

    def install(killed: int) -> list[subprocess.Popen]:
        def popen(argv, **options):
            if len(started) < killed:
                options["preexec_fn"] = lambda: os.kill(os.getpid(), signal.SIGHUP)
            started.append(real(argv, **options))
            return started[-1]

        monkeypatch.setattr(subprocess, "Popen", popen)
        return started

    return install


def test_a_process_that_a_signal_killed_before_it_was_the_program_is_started_again(killed_starts):
    started = killed_starts(1)
    with start_in_new_session(["/bin/sh", "-c", "echo here"], stdout=subprocess.PIPE) as process:
        assert process.communicate() == (b"here\n", None)
    assert [one.returncode for one in started] == [-signal.SIGHUP, 0]
    assert started[0].stdout.closed


def test_who_kills_every_start_is_believed_in_the_end(killed_starts):
    started = killed_starts(MAX_STARTS)
    assert start_in_new_session(["/bin/true"]).wait() == -signal.SIGHUP
    assert len(started) == MAX_STARTS


def test_a_program_that_ends_itself_at_once_is_started_once(killed_starts):
    started = killed_starts(0)
    assert start_in_new_session(["/bin/sh", "-c", "kill -HUP $$"]).wait() == -signal.SIGHUP
    assert len(started) == 1


def test_the_process_leads_its_session():
    with start_in_new_session(["/bin/cat"], stdin=subprocess.PIPE) as process:
        assert os.getsid(process.pid) == process.pid


def test_a_program_that_is_missing_is_an_error_at_once(killed_starts):
    started = killed_starts(0)
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        start_in_new_session(["/no-such-program"])
    assert not started
