"""PAYLOAD. The process in which one rank of a base model is trained, and what it says: a child of the rank.

A base model must be able to die without the run: launchers end all ranks when one dies. So a rank of such a run trains
nothing itself. It starts a process that does, hears it by a pipe, and outlives it.

To the child goes, on its standard input, one line of JSON with what it is to do, then ``go`` when all may begin; the end of
it ends the child, so that none outlives its rank. From the child come lines ``{"kind": ..., "body": ...}``; a line with
``bytes`` is followed by so many of a tensor file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Iterator, List, Mapping, Optional

import torch

from pytest_mlhpc.node.processes import describe_exit
from pytest_mlhpc.node.worker.bagging.meeting import Why

_CHILD = "pytest_mlhpc.node.worker.bagging.child"

#: Seconds between SIGTERM and SIGKILL of a child whose base model has failed elsewhere.
_GRACE_S = 2.0


@dataclass(frozen=True)
class Said:
    """One message of a child; ``tensors`` came behind it, if any did."""

    kind: str
    body: Any = None
    tensors: Any = None


class Messages:
    """Puts what comes out of a pipe together to messages. Damaged lines raise ValueError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Optional[Mapping[str, Any]] = None

    def feed(self, data: bytes) -> Iterator[Said]:
        """Take bytes, and yield the messages that are whole now."""
        self._buffer += data
        while True:
            if self._head is None:
                end = self._buffer.find(b"\n")
                if end < 0:
                    return
                self._head = json.loads(self._buffer[:end])
                del self._buffer[: end + 1]
            size = int(self._head.get("bytes") or 0)
            if len(self._buffer) < size:
                return
            head, self._head = self._head, None
            body = bytes(self._buffer[:size])
            del self._buffer[:size]
            tensors = torch.load(io.BytesIO(body), weights_only=True) if size else None
            yield Said(str(head["kind"]), head.get("body"), tensors)


class BaseProcess:
    """One child; to be closed."""

    def __init__(self, task: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.fd, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(theirs)],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                pass_fds=(theirs,),
            )
        except OSError:
            os.close(self.fd)
            raise
        finally:
            os.close(theirs)
        self._messages = Messages()
        self._tell(json.dumps(task))

    def close(self) -> None:
        """End the child and forget it."""
        self.end()
        os.close(self.fd)

    def go(self) -> None:
        """Let the child begin its timed window."""
        self._tell("go")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has died, which its exit code tells
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def hear(self, seconds: float) -> Optional[List[Said]]:
        """Return what was said within *seconds*, None at the end of all.

        Raises:
            ValueError: it was no message.
        """
        if not select.select([self.fd], [], [], seconds)[0]:
            return []
        data = os.read(self.fd, 1 << 20)
        return list(self._messages.feed(data)) if data else None

    def why(self) -> Why:
        """Wait for the child and return how it ended, as the failure of its base model."""
        code = self._process.wait()
        outcome = "worker_killed" if code < 0 else "worker_exit"
        return outcome, f"the process that trained it {describe_exit(code)} before it had reported"

    def end(self) -> None:
        """End the child, whatever it does. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
