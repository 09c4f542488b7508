"""What a pod's agent printed: a container's log comes in, worker lines and the files of programs' output come out.

The form is that of ``batch/pod_text.py``. A log may be delivered twice in part or as a whole, may lack lines where it was
rotated, and holds words of others in between: all that can be read any number of times, in any order.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.batch.pod_text import RS, tags
from pytest_mlhpc.results.lines import MAX_BODY, Message, encode

#: Most bytes of one stream that are kept: what an agent prints of it at most (``batch/logs.py``).
OUTPUT_CAP = 16 * 1024 * 1024

#: Most bytes of worker lines that wait for one that is missing.
HELD_CAP = 2 * MAX_BODY

_OUTPUT = re.compile(rb"\[(\S{1,128}) (launcher|\d{1,6}|pod\d{1,6}) (\d{1,10})\] (.*)", re.DOTALL)
_NUMBER = re.compile(rb'\{"n":(\d{1,12}),')
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass
class Output:
    """One stream of a run: what of it lies in ``path``, and what the agent says that it was."""

    path: Path
    ranges: list[tuple[int, int]] = field(
        default_factory=list
    )  #: bytes that were seen, in order, not touching
    size: int | None = None  #: in bytes, as the agent says; None: its end has not been heard of
    dropped: int = 0  #: printed beyond what is kept
    sha256: str = ""
    good: bool = False
    error: str = ""  #: why the file cannot be written
    _fd: int = -1

    @property
    def seen(self) -> int:
        """How many bytes are in the file."""
        return sum(end - start for start, end in self.ranges)

    @property
    def problem(self) -> str:
        """Say what is wrong with it, or nothing."""
        if self.good:
            return ""
        if self.error:
            return f"cannot write {self.path}: {self.error}"
        if self.size is None:
            return f"of {self.path.name} {self.seen} bytes came, and not its end"
        if self.seen != self.size:
            return f"of the {self.size} bytes of {self.path.name} {self.seen} came"
        return f"{self.path.name} is not what the program printed: its SHA-256 is another"

    def write(self, offset: int, data: bytes) -> None:
        """Put *data* where it belongs."""
        if self.good or self.error or offset + len(data) > OUTPUT_CAP:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, data, offset)
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        self._cover(offset, offset + len(data))

    def _cover(self, start: int, end: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            self.ranges[-1] = (self.ranges[-1][0], end)
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.ranges, (start, end)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            elif low < high:
                merged.append((low, high))
        self.ranges = merged

    def check(self) -> None:
        """Find out whether the file is what the program printed; say in it what was not kept, as a batch does."""
        if self.good or self.error or self.size is None or self.seen != self.size:
            return
        try:
            self.path.touch()
            with self.path.open("r+b") as file:
                file.truncate(self.size)
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    return
                if self.dropped:
                    file.write(f"\n[{self.dropped} more bytes were not kept]\n".encode())
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        self.good = True
        self.close()

    def close(self) -> None:
        """Give the descriptor back; what comes later opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class PodStream:
    """The log of one pod's agent, line by line.

    ``over`` is the exit code that the agent gave itself, None while it has not said so.

    Args:
        plan: what the agent was told to do; files go below ``plan.directory`` as this process sees it.
        pod: its name, for people.
    """

    def __init__(self, plan: Plan, pod: str = "") -> None:
        self.pod = pod
        self.over: int | None = None
        self.outputs: dict[tuple[str, str], Output] = {}
        self._folder = Path(plan.directory)
        self._runs = {run.run_id: run for run in plan.runs}
        self._tags = {tag.encode(): run_id for run_id, tag in tags(list(self._runs)).items()}
        self._next = 0  #: number of the next lasting line that is to come
        self._given = 0  #: lines that were handed on, with numbers of our own
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._failed: set[str] = set()
        self._words: collections.deque[bytes] = collections.deque(maxlen=5)

    @property
    def missing(self) -> str:
        """What was lost on its way so far and may be had by reading the log again; empty if nothing.

        What merely has not come yet is not counted before ``over``.
        """
        problems = []
        if self._held and self._next not in self._held:
            problems = [f"worker lines before number {min(self._held)}"]
        problems += [out.problem for out in self.outputs.values() if out.size is not None and out.problem]
        if self.over is not None:
            problems += [out.problem for out in self.outputs.values() if out.size is None]
        return "; ".join(problems)

    def feed(self, line: bytes) -> bytes:
        """Take one line of the log; return the worker lines that can be handed on now, perhaps none."""
        _, separator, text = line.rstrip(b"\r\n").rpartition(RS)
        if not separator:
            return self._ready() if self._output(line) else b""
        found = _NUMBER.match(text)
        if not found:
            self._about_pod(text)
            return self._ready()
        number, rest = int(found.group(1)), text[found.end() :]
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return b""  # cut short: it is missing, and comes again at the log's end
        if not isinstance(data, dict) or not all(
            isinstance(data.get(name), str) for name in ("run", "nonce", "kind")
        ):
            return b""
        if data.get("kind") == "progress" or not self._ours(data):
            return self._give(rest) if number == self._next or not self._ours(data) else b""
        if number >= self._next and number not in self._held and self._held_bytes < HELD_CAP:
            self._held[number] = self._located(data, rest)
            self._held_bytes += len(rest)
        return self._ready()

    def last_words(self, characters: int = 600) -> str:
        """Return the last lines that are neither worker lines nor a program's, as text that is safe to print."""
        text = b"\n".join(self._words).decode("utf-8", "replace")
        clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
        return clean.strip()[-characters:]

    def close(self) -> None:
        """Give descriptors back. The log may still be read again."""
        for out in self.outputs.values():
            out.close()

    def finish(self) -> bytes:
        """Say that nothing more will come; return what waited for lines that are missing, with the gaps in its numbers.

        To be called when the log was read as well as it can be, and its answer to be handed on like that of ``feed``.
        """
        self.close()
        found = b""
        while self._held:
            number = min(self._held)
            self._given += number - self._next
            self._next = number
            found += self._ready(whole=True)
        return found

    def _ours(self, data: dict[str, Any]) -> bool:
        run = self._runs.get(str(data.get("run")))
        return run is not None and data.get("nonce") == run.nonce

    def _located(self, data: dict[str, Any], rest: bytes) -> bytes:
        """Return the line with the path at which the log lies here."""
        body = data.get("body")
        if data.get("kind") != "failed" or not isinstance(body, dict) or not isinstance(body.get("log"), str):
            return rest
        log = PurePosixPath(body["log"])
        if not log.parts or log.is_absolute() or ".." in log.parts:
            return rest
        body["log"] = str(self._folder / log)
        return json.dumps(data, separators=(",", ":")).encode("ascii").split(b",", 1)[1]

    def _give(self, rest: bytes) -> bytes:
        line = b'{"n":%d,%s\n' % (self._given, rest)
        self._given += 1
        return line

    def _ready(self, *, whole: bool = False) -> bytes:
        found = b""
        while self._next in self._held:
            rest = self._held[self._next]
            failed = b""
            if b'"kind":"failed"' in rest[:400]:
                self._failed.add(json.loads(b'{"n":0,' + rest)["run"])
            elif b'"kind":"end"' in rest[:400]:
                run = self._runs[json.loads(b'{"n":0,' + rest)["run"]]
                problem = self._lacks(run)
                if problem and not whole:
                    return found
                failed = self._failure(run, problem) if problem else b""
            found += failed + self._give(rest)
            self._held_bytes -= len(self._held.pop(self._next))
            self._next += 1
        return found

    def _lacks(self, run: RunPlan) -> str:
        """Say what is not there of the output in which the metrics of a `command` are looked for."""
        if run.workload != "command" or not run.metrics or run.run_id in self._failed:
            return ""
        out = self.outputs.get((run.run_id, "0" if run.launcher == "plain" else "launcher"))
        return (
            out.problem if out is not None else "nothing of the program's output came, nor that there is none"
        )

    def _failure(self, run: RunPlan, problem: str) -> bytes:
        text = (
            f"the pod's log is incomplete: {problem}; see containerLogMaxSize of the kubelet, or print less"
        )
        body = {"outcome": "truncated_result", "text": text, "log": ""}
        lines = encode(Message(run.run_id, run.nonce, "failed", body), self._given)
        self._given += len(lines)
        return b"".join(lines)

    def _about_pod(self, text: bytes) -> None:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(data, dict):
            return
        if data.get("pod") == "over" and type(data.get("exit")) is int:
            self.over = data["exit"]
        elif data.get("pod") == "output" and self._ours(data):
            size, dropped, sha = data.get("bytes"), data.get("dropped"), data.get("sha256")
            stream = str(data.get("stream"))
            known = re.fullmatch(r"launcher|\d{1,6}|pod\d{1,6}", stream) and _HEX.fullmatch(str(sha))
            if known and type(size) is int and type(dropped) is int and 0 <= size <= OUTPUT_CAP:
                out = self._stream(data["run"], stream)
                out.size, out.dropped, out.sha256 = size, dropped, str(sha)
                out.check()

    def _output(self, line: bytes) -> bool:
        """Take a program's output; return whether its stream is whole now."""
        found = _OUTPUT.fullmatch(line.removesuffix(b"\n"))
        run_id = self._tags.get(found.group(1)) if found else None
        if not found or run_id is None:
            self._words.append(line[:4096].rstrip())
            return False
        out = self._stream(run_id, found.group(2).decode("ascii"))
        data = unescape(found.group(4))
        if data is None or out.good:
            return False
        out.write(int(found.group(3)), data)
        out.check()
        return out.good

    def _stream(self, run_id: str, stream: str) -> Output:
        key = run_id, stream
        if key not in self.outputs:
            folder = self._folder / run_id
            self.outputs[key] = Output(
                folder / (f"rank{stream}.log" if stream.isdigit() else f"{stream}.log")
            )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.outputs[key].path.unlink(missing_ok=True)
            except OSError as error:
                self.outputs[key].error = error.strerror or str(error)
        return self.outputs[key]


def unescape(text: bytes) -> bytes | None:
    r"""Return what a program printed, with the newline unless the line goes on; None: *text* is not of our form.

    Our escapes are ``\\`` and ``\xHH``, which Python's own decoder knows; a single backslash at the end is no part of it.
    """
    if b"\\" not in text:
        return text + b"\n"
    more = (len(text) - len(text.rstrip(b"\\"))) % 2
    try:
        data = text[: len(text) - more].decode("unicode_escape").encode("latin-1")
    except (UnicodeError, ValueError):
        return None
    return data if more else data + b"\n"
