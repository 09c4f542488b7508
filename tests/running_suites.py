"""Suites that pytest runs as a process of its own, as a user does, and what became of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Longest wait for anything on a busy machine, in seconds; a limit, never a measure. A job may wait for those of other tests.
#: It is below the limit of a whole test in `make test`, which would show no text.
LIMIT_S = 800.0

#: Reads test functions like those of a user; `script` runs a shell's words on the first node.
HEADER = """\
import os, pathlib, sys
import pytest
from pytest_mlhpc import Metric, nodes, program, train, workload
RATE = Metric("rate", r"rate: (\\S+)", "items/s")
def script(text, **spec):
    return program(["/bin/sh", "-c", text], RATE, judge=False, **spec)
"""

#: A job that says that it has begun, then waits for the file `go` beside the test (or for ever), then reports.
GATED = """\
@script("touch {folder}/begun-{name}; while [ ! -e {folder}/go ]; do sleep 0.2; done; echo rate: 4")
def test_{name}(run):
    assert run["rate"].value == 4
"""


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def text_of(test_file: str, name: str, **places: str) -> str:
    """Return a file beside a test, in which *places*, words in capitals, stand for what the test puts there."""
    text = (Path(test_file).parent / name).read_text(encoding="utf-8")
    for place, value in places.items():
        text = text.replace(place, value)
    return text


@dataclass(frozen=True)
class Result:
    """What a session of pytest left: exit code, all that it printed, and its records."""

    code: int
    text: str
    records: list[dict[str, Any]]

    def counts(self) -> dict[str, int]:
        """Return pytest's own counts of its last line: passed, failed, errors, skipped."""
        last = self.text.rstrip().splitlines()[-1] if self.text.strip() else ""
        return {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last)}

    def verdicts(self) -> list[str]:
        """Return the verdicts of all records, oldest first."""
        return [record["verdict"] for record in self.records]

    def expect(self, code: int, *texts: str, **counts: int) -> None:
        """Assert exit code, counts, and that all *texts* were said, wherever lines were broken."""
        said = " ".join(self.text.split())
        missing = [text for text in texts if " ".join(text.split()) not in said]
        assert (self.code, missing) == (code, []), self.text
        found = self.counts()
        assert {name: found.get(name, 0) for name in counts} == counts, self.text


@dataclass
class Session:
    """One pytest that runs."""

    suite: Suite
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to pytest alone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End pytest without a word."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def end(self, limit_s: float = LIMIT_S) -> Result:
        """Wait for its end."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            raise AssertionError(f"the session did not end:\n{self.text}") from None
        return Result(code, self.text, self.suite.records())

    def until(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait until *condition* holds; return what it returned."""
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            ended = self.process.poll()
            assert ended is None, f"pytest ended with {ended} before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.text}"
            time.sleep(0.1)
        return found

    def begun(self, name: str) -> None:
        """Wait until the gated job of test *name* runs."""
        self.until(f"begin of {name}", (self.suite.folder / f"begun-{name}").exists)


@dataclass
class Suite:
    """A folder with a systems file and tests; ``state`` is where its sessions write."""

    folder: Path
    state: Path
    system: str = "cluster"
    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "pytest.ini").write_text("[pytest]\n")

    def systems(self, **systems: Any) -> None:
        """Write the systems file."""
        # JSON is YAML
        (self.folder / "systems.yaml").write_text(json.dumps({"schema": 1, "systems": systems}))

    def tests(self, text: str, file: str = "test_faults.py") -> None:
        """Write a test file."""
        (self.folder / file).write_text(HEADER + textwrap.dedent(text))

    def gated(self, *names: str, file: str = "test_faults.py") -> None:
        """Write tests whose jobs wait until :meth:`go`."""
        self.tests("\n".join(GATED.format(folder=self.folder, name=name) for name in names), file)

    def go(self) -> None:
        """Let gated jobs end."""
        (self.folder / "go").touch()

    def start(self, *options: str, environment: dict[str, str] | None = None) -> Session:
        """Start pytest."""
        output = self.folder / f"pytest-{len(self.sessions)}.out"
        words = [
            sys.executable, "-m", "pytest", "--rootdir", str(self.folder), "-p", "no:cacheprovider",
            "-rA", "--system", self.system, f"--mlhpc-state={self.state}", *options,
        ]  # fmt: skip
        with output.open("wb") as file:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**os.environ, "COLUMNS": "200", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.sessions.append(Session(self, process, output))
        return self.sessions[-1]

    def begin(self, *names: str, options: Iterable[str] = ()) -> Session:
        """Start pytest and wait until the jobs of these tests run that say so."""
        session = self.start(*options)
        for name in names:
            session.begun(name)
        return session

    def begin_gated(self, *names: str, options: Iterable[str] = ()) -> Session:
        """Write tests whose jobs wait until :meth:`go`, start pytest, and wait until all of them run."""
        self.gated(*names)
        return self.begin(*names, options=options)

    def run(self, *options: str, environment: dict[str, str] | None = None) -> Result:
        """Run pytest to its end."""
        return self.start(*options, environment=environment).end()

    def reap(self, code: int | None = 0) -> str:
        """Run ``mlhpc reap``; it ends with this code (None: any). Return its output."""
        return self.mlhpc("reap", code=code)

    def mlhpc(self, *command: str, code: int | None = 0) -> str:
        """Run a command on the state directory; it ends with this code (None: any). Return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest_mlhpc.cli", *command, "--state-dir", self.state],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert code in {None, done.returncode}, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ledgers(self) -> list[Path]:
        """Return the open ledgers."""
        return list(self.state.glob("ledger/*.jsonl"))

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all sessions, oldest first."""
        lines = [
            json.loads(line)
            for path in sorted(self.state.glob("records/**/*.jsonl"))
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        return sorted(lines, key=lambda record: str(record["id"]))

    def close(self) -> None:
        """End sessions that a failed test left."""
        for session in self.sessions:
            if session.process.poll() is None:
                session.process.kill()
                session.process.wait(LIMIT_S)
