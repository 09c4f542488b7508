"""Worker lines: numbered JSON lines of at most 4,000 bytes by which a run reports to the controller.

A short message is one line with its body in it::

    {"n":7,"run":ID,"nonce":NONCE,"kind":"progress","body":{...}}

A longer one is the JSON text of its body cut into pieces, one a line; the last line says how many there were and the
SHA-256 of the whole text::

    {"n":8,"run":ID,"nonce":NONCE,"kind":"measurement","part":0,"text":"..."}
    {"n":9,"run":ID,"nonce":NONCE,"kind":"measurement","part":1,"text":"...","count":2,"sha256":HEX}

Numbers rise by one over all lines of an allocation, so that a lost line is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from pytest_mlhpc.node.files import read_json

#: Kinds of line in the order in which a run sends them; progress at most once a second. ``vetted`` comes where nodes were
#: vetted before.
KINDS = ("vetted", "started", "progress", "measurement", "failed", "end")

#: Longest line, newline included: one write of this size is atomic to a pipe (POSIX PIPE_BUF is 4,096 on Linux).
MAX_LINE = 4000

#: Longest body of one message. A measurement of 1,000 ranks with 4,096 step times each stays below it.
MAX_BODY = 128 * 1024 * 1024

#: Longest run id or nonce; the rest of a line must have room.
MAX_ID = 128


@dataclass(frozen=True)
class Message:
    """One whole message of one run, joined from its lines and checked.

    ``body`` by kind: vetted = level, seconds, fit, unfit and warnings (host -> reason), and of the first run the whole
    verdict; started = protocol, payload_sha256, python, torch, host; progress = step, steps,
    samples_per_s; measurement = a Measurement as JSON; failed = outcome, text, log; end = exit (list of exit codes).
    """

    run_id: str
    nonce: str
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """Something that came over the channel and is no message. ``outcome`` is a name from ``store/record.py``.

    ``run_id`` is the run whose message was damaged, empty where that is unknown.
    """

    outcome: str
    text: str
    run_id: str = ""


def encode(message: Message, seq: int) -> List[bytes]:
    """Return the lines of *message*, each with its newline and to be written by one write; the first has number *seq*.

    Raises:
        ValueError: kind, ids or body cannot be sent (unknown kind, ids too long, NaN, more than ``MAX_BODY``).
    """
    if message.kind not in KINDS:
        raise ValueError(f"kind {message.kind!r} is not one of {', '.join(KINDS)}")
    if max(len(json.dumps(message.run_id)), len(json.dumps(message.nonce))) > MAX_ID:
        raise ValueError(f"run id or nonce is longer than {MAX_ID} bytes")
    text = json.dumps(message.body, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_BODY:
        raise ValueError(
            f"{message.kind} of run {message.run_id} has {len(text)} bytes, more than {MAX_BODY}"
        )
    line = _head(message, seq) + f',"body":{text}}}\n'
    if len(line) <= MAX_LINE:
        return [line.encode("ascii")]
    return _split(message, seq, text)


def _head(message: Message, seq: int) -> str:
    run_id, nonce = json.dumps(message.run_id), json.dumps(message.nonce)
    return f'{{"n":{seq},"run":{run_id},"nonce":{nonce},"kind":"{message.kind}"'


def _split(message: Message, seq: int, text: str) -> List[bytes]:
    escaped = json.dumps(text)[1:-1]  # ASCII, and its only escapes are \\ and \"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    room = MAX_LINE - len(_head(message, seq)) - 160  # digits that grow, field names, the digest
    pieces = []
    start = 0
    while start < len(escaped):
        end = min(start + room, len(escaped))
        tail = escaped[max(start, end - 64) : end]
        while (len(tail) - len(tail.rstrip("\\"))) % 2 and end < len(escaped):
            end -= 1  # never cut an escape in two
            tail = escaped[max(start, end - 64) : end]
        pieces.append(escaped[start:end])
        start = end
    last = f',"count":{len(pieces)},"sha256":"{digest}"}}\n'
    lines = [
        f'{_head(message, seq + i)},"part":{i},"text":"{piece}"' + (last if i == len(pieces) - 1 else "}\n")
        for i, piece in enumerate(pieces)
    ]
    return [line.encode("ascii") for line in lines]


class Decoder:
    """Joins what arrives, in pieces of any size, to messages of the expected runs. Hostile bytes become faults.

    Holds at most one unfinished line (``MAX_LINE``) and one unfinished message (``MAX_BODY``).

    Args:
        expected: run id -> nonce of every run of the allocation. Anything else is a foreign result.
    """

    def __init__(self, expected: Mapping[str, str]) -> None:
        self._expected = dict(expected)
        self._next = 0
        self._line = b""
        self._skipping = False
        self._parts: List[str] = []
        self._parts_of: Optional[Tuple[str, str]] = None
        self._parts_bytes = 0
        self._measured: Dict[str, bool] = {}

    def feed(self, data: bytes) -> List[Union[Message, Fault]]:
        """Take the next bytes; return the messages and faults that they complete, in order."""
        found: List[Union[Message, Fault]] = []
        *whole, rest = data.split(b"\n")
        for piece in whole:
            line, self._line = self._line + piece, b""
            if self._skipping:
                self._skipping = False
            elif len(line) >= MAX_LINE:
                found.append(self._too_long())
            else:
                found.extend(self._take(line))
        if not self._skipping:
            self._line += rest
            if len(self._line) >= MAX_LINE:
                self._line, self._skipping = b"", True
                found.append(self._too_long())
        return found

    def finish(self) -> List[Fault]:
        """Say that nothing more will come; return a fault for what was left unfinished."""
        left = []
        if self._line:
            shown = self._line[:80]
            left.append(Fault("truncated_result", f"the last line ends without a newline after {shown!r}"))
        self._line = b""
        return left + self._drop_fragments("the channel closed")

    def _too_long(self) -> Fault:
        return Fault("truncated_result", f"a line is longer than {MAX_LINE} bytes")

    def _take(self, line: bytes) -> List[Union[Message, Fault]]:
        try:
            data = read_json(line.decode("utf-8"))
        except (ValueError, RecursionError):
            return [Fault("truncated_result", f"a line is not JSON: {line[:80]!r}")]
        problem = _line_problem(data)
        if problem:
            return [Fault("truncated_result", f"{problem} in the line {line[:80]!r}")]
        run_id, number = data["run"], data["n"]
        if self._expected.get(run_id) != data["nonce"]:
            return [
                Fault("foreign_result", f"line {number} carries the ids of another run: {run_id[:MAX_ID]!r}")
            ]
        if number < self._next:
            return [Fault("duplicate_result", f"line {number} came twice", run_id)]
        found: List[Union[Message, Fault]] = []
        if number > self._next:
            text = f"lines {self._next} to {number - 1} are missing"
            found += [Fault("truncated_result", text, run_id), *self._drop_fragments("lines are missing")]
        self._next = number + 1
        return found + (self._whole(data, data["body"]) if "body" in data else self._part(data))

    def _part(self, data: Dict[str, Any]) -> List[Union[Message, Fault]]:
        found: List[Union[Message, Fault]] = []
        key = (data["run"], data["kind"])
        if data["part"] == 0 or key != self._parts_of:
            found += self._drop_fragments("another message began")
            self._parts_of = key
        if data["part"] != len(self._parts):
            self._parts, self._parts_of, self._parts_bytes = [], None, 0
            text = f"a {data['kind']} message goes on with part {data['part']} that has no beginning"
            return [*found, Fault("truncated_result", text, data["run"])]
        self._parts.append(data["text"])
        self._parts_bytes += len(data["text"])
        if self._parts_bytes > MAX_BODY:
            return [*found, *self._drop_fragments(f"it is longer than {MAX_BODY} bytes")]
        if "count" in data:
            found += self._join(data)
        return found

    def _join(self, data: Dict[str, Any]) -> List[Union[Message, Fault]]:
        text, count = "".join(self._parts), len(self._parts)
        self._parts, self._parts_of, self._parts_bytes = [], None, 0
        kind, run_id = data["kind"], data["run"]
        if data["count"] != count:
            return [Fault("truncated_result", f"{kind} has {count} parts, not {data['count']}", run_id)]
        if hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() != data["sha256"]:
            return [Fault("truncated_result", f"the SHA-256 of a {kind} message does not match", run_id)]
        try:
            body = read_json(text)
        except (ValueError, RecursionError):
            return [Fault("truncated_result", f"the body of a {kind} message is not JSON", run_id)]
        return self._whole(data, body)

    def _whole(self, data: Dict[str, Any], body: Any) -> List[Union[Message, Fault]]:
        kind, run_id = data["kind"], data["run"]
        problem = _body_problem(kind, body)
        if problem:
            return [Fault("truncated_result", f"{kind} message: {problem}", run_id)]
        if kind == "measurement":
            if self._measured.get(run_id):
                return [Fault("duplicate_result", "the run reported two measurements", run_id)]
            self._measured[run_id] = True
        return [Message(run_id, data["nonce"], kind, body)]

    def _drop_fragments(self, why: str) -> List[Fault]:
        parts, of = self._parts, self._parts_of
        self._parts, self._parts_of, self._parts_bytes = [], None, 0
        if not parts or of is None:
            return []
        return [
            Fault("truncated_result", f"a {of[1]} message broke off after {len(parts)} parts: {why}", of[0])
        ]


def _line_problem(data: Any) -> str:
    """Return what is wrong with the outer fields of a parsed line, or an empty string."""
    if not isinstance(data, dict):
        return "no object"
    numbers = [data.get("n"), data.get("part", 0), data.get("count", 0)]
    if not all(isinstance(data.get(name), str) for name in ("run", "nonce", "kind")):
        return "no run, nonce or kind"
    if data["kind"] not in KINDS:
        return "an unknown kind"
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
        return "no proper number"
    if "body" not in data and not ("part" in data and isinstance(data.get("text"), str)):
        return "neither body nor part"
    return "no SHA-256" if "count" in data and not isinstance(data.get("sha256"), str) else ""


#: What the controller reads from each kind before the body goes on to stricter readers: field -> type.
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "vetted": {"level": str, "seconds": float, "fit": list, "unfit": dict, "warnings": dict},
    "started": {"protocol": int, "payload_sha256": str},
    "progress": {"step": int, "steps": int, "samples_per_s": float},
    "measurement": {},
    "failed": {"outcome": str, "text": str},
    "end": {"exit": list},
}


def _body_problem(kind: str, body: Any) -> str:
    """Return what is wrong with a message's body, or an empty string."""
    if not isinstance(body, dict):
        return "the body is no object"
    for name, wanted in _FIELDS[kind].items():
        value = body.get(name)
        if wanted is float and isinstance(value, int):
            continue
        if not isinstance(value, wanted) or isinstance(value, bool):
            return f"{name} is no {wanted.__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is not finite"
    if kind == "end" and not all(isinstance(code, int) for code in body["exit"]):
        return "exit holds something else than exit codes"
    return ""
