"""The output of a pod, written by one thread: worker lines at once, what programs print from their logs."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import threading
import time
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from pytest_mlhpc.node.batch.output import LOG_CAP, CannotWrite
from pytest_mlhpc.node.batch.ranks import ERRORS, ERRORS_RANKS, OUTPUT_RANKS
from pytest_mlhpc.node.processes import CappedLog
from pytest_mlhpc.node.protocol.lines import Message, encode
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan

#: RFC 7464, section 2.2.
RS = b"\x1e"

#: Longest piece of a program's line, in bytes after escaping, which makes up to four of one.
PIECE = 3900

#: From how many bytes on that come at once lines are packed which are shorter than this on average, in bytes.
FLOOD, SHORT = 64 * 1024, 16

#: Number of the stream in which a run's artifacts are sent.
ARTIFACTS = -2

#: Streams that are no rank's and not the launcher's.
_NAMES = {
    ARTIFACTS: "artifacts",
    ERRORS: "errors",
    OUTPUT_RANKS: "output-ranks",
    ERRORS_RANKS: "errors-ranks",
}

#: Fewest characters of a run's id that name it in the stream.
TAG = 8

_ESCAPES: Dict[int, str] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), 127) if code != 9},
    **{code: f"\\xc2\\x{code:02x}" for code in range(0x80, 0xA0)},  # control characters of ISO 6429, as UTF-8
    **{0xDC00 + code: f"\\x{code:02x}" for code in range(0x80, 0x100)},  # bytes that are no UTF-8 (PEP 383)
    ord("\\"): "\\\\",
}


def tags(run_ids: Sequence[str]) -> Dict[str, str]:
    """Return the end of each run's id that tells it from the others."""
    longest = max((len(run_id) for run_id in run_ids), default=TAG)
    for length in range(TAG, longest + 1):
        if len({run_id[-length:] for run_id in run_ids}) == len(set(run_ids)):
            return {run_id: run_id[-length:] for run_id in run_ids}
    return {run_id: run_id for run_id in run_ids}


def stream_name(number: int) -> str:
    """Return the name of a rank's stream, of the launcher's (-1), of standard error alone, of the run's artifacts, or of an index of ranks."""
    if number in _NAMES:
        return _NAMES[number]
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


#: Time between two reads of the logs, in seconds: programs that print line by line cost one write in that time.
PACE_S = 0.2

#: How long a line may go on without its end before it is shown, in seconds.
PARTIAL_S = 1.0

#: Most bytes that are taken from one log in one go; then worker lines have their turn.
CHUNK = 128 * 1024

#: A stream whose lines are no longer than this, in bytes, is printed once more at the end, if the runtime may have rotated
#: its log meanwhile: once more than FULL bytes were printed. No more than AGAIN bytes are: they must fit into one log.
SMALL, AGAIN, FULL = 32 * 1024, 1024 * 1024, 256 * 1024


class LogSource:
    """One log on its way to the stream. ``at`` is how much of the file was taken, ``base`` what was before this file.

    ``lines`` is all that was made of it, empty if that is more than SMALL bytes.
    """

    def __init__(self, run: RunPlan, tag: str, name: str, log: CappedLog) -> None:
        self.run, self.name, self.log = run, name, log
        self.ended = False
        self.lines = b""
        self._small = True
        self.at = self.base = self._dropped_before = 0
        self._tag = tag
        self._sha = hashlib.sha256()
        self._partial_since: Optional[float] = None
        self._fd = os.open(str(log.path), os.O_RDONLY | os.O_CLOEXEC)

    def follow(self, former: LogSource) -> None:
        """Go on where *former* has ended: the run was started once more."""
        self.base, self._sha = former.base + former.at, former._sha.copy()
        self._dropped_before = former.dropped
        self.lines, self._small = former.lines, former._small

    @property
    def dropped(self) -> int:
        """How many bytes were printed beyond what is stored."""
        return self._dropped_before + self.log.dropped + self.log.written - min(self.log.written, self._end())

    def take(self, *, last: bool = False) -> bytes:
        """Return the lines of what is new, up to ``CHUNK`` bytes; the rest of a line waits for its end, unless *last*."""
        data = os.pread(self._fd, max(0, min(CHUNK, self._end() - self.at)), self.at)
        if not data:
            return b""
        if not last and not data.endswith(b"\n"):
            data = self._whole(data)
        self._sha.update(data)
        lines = output_lines(self._tag, self.name, self.base + self.at, data)
        self.at += len(data)
        self._small = self._small and len(self.lines) + len(lines) <= SMALL
        self.lines = self.lines + lines if self._small else b""
        return lines

    def summary(self) -> bytes:
        """Return the line that ends this stream."""
        totals = {"bytes": self.base + self.at, "dropped": self.dropped, "sha256": self._sha.hexdigest()}
        ids = {"run": self.run.run_id, "nonce": self.run.nonce}
        return pod_line("output", {**ids, "stream": self.name, **totals})

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    def _end(self) -> int:
        return min(self.log.written, max(0, LOG_CAP - self.base))

    def _whole(self, data: bytes) -> bytes:
        cut = data.rfind(b"\n") + 1
        now = time.monotonic()
        if self._partial_since is None:
            self._partial_since = now
        if len(data) - cut >= CHUNK // 2 or now - self._partial_since >= PARTIAL_S:
            cut = len(data)
        if cut:
            self._partial_since = None
        return data[:cut]


