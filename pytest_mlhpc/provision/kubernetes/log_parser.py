"""From a pod's log to worker lines and output files, and the copy of worker lines that outlives the pods.

Open it when a result or a program's output is missing. The format is that of ``node/batch/pod_stream.py``. A log may be read
twice, in part or as a whole, may lack rotated lines, and contains other lines: input may come in any order.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pytest_mlhpc.node.batch.pod_stream import RS, tags
from pytest_mlhpc.node.files import read_json, read_private, replace_file
from pytest_mlhpc.node.processes import CappedLog, last_lines
from pytest_mlhpc.node.protocol.lines import MAX_BODY, Message, encode
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.run_files import ARCHIVE

#: Most bytes of worker lines that wait for a missing one.
MAX_WAITING_BYTES = 2 * MAX_BODY

#: Most bytes of one stream, as an agent prints no more (``node/batch/output.py``).
MAX_OUTPUT_BYTES = 16 * 1024 * 1024

SAVED_OUTPUT_FILE: Final = "worker_lines.jsonl"
_SAVED_SCHEMA: Final = 1

_OUTPUT_LINE = re.compile(
    rb"\[(\S{1,128}) (launcher|artifacts|(?:output-ranks|errors-ranks|errors)|\d{1,6}|pod\d{1,6}) (\d{1,10})\] (.*)",
    re.DOTALL,
)
_LINE_NUMBER = re.compile(rb'\{"n":(\d{1,12}),')
_SHA256 = re.compile(r"[0-9a-f]{64}")


class AgentOutput:
    """The parsed log of one pod's agent. ``exit_code`` is the agent's own, None until it is printed.

    Args:
        plan: the agent's plan; files are written below ``plan.directory``.
        pod: its name, for people.
    """

    def __init__(self, plan: Plan, pod: str = "") -> None:
        self.pod = pod
        self.exit_code: int | None = None
        self.outputs: dict[tuple[str, str], OutputFile] = {}
        self._folder = Path(plan.directory)
        self._runs = {run.run_id: run for run in plan.runs}
        self._tags = {tag.encode(): run_id for run_id, tag in tags(list(self._runs)).items()}
        self._next = 0  #: number of the next expected line
        self._emitted = 0  #: number of lines returned, which are numbered anew
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0
        self._failed: set[str] = set()
        self._other_lines: collections.deque[bytes] = collections.deque(maxlen=5)

    @property
    def missing(self) -> str:
        """What was lost so far and may be recovered by reading the log again; empty if nothing.

        Output that may still come counts only after ``exit_code`` is known.
        """
        problems = []
        if self._waiting and self._next not in self._waiting:
            problems = [f"worker lines before number {min(self._waiting)}"]
        problems += [out.problem for out in self.outputs.values() if out.size is not None and out.problem]
        if self.exit_code is not None:
            problems += [out.problem for out in self.outputs.values() if out.size is None]
        return "; ".join(problems)

    def feed(self, line: bytes) -> bytes:
        """Take one line of the log; return the worker lines that are complete now, perhaps none."""
        _, separator, text = line.rstrip(b"\r\n").rpartition(RS)
        if not separator:
            return self._emit_ready() if self._take_output(line) else b""
        found = _LINE_NUMBER.match(text)
        if not found:
            self._take_pod_line(text)
            return self._emit_ready()
        number, rest = int(found.group(1)), text[found.end() :]
        try:
            data = read_json(text)
        except (ValueError, RecursionError):
            return b""  # a cut line: it comes again when the log is read again
        if not isinstance(data, dict) or not all(
            isinstance(data.get(name), str) for name in ("run", "nonce", "kind")
        ):
            return b""
        if data.get("kind") == "progress" or not self._is_of_run(data):
            return self._emit(rest) if number == self._next or not self._is_of_run(data) else b""
        if number >= self._next and number not in self._waiting and self._waiting_bytes < MAX_WAITING_BYTES:
            self._waiting[number] = self._with_local_log(data, rest)
            self._waiting_bytes += len(rest)
        return self._emit_ready()

    def last_lines(self, characters: int = 600) -> str:
        """Return the last lines that are neither worker lines nor a program's output, as printable text."""
        return last_lines(b"\n".join(self._other_lines), len(self._other_lines), characters)

    def close(self) -> None:
        """Close the files. The log may still be read again."""
        for out in self.outputs.values():
            out.close()

    def finish(self) -> bytes:
        """Return the worker lines that waited for missing ones, with gaps in their numbers.

        Call it when the log was read as well as possible, and treat the result like that of ``feed``.
        """
        self.close()
        found = b""
        while self._waiting:
            number = min(self._waiting)
            self._emitted += number - self._next
            self._next = number
            found += self._emit_ready(whole=True)
        return found

    def _is_of_run(self, data: dict[str, Any]) -> bool:
        run = self._runs.get(str(data.get("run")))
        return run is not None and data.get("nonce") == run.nonce

    def _with_local_log(self, data: dict[str, Any], rest: bytes) -> bytes:
        """Return the line with the log's local path."""
        body = data.get("body")
        if data.get("kind") != "failed" or not isinstance(body, dict) or not isinstance(body.get("log"), str):
            return rest
        log = PurePosixPath(body["log"])
        if not log.parts or log.is_absolute() or ".." in log.parts:
            return rest
        body["log"] = str(self._folder / log)
        return json.dumps(data, separators=(",", ":")).encode("ascii").split(b",", 1)[1]

    def _emit(self, rest: bytes) -> bytes:
        line = b'{"n":%d,%s\n' % (self._emitted, rest)
        self._emitted += 1
        return line

    def _emit_ready(self, *, whole: bool = False) -> bytes:
        found = b""
        while self._next in self._waiting:
            rest = self._waiting[self._next]
            failed = b""
            if b'"kind":"failed"' in rest[:400]:
                self._failed.add(read_json(b'{"n":0,' + rest)["run"])
            elif b'"kind":"end"' in rest[:400]:
                run = self._runs[read_json(b'{"n":0,' + rest)["run"]]
                problem = self._output_problem(run)
                if problem and not whole:
                    return found
                failed = self._failure(run, problem) if problem else b""
            found += failed + self._emit(rest)
            self._waiting_bytes -= len(self._waiting.pop(self._next))
            self._next += 1
        return found

    def _output_problem(self, run: RunPlan) -> str:
        """Return what is missing of the output in which a `command`'s metrics are searched, or of its artifacts."""
        if run.workload != "command" or run.run_id in self._failed:
            return ""
        main = "0" if run.launcher == "plain" else "launcher"
        needed = [main] * bool(run.metrics or run.sanity) + ["artifacts"] * bool(run.artifacts)
        needed += ["errors"] * ((run.run_id, "errors") in self.outputs)
        for stream in needed:
            out = self.outputs.get((run.run_id, stream))
            if out is None:
                what = "program's output" if stream == main else "run's artifacts"
                return f"nothing of the {what} came, nor that there is none"
            if out.problem:
                return out.problem
        return ""

    def _failure(self, run: RunPlan, problem: str) -> bytes:
        outcome, text = "truncated_result", f"the pod's log is incomplete: {problem}"
        out = self.outputs.get((run.run_id, "0" if run.launcher == "plain" else "launcher"))
        # Then the complete log would be no result either.
        if out is not None and out.size is not None and out.dropped:
            printed = out.size + out.dropped
            outcome = "output_limit"
            text = f"the program printed {printed} bytes; metrics are searched within {out.size}; {text}"
        text = f"{text}; see containerLogMaxSize of the kubelet, or print less"
        body = {"outcome": outcome, "text": text, "log": ""}
        lines = encode(Message(run.run_id, run.nonce, "failed", body), self._emitted)
        self._emitted += len(lines)
        return b"".join(lines)

    def _take_pod_line(self, text: bytes) -> None:
        try:
            data = read_json(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(data, dict):
            return
        if data.get("pod") == "over" and type(data.get("exit")) is int:
            self.exit_code = data["exit"]
        elif data.get("pod") == "output" and self._is_of_run(data):
            size, dropped, sha = data.get("bytes"), data.get("dropped"), data.get("sha256")
            stream = str(data.get("stream"))
            known = re.fullmatch(
                r"launcher|artifacts|(?:output-ranks|errors-ranks|errors)|\d{1,6}|pod\d{1,6}", stream
            ) and _SHA256.fullmatch(str(sha))
            if known and type(size) is int and type(dropped) is int and 0 <= size <= MAX_OUTPUT_BYTES:
                out = self._output_file(data["run"], stream)
                out.size, out.dropped, out.sha256 = size, dropped, str(sha)
                out.verify()

    def _take_output(self, line: bytes) -> bool:
        """Take a line of a program's output; return whether its stream is complete now."""
        found = _OUTPUT_LINE.fullmatch(line.removesuffix(b"\n"))
        run_id = self._tags.get(found.group(1)) if found else None
        if not found or run_id is None:
            self._other_lines.append(line[:4096].rstrip())
            return False
        out = self._output_file(run_id, found.group(2).decode("ascii"))
        data = unescape(found.group(4))
        if data is None or out.verified:
            return False
        out.write(int(found.group(3)), data)
        out.verify()
        return out.verified

    def _output_file(self, run_id: str, stream: str) -> OutputFile:
        key = run_id, stream
        if key not in self.outputs:
            folder = self._folder / run_id
            name = ARCHIVE if stream == "artifacts" else f"{stream}.log"
            self.outputs[key] = OutputFile(folder / (f"rank{name}" if stream.isdigit() else name))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.outputs[key].path.unlink(missing_ok=True)
            except OSError as error:
                self.outputs[key].error = error.strerror or str(error)
        return self.outputs[key]


#: The log of a program that is its container's own command; of several pods joined, and of each by its number.
CONTAINER_LOG = "container.log"


class LineLog:
    """Lines of a container in a local file, created with the first one. ``problem`` says why lines are missing; may be empty.

    Args:
        path: the file; an older one is overwritten, as a log is read from its beginning. None: no file.
        cap: its largest size, in bytes; later lines are only counted.
    """

    def __init__(self, path: Path | None, cap: int) -> None:
        self.problem = ""
        self._path = path
        self._cap = cap
        self._log: CappedLog | None = None

    def write(self, line: bytes) -> None:
        """Append one line."""
        if self._path is None or self.problem:
            return
        try:
            if self._log is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._log = CappedLog(self._path, self._cap)
            self._log.write(line + b"\n")
        except OSError as error:
            self.problem = f"{self._path} cannot be written: {error.strerror}"

    def tail(self, characters: int) -> str:
        """Return the last lines as printable text."""
        return self._log.tail(characters=characters) if self._log is not None else ""

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._log is not None:
            self._log.close()


class ContainerOutput:
    """The log of a container without an agent: every line is the program's, standard output and error alike.

    Args:
        plan: of one run; the file is written below ``plan.directory``.
        rank: number of the pod.
    """

    #: An agent would say what its log lacks.
    missing = ""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.path = Path(plan.directory) / plan.runs[0].run_id / f"container{rank}.log"
        self._log = LineLog(self.path, MAX_OUTPUT_BYTES)

    @property
    def problem(self) -> str:
        """Why the file lacks something; empty: it is whole."""
        return self._log.problem

    def feed(self, line: bytes) -> bytes:
        """Write one line of the log; there are no worker lines in it."""
        self._log.write(line.rstrip(b"\r\n"))
        return b""

    def last_lines(self, characters: int = 600) -> str:
        """Return the end of the output as printable text."""
        return self._log.tail(characters)

    def finish(self) -> bytes:
        """Close the file."""
        self._log.close()
        return b""

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._log.close()


def join_outputs(outputs: Sequence[ContainerOutput]) -> None:
    """Write one file with the outputs of all pods, one after the other.

    Raises:
        OSError: it cannot be written.
    """
    with outputs[0].path.with_name(CONTAINER_LOG).open("wb") as joined:
        for output in outputs:
            if output.path.exists():
                joined.write(output.path.read_bytes())


@dataclass
class OutputFile:
    """One output stream of a run, written to ``path`` from pieces with offsets, and its announced size and hash."""

    path: Path
    ranges: list[tuple[int, int]] = field(default_factory=list)  #: received bytes, sorted and disjoint
    size: int | None = None  #: announced size, in bytes; None: not announced yet
    dropped: int = 0  #: bytes that the agent did not print
    sha256: str = ""
    verified: bool = False
    error: str = ""  #: why the file cannot be written
    _fd: int = -1

    @property
    def received(self) -> int:
        """The number of bytes in the file."""
        return sum(end - start for start, end in self.ranges)

    @property
    def problem(self) -> str:
        """What is wrong with the file, or an empty string."""
        if self.verified:
            return ""
        if self.error:
            return f"cannot write {self.path}: {self.error}"
        if self.size is None:
            return f"of {self.path.name} {self.received} bytes came, and not its end"
        if self.received != self.size:
            return f"of the {self.size} bytes of {self.path.name} {self.received} came"
        return f"{self.path.name} is not what the program printed: its SHA-256 is another"

    def write(self, offset: int, data: bytes) -> None:
        """Write *data* at *offset*."""
        if self.verified or self.error or offset + len(data) > MAX_OUTPUT_BYTES:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, data, offset)
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        self._add_range(offset, offset + len(data))

    def _add_range(self, start: int, end: int) -> None:
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

    def verify(self) -> None:
        """Compare the file with the announced size and hash; append how much the agent dropped."""
        if self.verified or self.error or self.size is None or self.received != self.size:
            return
        try:
            self.path.touch()
            with self.path.open("r+b") as file:
                file.truncate(self.size)
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    return
                if self.dropped:
                    file.write(f"\n[{self.dropped} more bytes were dropped]\n".encode())
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        self.verified = True
        self.close()

    def close(self) -> None:
        """Close the descriptor; later data opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def unescape(text: bytes) -> bytes | None:
    r"""Return a program's output, with its newline unless the line continues; None if *text* is malformed.

    Escapes are ``\\`` and ``\xHH``, as in Python. A single backslash at the end means that the line continues.
    """
    if b"\\" not in text:
        return text + b"\n"
    more = (len(text) - len(text.rstrip(b"\\"))) % 2
    try:
        data = text[: len(text) - more].decode("unicode_escape").encode("latin-1")
    except (UnicodeError, ValueError):
        return None
    return data if more else data + b"\n"


@dataclass(frozen=True)
class SavedOutput:
    """The nodes of an ended allocation, and all its worker lines."""

    nodes: tuple[str, ...]
    lines: bytes


def save_output(directory: Path, nodes: Sequence[str], lines: bytes) -> None:
    """Save the worker lines before the pods and their logs are deleted.

    Errors are ignored: then the result is lost if this session is killed before it records it.
    """
    head = json.dumps({"schema": _SAVED_SCHEMA, "nodes": list(nodes)}).encode() + b"\n"
    with contextlib.suppress(OSError):
        replace_file(directory / SAVED_OUTPUT_FILE, head + lines, mode=0o600)


def read_saved_output(directory: Path) -> SavedOutput | None:
    """Return what :func:`save_output` wrote; None if there is no readable file."""
    try:
        head, _, lines = read_private(directory / SAVED_OUTPUT_FILE).partition(b"\n")
        found = read_json(head)
        if found["schema"] != _SAVED_SCHEMA:
            return None
        return SavedOutput(tuple(map(str, found["nodes"])), lines)
    except (OSError, ValueError, TypeError, KeyError):
        return None
