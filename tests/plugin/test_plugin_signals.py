"""However a session dies, nothing of it is left running (the fixture of tests/conftest.py looks for processes)."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from inner_sessions import ONE_JOB
from running_suites import LIMIT_S, wait_for

from pytest_mlhpc.session.session import BenchmarkSession
from pytest_mlhpc.session.signals import Signals

pytestmark = pytest.mark.servers  # sessions of pytest in processes of their own

RUNS = """
@script("touch {folder}/started; sleep 6000; echo rate: 4")
def test_long(run): pass
@script("sleep 6000; echo rate: 4", name="next")
def test_next(run): pass
"""

STUBBORN = """
@script("trap 'touch {folder}/trapped' TERM; touch {folder}/started; while :; do sleep 0.1; done")
def test_long(run): pass
"""

HELD_NODES = """
@nodes(time_limit=6000)
def test_it(allocation):
    allocation.run(["sh", "-c", "touch {folder}/started; trap '' TERM; while :; do sleep 0.1; done"])
"""

WORKERS = ("-p", "xdist", "-n", "2")


def end_by(suite, number: int, tests: str, *arguments: str) -> tuple[int, str]:
    """Send *number* to the session of a suite once a program runs; return exit code and output."""
    suite.write(tests.format(folder=suite.folder))
    return suite.end_by(number, suite.folder / "started", *arguments)


@pytest.mark.parametrize(
    ("number", "tests", "arguments"),
    [
        pytest.param(signal.SIGINT, RUNS, (), id="Ctrl-C while a run is awaited"),
        pytest.param(signal.SIGTERM, RUNS, (), id="SIGTERM while a run is awaited"),
        pytest.param(signal.SIGHUP, RUNS, (), id="a dropped connection while a run is awaited"),
        pytest.param(signal.SIGHUP, RUNS, WORKERS, id="a dropped connection while workers await runs"),
        pytest.param(signal.SIGINT, RUNS, WORKERS, id="Ctrl-C while workers await runs"),
        pytest.param(signal.SIGINT, HELD_NODES, (), id="Ctrl-C while a program runs on held nodes"),
        pytest.param(
            signal.SIGINT, HELD_NODES, WORKERS, id="Ctrl-C while a worker runs a program on held nodes"
        ),
        pytest.param(signal.SIGTERM, HELD_NODES, (), id="SIGTERM while a program runs on held nodes"),
    ],
)
def test_an_interrupted_session_cancels_its_jobs(suite, number, tests, arguments):
    code, output = end_by(suite, number, tests, *arguments)
    assert code == 2, output
    assert "Traceback" not in output
    assert not list((suite.state / "ledger").glob("*.jsonl"))  # nothing is open
    assert suite.verdicts() == (
        ["cancelled"] if tests == HELD_NODES else []
    )  # nodes that were used are recorded


def test_a_terminal_that_is_gone_keeps_no_session_from_ending_in_order(suite):
    suite.write(RUNS.format(folder=suite.folder))
    started = suite.folder / "started"
    ours, theirs = os.openpty()
    try:
        with suite.start(stdin=theirs, stdout=theirs, stderr=theirs) as process:
            wait_for(lambda: started.exists() or process.poll() is not None)
            os.close(ours)
            process.send_signal(signal.SIGHUP)
            assert process.wait(LIMIT_S) == 2
    finally:
        os.close(theirs)
    assert not list((suite.state / "ledger").glob("*.jsonl"))


def test_a_second_ctrl_c_ends_the_waiting_without_a_traceback(suite):
    suite.write(STUBBORN.format(folder=suite.folder))
    started, trapped = suite.folder / "started", suite.folder / "trapped"
    with suite.start() as process:
        for file in (started, trapped):
            wait_for(lambda file=file: file.exists() or process.poll() is not None)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, "Traceback" in output) == (2, False), output
    suite.write(ONE_JOB)
    suite.run().assert_outcomes(passed=1)
    assert not list((suite.state / "ledger").glob("*.jsonl"))


def test_a_second_ctrl_c_while_the_queues_are_asked_to_end_ends_all_of_them():
    asked = []

    def queue(name, *ends):
        effects = iter(ends)
        return Mock(
            durable=False,
            close=Mock(side_effect=lambda **_: (asked.append(name), next(effects, lambda: None)())),
        )

    def interrupted():
        raise KeyboardInterrupt

    session = SimpleNamespace(_detaching=False, _drivers={"a": queue("a", interrupted), "b": queue("b")})
    with pytest.raises(KeyboardInterrupt):
        BenchmarkSession._close_drivers(session)
    assert asked == ["a", "a", "b"]


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals(lambda: None)
        signals.catch()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with signals.closing():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("arguments", [(), WORKERS], ids=["alone", "with workers"])
def test_a_killed_session_leaves_no_process_and_the_next_one_clears_its_ledger(suite, arguments):
    code, _ = end_by(suite, signal.SIGKILL, RUNS, *arguments)
    assert code == -signal.SIGKILL
    # Ids sort by time. The program of the first runs; the second may have its line in the ledger and no folder yet.
    file = min((suite.state / "ledger").glob("*@*.jsonl"))
    submitted = json.loads(file.read_text().splitlines()[0])
    data = Path(submitted["directory"]) / "data"
    data.mkdir()
    suite.write(ONE_JOB)
    suite.run().assert_outcomes(passed=1)
    assert not list((suite.state / "ledger").glob("*.jsonl"))
    assert data.parent.is_dir()
    assert not data.exists()