class PodStream:
    """Writes to *fd* what it is given. Safe to call from several threads; nothing here waits but ``finish``.

    ``error`` is why nothing can be written any more.
    """

    def __init__(self, fd: int) -> None:
        self.error: Optional[OSError] = None
        self._fd = fd
        self._changed = threading.Condition()
        self._queue: Deque[Union[Tuple[bytes, bool], LogSource]] = collections.deque()
        self._sources: Dict[Tuple[str, str], LogSource] = {}
        self._lasting: List[bytes] = []
        self._small: List[bytes] = []  #: lines of short streams, which a log that was rotated may lack
        self._small_bytes = self._printed = 0
        self._finishing = False
        self._written_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="mlhpc-stream", daemon=True)
        self._thread.start()

    def put(self, line: bytes, *, lasting: bool) -> None:
        """Print a protocol line. One that is not *lasting* replaces another that still waits."""
        with self._changed:
            if not lasting and self._queue and self._passing(self._queue[-1]):
                self._queue.pop()
            self._queue.append((line, lasting))
            self._changed.notify()

    def open(self, source: LogSource) -> None:
        """Print from now on what *source* gets."""
        with self._changed:
            former = self._sources.get((source.run.run_id, source.name))
            if former is not None:
                self._queue.append(former)
            self._sources[source.run.run_id, source.name] = source
            self._changed.notify()

    def end(self, run: RunPlan) -> None:
        """Print the rest of the logs of *run*, and how much it was, before anything that is put after this."""
        with self._changed:
            self._queue += [source for key, source in self._sources.items() if key[0] == run.run_id]
            self._changed.notify()

    def finish(self, code: int, stalled_s: float) -> bool:
        """Print all lasting lines once more, and that the agent ends with *code*; return whether all was printed.

        A log may be cut at its beginning or in the middle, as its reader may come after the runtime has rotated it: so its
        end has all results, and the short outputs in which metrics may be. Gives up when nothing could be written for
        *stalled_s* seconds.
        """
        with self._changed:
            self._queue += list(self._sources.values())
            self._finishing = True
            self._queue.append((b"", False))
            self._queue.append((pod_line("over", {"exit": code}), False))
            self._changed.notify()
        self._written_at = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - self._written_at < stalled_s:
            self._thread.join(0.2)
        return not self._thread.is_alive() and self.error is None

    @staticmethod
    def _passing(item: Union[Tuple[bytes, bool], LogSource]) -> bool:
        return isinstance(item, tuple) and not item[1]

    def _work(self) -> None:
        try:
            busy = False
            while True:
                with self._changed:
                    if not self._queue:
                        if self._finishing:
                            return
                        self._changed.wait(0.0 if busy else PACE_S if self._sources else None)
                    item = self._queue.popleft() if self._queue else None
                    sources = list(self._sources.values()) if item is None else []
                if item is not None:
                    self._do(item)
                else:
                    busy = max([self._write(source.take()) for source in sources], default=0) >= CHUNK
        except OSError as error:
            self.error = error

    def _do(self, item: Union[Tuple[bytes, bool], LogSource]) -> None:
        if isinstance(item, LogSource):
            self._end_source(item)
        elif not item[0]:
            small = self._small if self._printed > FULL else []
            for line in [*small, *self._lasting]:
                self._write(line)
        else:
            self._write(item[0])
            if item[1]:
                self._lasting.append(item[0])

    def _end_source(self, source: LogSource) -> None:
        if source.ended:
            return  # it was asked for twice
        source.ended = True
        while self._write(source.take(last=True)):
            pass
        key = source.run.run_id, source.name
        with self._changed:
            present = self._sources.get(key)
            if present is source:
                del self._sources[key]
        if present is source:
            summary = source.summary()
            self._write(summary)
            self._lasting.append(summary)
            if self._small_bytes + len(source.lines) <= AGAIN:
                self._small.append(source.lines)
                self._small_bytes += len(source.lines)
        elif present is not None:
            present.follow(source)
        source.close()

    def _write(self, data: bytes) -> int:
        rest = data
        while rest:
            rest = rest[os.write(self._fd, rest) :]
            self._written_at = time.monotonic()
        self._printed += len(data)
        return len(data)


class PodRelay:
    """What a pod's batch says to the controller. Lines of progress are not counted: one that is lost is no loss."""

    def __init__(self, stream: PodStream, plan: Plan) -> None:
        self._stream = stream
        self._tags = tags([run.run_id for run in plan.runs])
        self._folder = f"{plan.directory}{os.sep}"
        self._next = 0

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send one message of *run*; before its end comes the rest of what it has printed.

        Raises:
            CannotWrite: nobody takes what this pod prints.
        """
        if self._stream.error is not None:
            raise CannotWrite(self._stream.error)
        if kind == "end":
            self._stream.end(run)
        log = body.get("log")
        if isinstance(log, str) and log.startswith(self._folder):
            body = {
                **body,
                "log": log[len(self._folder) :],
            }  # the controller has its copy below a folder of its own
        lasting = kind != "progress"
        lines = encode(Message(run.run_id, run.nonce, kind, body), self._next)
        for line in lines:
            self._stream.put(RS + line, lasting=lasting)
        if lasting:
            self._next += len(lines)

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Print what is written to *log*."""
        self._stream.open(LogSource(run, self._tags[run.run_id], stream_name(number), log))
