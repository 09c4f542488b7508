"""Starts vetting's child as the engine does, and speaks its protocol."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.vet.finding import CheckOutcome

ROOT = Path(__file__).resolve().parents[3]

#: A guard against hangs, in seconds.
PATIENCE_S = 300.0


class Child:
    """One child, which may use these *cores* alone. Closing it kills it."""

    def __init__(
        self,
        *options: str,
        python: str = sys.executable,
        environ: dict[str, str] | None = None,
        folder: Path = ROOT,
        cores: set[int] | None = None,
    ) -> None:
        reading, writing = os.pipe()
        # No test's cookie: a child may serve several tests.
        base = {name: value for name, value in os.environ.items() if name != "MLHPC_TEST"}
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or allowed)
        try:
            self.process = subprocess.Popen(
                [python, "-m", "pytest_mlhpc.node.vet.load.main", "--answers", str(writing), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                cwd=folder,
                env={**base, **(environ or {})},
            )
        finally:
            os.sched_setaffinity(0, allowed)
            os.close(writing)
        self._answers, self._received = reading, b""
        self._number = 0

    def next(self) -> dict[str, Any] | None:
        """Return the next message, None at the end of all."""
        until = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._received:
                assert selector.select(max(0.0, until - time.monotonic())), "the child says nothing"
                data = os.read(self._answers, 65536)
                if not data:
                    return None
                self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)

    def answer(self) -> dict[str, Any]:
        """Return the next message that ends something; what has begun in between is skipped."""
        while True:
            message = self.next()
            assert message is not None, f"the child ended: {self.process.wait()}, {self.stderr()}"
            if "begun" not in message:
                return message

    def ready(self) -> dict[str, Any]:
        """Wait until it is ready."""
        answer = self.answer()
        assert "ready" in answer, answer
        return answer["ready"]

    def write(self, data: bytes) -> None:
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def order(self, do: str, **args: Any) -> int:
        """Send an order; return its id."""
        self._number += 1
        self.write(json.dumps({"id": self._number, "do": do, "args": args}).encode() + b"\n")
        return self._number

    def ask(self, do: str, **args: Any) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        number = self.order(do, **args)
        answer = self.answer()
        assert answer["id"] == number
        return answer

    def outcome(self, do: str, **args: Any) -> CheckOutcome:
        """Send an order and return what was found."""
        answer = self.ask(do, **args)
        assert "outcome" in answer, answer
        return from_json(CheckOutcome, answer["outcome"])

    def cpu_s(self) -> float:
        """Return how long it has computed since its start."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stderr(self) -> str:
        return self.process.stderr.read().decode(errors="replace")

    def end(self) -> int:
        """Close its standard input and wait for its end."""
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stderr.close()
        os.close(self._answers)
