"""However a session dies, nothing of it is left running (the fixture of tests/conftest.py looks for processes)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

LIMIT_S = 40.0

#: A surrounding nohup or background job ignores signals that these tests send, and children inherit that.
DEFAULT_SIGNALS = ("env", "--default-signal=INT,HUP,TERM")

SUITE = """
@script("echo $$ > started; sleep 300; echo rate: 4")
def test_long(run): pass
@script("sleep 300; echo rate: 4", name="next")
def test_next(run): pass
"""


def end_by(suite, number: int, workers: int) -> tuple[int, str]:
    """Start the suite, send *number* to pytest once a program runs, and return exit code and output."""
    suite.write(SUITE)
    argv = [
        *DEFAULT_SIGNALS,
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "--system",
        "local",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.Popen(
        [*argv, *(["-n", str(workers)] if workers else [])],
        cwd=suite.pytester.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started, deadline = suite.pytester.path / "started", time.monotonic() + LIMIT_S
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_session_cancels_its_jobs(suite, workers, number):
    code, output = end_by(suite, number, workers)
    assert code == 2, output
    assert "Traceback" not in output
    assert not list((suite.state / "ledger").glob("*.jsonl"))  # nothing is open


def test_a_killed_session_leaves_no_process_and_the_next_one_clears_its_ledger(suite, workers):
    code, _ = end_by(suite, signal.SIGKILL, workers)
    assert code == -signal.SIGKILL
    (ledger,) = (suite.state / "ledger").glob("*.jsonl")
    (submitted, *_) = [
        line for line in map(json.loads, ledger.read_text().splitlines()) if line["event"] == "submitted"
    ]
    data = Path(submitted["directory"]) / "data"
    data.mkdir()
    suite.write("@job()\ndef test_it(run): pass\n")
    suite.run().assert_outcomes(passed=1)
    assert not list((suite.state / "ledger").glob("*.jsonl"))
    assert data.parent.is_dir()
    assert not data.exists()
