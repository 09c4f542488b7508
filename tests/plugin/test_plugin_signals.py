"""However a session dies, nothing of it is left running (the fixture of tests/conftest.py looks for processes)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from inner_sessions import ONE_JOB
from running_suites import LIMIT_S, wait_for

pytestmark = pytest.mark.servers  # sessions of pytest in processes of their own

RUNS = """
@script("touch {folder}/started; sleep 6000; echo rate: 4")
def test_long(run): pass
@script("sleep 6000; echo rate: 4", name="next")
def test_next(run): pass
"""

HELD_NODES = """
@pytest.mark.job("nodes", time_limit=6000)
def test_it(allocation):
    allocation.run(["sh", "-c", "touch {folder}/started; trap '' TERM; while :; do sleep 0.1; done"])
"""

WORKERS = ("-p", "xdist", "-n", "2")


def end_by(suite, number: int, tests: str, *arguments: str) -> tuple[int, str]:
    """Start a suite, send *number* to pytest once a program runs, and return exit code and output."""
    suite.write(tests.format(folder=suite.folder))
    started = suite.folder / "started"
    with suite.start(*arguments) as process:
        wait_for(lambda: started.exists() or process.poll() is not None)
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert started.exists(), output
    return process.returncode, output


@pytest.mark.parametrize(
    ("number", "tests", "arguments"),
    [
        pytest.param(signal.SIGINT, RUNS, (), id="Ctrl-C while a run is awaited"),
        pytest.param(signal.SIGTERM, RUNS, (), id="SIGTERM while a run is awaited"),
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


@pytest.mark.parametrize("arguments", [(), WORKERS], ids=["alone", "with workers"])
def test_a_killed_session_leaves_no_process_and_the_next_one_clears_its_ledger(suite, arguments):
    code, _ = end_by(suite, signal.SIGKILL, RUNS, *arguments)
    assert code == -signal.SIGKILL
    (ledger,) = (suite.state / "ledger").glob("*.jsonl")
    (submitted, *_) = [
        line for line in map(json.loads, ledger.read_text().splitlines()) if line["event"] == "submitted"
    ]
    data = Path(submitted["directory"]) / "data"
    data.mkdir()
    suite.write(ONE_JOB)
    suite.run().assert_outcomes(passed=1)
    assert not list((suite.state / "ledger").glob("*.jsonl"))
    assert data.parent.is_dir()
    assert not data.exists()
