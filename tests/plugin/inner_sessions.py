"""Suites of `command` jobs on the real local provisioner, run by pytest: in this process, or in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from running_suites import LIMIT_S, text_of, wait_for


def data(name: str) -> str:
    """Return the text of a file beside the tests."""
    return text_of(__file__, name)


def cases(name: str) -> dict[str, dict[str, Any]]:
    """Return what a YAML file beside the tests says of each case."""
    return dict(yaml.safe_load(data(name)))


SYSTEMS = data("systems.yaml")

#: Serves the scheduler of `site` by this machine's own provisioner.
CONFTEST = data("suites/conftest.py.txt")

HEADER = data("suites/header.py.txt")

#: Nothing of a session in this process may outlive it; collecting garbage at its end is slow in a large process.
IN_PROCESS = ("-p", "no:unraisableexception", "-p", "no:threadexception", "-p", "no:faulthandler")

#: A surrounding nohup or background job ignores signals that tests send, and children inherit that.
COMMAND = ("env", "--default-signal=INT,HUP,TERM", sys.executable, "-m", "pytest", "-p", "no:cacheprovider")

ONE_JOB = "@job()\ndef test_it(run): pass\n"


class Result(pytest.RunResult):
    """What a session left."""

    def expect(self, code: int, *lines: str, absent: str = "", **outcomes: int) -> Result:
        """Assert its exit code, what became of its tests, and that it printed each of *lines*, and no line *absent*.

        In these ``*`` and ``?`` are any text.
        """
        assert self.ret == code, output(self)
        if outcomes:
            self.assert_outcomes(**outcomes)
        for line in lines:
            self.stdout.fnmatch_lines([line])
        if absent:
            self.stdout.no_fnmatch_line(absent)
        return self


@dataclass
class Suite:
    """A folder with a systems file and tests; ``state`` is where everything goes that a session writes."""

    folder: Path
    state: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.file("systems.yaml", SYSTEMS)
        self.file("conftest.py", CONFTEST)
        self.file("pytest.ini", "[pytest]\n")

    def file(self, name: str, text: str) -> Path:
        """Write a file of the suite."""
        path = self.folder / name
        path.write_text(text)
        return path

    def write(self, body: str, name: str = "test_suite.py") -> None:
        """Write tests that may use what HEADER defines."""
        self.file(name, HEADER + textwrap.dedent(body))

    def run(self, *arguments: str, system: str = "local") -> Result:
        """Run pytest in this process."""
        out, err = io.StringIO(), io.StringIO()
        with self._undo_imports(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = pytest.main(["-rA", *IN_PROCESS, *selected(system), *arguments])
        return Result(code, out.getvalue().splitlines(), err.getvalue().splitlines(), 0.0)

    @contextlib.contextmanager
    def _undo_imports(self) -> Iterator[None]:
        """Work in the folder; afterwards forget its modules, and what was changed to import them."""
        before = dict(sys.modules)
        importlib.invalidate_caches()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.chdir(self.folder)
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(sys, "dont_write_bytecode", True)  # files are rewritten within a second
            warnings.resetwarnings()
            yield
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(f"{self.folder}/"):
                del sys.modules[name]
                sys.modules.update({name: before[name]} if name in before else {})

    def run_workers(self, *arguments: str, system: str = "local") -> Result:
        """Run pytest in a process of its own, with two workers of pytest-xdist."""
        return self.run_process("-p", "xdist", "-n", "2", *selected(system), *arguments)

    def run_process(self, *arguments: str) -> Result:
        """Run pytest in a process of its own."""
        argv = [*COMMAND, "-rA", *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(argv, cwd=self.folder, check=False, timeout=LIMIT_S, **pipes)
        return Result(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    @contextlib.contextmanager
    def start(
        self, *arguments: str, system: str = "local", **options: Any
    ) -> Iterator[subprocess.Popen[str]]:
        """Start pytest in a process of its own, which ends with the block at the latest."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        argv = [*COMMAND, *selected(system), *arguments]
        with subprocess.Popen(argv, cwd=self.folder, text=True, **{**pipes, **options}) as process:
            try:
                yield process
            finally:
                process.kill()

    def end_by(self, number: int, begun: Path, *arguments: str) -> tuple[int, str]:
        """Start pytest and send it a signal once a program has made the file *begun*; return exit code and output.

        SIGHUP goes to its workers too, as from a terminal. Programs that sleep have ended on return.
        """
        with self.start(*arguments, start_new_session=True) as process:
            wait_for(lambda: begun.exists() or process.poll() is not None)
            (os.killpg if number == signal.SIGHUP else os.kill)(process.pid, number)
            text, _ = process.communicate(timeout=LIMIT_S)
        assert begun.exists(), text
        wait_for(lambda: not self.processes(program="sleep"))
        return process.returncode, text

    def records(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted(self.state.glob("records/*/*.jsonl"))
            for line in path.read_text().splitlines()
        ]

    def record(self, part: str) -> dict[str, Any]:
        """Return the one record whose node id has *part* in it."""
        (found,) = [record for record in self.records() if part in record["node_id"]]
        return found

    def verdicts(self) -> list[str]:
        return [record["verdict"] for record in self.records()]

    def started(self) -> list[str]:
        """Return the programs that were started, as their plans say, in order of their ids, which sort by time."""
        plans = sorted(self.state.glob("runs/*/*/plan.json"), key=lambda path: path.parent.name)
        return [json.loads(path.read_text())["runs"][0]["argv"][-1] for path in plans]

    def processes(self, variable: str = "", program: str = "") -> list[int]:
        """Return processes of the suite's sessions that have *variable* in their environment, and run *program*."""
        variables = {f"MLHPC_STATE={self.state}".encode(), variable.encode()}
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = variables <= set((process / "environ").read_bytes().split(b"\0"))
                if ours and program.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def nothing_was_written(self) -> bool:
        return not self.state.exists() or not any(
            path for path in self.state.rglob("*") if path.is_file() and "cache" not in path.parts
        )


def selected(system: str) -> tuple[str, ...]:
    """Return the option that selects *system*, if any."""
    return ("--system", system) if system else ()


def output(result: pytest.RunResult) -> str:
    """Return all that a session printed."""
    return result.stdout.str() + result.stderr.str()
