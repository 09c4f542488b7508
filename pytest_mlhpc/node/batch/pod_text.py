"""PAYLOAD. What a pod's one stream looks like: protocol lines, and the readable lines of programs. No input or output.

A protocol line is the record separator of RFC 7464 and JSON: a worker line (``node/protocol/lines.py``), or one about the pod,
whose ``pod`` says what: ``output`` (a run's stream has ended: how many bytes, their SHA-256, how many more were not kept),
``probe``, ``over`` (the agent's exit code). Lines of programs are ``[TAG STREAM OFFSET] text``: the end of the run's id,
``launcher`` or a rank or ``pod3``, and where in that stream the text begins, so that a reader may see a line twice, or
notice that one is missing. A backslash and all that no terminal should get are written as in C; a single backslash at the
end says that the program's line goes on.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, Sequence

#: RFC 7464, section 2.2.
RS = b"\x1e"

#: Longest piece of a program's line, in bytes after escaping, which makes up to four of one.
PIECE = 3900

#: From how many bytes on that come at once lines are packed which are shorter than this on average, in bytes.
FLOOD, SHORT = 64 * 1024, 16

#: Fewest characters of a run's id that name it in the stream.
TAG = 8

_ESCAPES: Dict[int, str] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), 127) if code != 9},
    **{code: f"\\xc2\\x{code:02x}" for code in range(0x80, 0xA0)},  # control characters of ISO 6429, as UTF-8
    **{0xDC00 + code: f"\\x{code:02x}" for code in range(0x80, 0x100)},  # bytes that are no UTF-8 (PEP 383)
    ord("\\"): "\\\\",
}


def tags(run_ids: Sequence[str]) -> Dict[str, str]:
    """Return the end of each run's id by which it is told from the others."""
    longest = max((len(run_id) for run_id in run_ids), default=TAG)
    for length in range(TAG, longest + 1):
        if len({run_id[-length:] for run_id in run_ids}) == len(set(run_ids)):
            return {run_id: run_id[-length:] for run_id in run_ids}
    return {run_id: run_id for run_id in run_ids}


def stream_name(number: int) -> str:
    """Return the name of a rank's stream, or of the launcher's (-1)."""
    return "launcher" if number < 0 else str(number)


def pod_line(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return a protocol line about the pod."""
    return RS + json.dumps({"pod": kind, **body}, separators=(",", ":")).encode("ascii") + b"\n"


def escape(data: bytes) -> bytes:
    """Return *data*, which holds no newline that ends a line, as text of one line."""
    return data.decode("utf-8", "surrogateescape").translate(_ESCAPES).encode()


def output_lines(tag: str, stream: str, offset: int, data: bytes) -> bytes:
    """Return the lines that show *data*, which begins at *offset* in its stream.

    A flood of lines of a few bytes each would become ten times as long: their newlines are written as in C as well.
    """
    found: List[bytes] = []
    head = f"[{tag} {stream} ".encode()
    if len(data) >= FLOOD and data.count(b"\n") > len(data) // SHORT:
        return b"".join(_pieces(head, offset, data, more=True))
    *whole, rest = data.split(b"\n")
    for line in whole:
        text = escape(line)
        if len(text) <= PIECE:
            found.append(b"%s%d] %s\n" % (head, offset, text))
        else:
            found += _pieces(head, offset, line, more=False)
        offset += len(line) + 1
    if rest:
        found += _pieces(head, offset, rest, more=True)
    return b"".join(found)


def _pieces(head: bytes, offset: int, line: bytes, *, more: bool) -> List[bytes]:
    found: List[bytes] = []
    start = 0
    while start < len(line):
        raw = line[start : start + PIECE]
        text = escape(raw)
        if len(text) > PIECE:
            raw = raw[: PIECE // 4]
            text = escape(raw)
        last = start + len(raw) == len(line)
        found.append(b"%s%d] %s%s\n" % (head, offset + start, text, b"\\" if more or not last else b""))
        start += len(raw)
    return found
