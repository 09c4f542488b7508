"""Lines of a container's log with their times: taking them apart, and knowing those again that came before a cut.

The container runtime gives each line the time at which it read it (CRI log format, ns). A log can be asked for from a
time on, of which the kubelet reads whole seconds. So what comes after a cut begins with lines that came before: those are
told by their time and text, not by their place, as a rotated log begins elsewhere. Within one stream too lines may come
again: a kubelet that reads slowly is told twice of a new file when the log was rotated twice, and reads that one from its
beginning each time. The file between the two it passes over without a word.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime

from pytest_mlhpc.batch.pod_stream import FULL

#: Seconds before the last line's from which a log is asked for again. Two streams of a container are read by two threads, and
#: clocks are set back a little now and then: lines are not quite in the order of their times.
MARGIN_S = 2
#: Lines to be known again at least, also where they are older than the last seconds: what lies in a file since it was rotated.
KNOWN_LINES = 20_000
#: Seconds without a line, after more than FULL bytes, in which a file may have been passed over: kubelets rotate full files every
#: 10 s (containerLogMonitorPeriod, pkg/kubelet/logs/container_log_manager.go), or every 3 s if told so (containerLogMonitorInterval,
#: least value, Kubernetes 1.30 and later).
PASSED_OVER_S = 3
#: Where the parts of a second stand in a line: behind the point, nine digits at most, zeros at the end left out.
_PARTS_OF_SECOND = slice(len("2026-11-21T15:53:54."), len("2026-11-21T15:53:54.123456789"))
#: Where runtimes part long lines, in bytes: containerd and dockershim, CRI-O. Kubelets before 1.22 put the time before each
#: part of a line, so in the middle of its text.
PARTS = (16 * 1024, 8 * 1024)

_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d) ")


def taken_apart(line: bytes) -> tuple[int, bytes] | None:
    """Return the whole second (Unix time) and the text of a line; None if it has no time: then the kubelet itself speaks."""
    found = _TIME.match(line)
    if found is None:
        return None
    text = line[found.end() :]
    return _second(found[1], found[2]), text if len(text) < PARTS[-1] else whole(text)


def whole(text: bytes) -> bytes:
    """Return a long line without the times that stand where its parts meet."""
    for size in PARTS:
        pieces, at = [], 0
        while found := _TIME.match(text, at + size):
            pieces.append(text[at : at + size])
            at = found.end()
        if pieces:
            return b"".join([*pieces, text[at:]])
    return text


class Recent:
    """The last lines, to be known again. ``hole``: some that came in between are lost, or may be and nobody can know."""

    def __init__(self) -> None:
        self.hole = False
        self._last: int | None = None  #: second of the last line
        self._lines: dict[int, Counter[int]] = {}  #: second -> hash of a line -> how often it came
        self._count = 0  #: of lines that are known
        self._bytes = 0  #: of all lines that were new
        self._last_line = 0  #: hash
        self._moment = (0, b"")  #: of the last line
        self._again: dict[int, Counter[int]] = {}  #: those that may come again, since :meth:`resume`
        self._met = True  #: whether the last line before the cut has come again

    def resume(self) -> str:
        """Return from when on to ask again, RFC 3339; empty: from the beginning. What comes then is held against what came."""
        since = 0 if self._last is None else self._last - 2 * MARGIN_S
        self._again = {second: Counter(lines) for second, lines in self._lines.items() if second >= since}
        self._met = self._last is None
        if self._last is None:
            return ""
        return datetime.fromtimestamp(self._last - MARGIN_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def is_new(self, second: int, line: bytes) -> bool:
        """Return whether *line*, with its time, did not come before, and note it."""
        key = hash(line)
        if key == self._last_line:
            self._met = True
        if self._again:
            lines = self._again.get(second)
            if lines is not None and lines[key] > 0:
                lines[key] -= 1
                return False
            if second > max(self._again) + MARGIN_S:
                self._again = {}
        if key in self._lines.get(second, ()) and _moment(second, line) < self._moment:
            # Only lines that follow each other share a moment: this one, and those behind it, are read again.
            self._again = {second: Counter(lines) for second, lines in self._lines.items()}
            self._again[second][key] -= 1
            return False
        if not self._met:
            self.hole = self._met = True  # it was the last of those that had come: what lay between is gone
        if self._bytes > FULL and self._last is not None and second - self._last >= PASSED_OVER_S:
            self.hole = True  # or the program was silent: a log has no numbers that would tell
        self._bytes += len(line)
        self._note(second, key, line)
        return True

    def _note(self, second: int, key: int, line: bytes) -> None:
        self._last_line = key
        self._moment = _moment(second, line)
        if second != self._last:
            self._last = second
            # Twice: the next line may be of a second before this one, and what comes again then begins before that.
            for old in sorted(old for old in self._lines if old < second - 2 * MARGIN_S):
                if self._count <= KNOWN_LINES:
                    break
                self._count -= self._lines.pop(old).total()
        self._lines.setdefault(second, Counter())[key] += 1
        self._count += 1


def _moment(second: int, line: bytes) -> tuple[int, bytes]:
    """Return what orders lines by their times: the second, and the digits behind it."""
    return second, line[_PARTS_OF_SECOND].split(b" ")[0].rstrip(b"Z")


def _second(time: bytes, zone: bytes) -> int:
    """Return the Unix time of ``2026-11-21T15:53:54`` in a zone; 0 for a day that does not exist."""
    try:
        found = datetime.fromisoformat((time + (b"+00:00" if zone == b"Z" else zone)).decode())
        return int(found.timestamp())
    except ValueError:
        return 0
