"""What a pod's agent printed: a container's log comes in, worker lines and the files of programs' output come out.

The form is that of ``batch/pod_text.py``. A log may be delivered twice in part or as a whole, may lack lines where it was
rotated, and holds words of others in between: all that can be read any number of times, in any order.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.batch.pod_text import RS, tags
from pytest_mlhpc.provision.kubernetes.podoutput import OUTPUT_CAP, Output, unescape
from pytest_mlhpc.results.foreign import read_json
from pytest_mlhpc.results.lines import MAX_BODY, Message, encode

#: Most bytes of worker lines that wait for one that is missing.
HELD_CAP = 2 * MAX_BODY

_OUTPUT = re.compile(rb"\[(\S{1,128}) (launcher|\d{1,6}|pod\d{1,6}) (\d{1,10})\] (.*)", re.DOTALL)
_NUMBER = re.compile(rb'\{"n":(\d{1,12}),')
_HEX = re.compile(r"[0-9a-f]{64}")


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
            data = read_json(text)
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
                self._failed.add(read_json(b'{"n":0,' + rest)["run"])
            elif b'"kind":"end"' in rest[:400]:
                run = self._runs[read_json(b'{"n":0,' + rest)["run"]]
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
        outcome, text = "truncated_result", f"the pod's log is incomplete: {problem}"
        out = self.outputs.get((run.run_id, "0" if run.launcher == "plain" else "launcher"))
        if (
            out is not None and out.size is not None and out.dropped
        ):  # it would be no result with a whole log either
            printed = out.size + out.dropped
            outcome = "output_limit"
            text = f"the program printed {printed} bytes; metrics are searched within {out.size}; {text}"
        text = f"{text}; see containerLogMaxSize of the kubelet, or print less"
        body = {"outcome": outcome, "text": text, "log": ""}
        lines = encode(Message(run.run_id, run.nonce, "failed", body), self._given)
        self._given += len(lines)
        return b"".join(lines)

    def _about_pod(self, text: bytes) -> None:
        try:
            data = read_json(text)
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
