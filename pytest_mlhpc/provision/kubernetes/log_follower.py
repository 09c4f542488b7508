"""Follow one container's log: each line once, across broken connections, until the container has ended.

Open it when log lines are missing, repeated or late. The container runtime gives each line its time (CRI log format,
ns). A kubelet serves a log from a whole second on, so after a cut some lines come again. They are recognised by time and
text, not by position, as a rotated log starts elsewhere. A slow kubelet may also repeat a rotated file within one stream,
and skip the file before it silently.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pytest_mlhpc.node.batch.pod_stream import FULL
from pytest_mlhpc.provision.kubernetes.client import MAX_LINE_BYTES, KubernetesClient
from pytest_mlhpc.provision.kubernetes.errors import (
    ApiCall,
    Invalid,
    KubernetesError,
    NotFound,
    Unavailable,
    retry_delay,
)
from pytest_mlhpc.provision.kubernetes.log_parser import LineLog
from pytest_mlhpc.provision.kubernetes.objects import Manifest, ObjectRef

#: Largest file of one container's log, in bytes.
MAX_LOG_BYTES = 256 * 1024 * 1024
#: Wait for the watch to report the container's end before the pod is read, in seconds: kubelets report once a second.
STATUS_S = 3.0
#: Limit of retries of the last read of an ended container's log, in seconds.
LAST_READ_S = 90.0

#: Seconds before the last line from which a log is read again: lines are not quite in order of time, as a container's two
#: streams have two readers, and clocks are set back.
MARGIN_S = 2
#: Fewest lines to remember, even if they are older than the last seconds: a rotated file may repeat them.
REMEMBERED_LINES = 20_000
#: Seconds without a line, after more than FULL bytes, in which a file may have been skipped: kubelets rotate full files every
#: 10 s (containerLogMonitorPeriod, pkg/kubelet/logs/container_log_manager.go), or every 3 s if configured
#: (containerLogMonitorInterval, least value, Kubernetes 1.30 and later).
SKIPPED_FILE_S = 3
#: Position of a second's fraction in a line: at most nine digits, without trailing zeros.
_FRACTION = slice(len("2026-11-21T15:53:54."), len("2026-11-21T15:53:54.123456789"))
#: Where runtimes split long lines, in bytes: containerd and dockershim, CRI-O. Kubelets before 1.22 repeat the time before
#: each part, in the middle of the text.
PART_BYTES = (16 * 1024, 8 * 1024)

_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d) ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a container, without newline and time."""

    ref: ObjectRef
    container: str
    line: bytes


@dataclass(frozen=True)
class LogFailing:
    """The log cannot be read since ``since`` (``time.monotonic()``); reported at each failure. It is retried."""

    ref: ObjectRef
    container: str
    error: KubernetesError
    since: float


@dataclass(frozen=True)
class LogEnded:
    """No more lines will come. ``complete``: all lines were reported; if not, ``error`` may say why.

    A long log with a pause counts as incomplete: a kubelet may have skipped a file (see :class:`RecentLines`).
    """

    ref: ObjectRef
    container: str
    complete: bool
    error: KubernetesError | None = None


class LogFollower:
    """One thread that follows a started container, from :meth:`start` until its log ends or :meth:`close`.

    Args:
        api: the server; the follower uses a branch of it, so that closing ends its calls.
        ref: the pod.
        container: its name.
        put: receives each report in this thread; must not block.
        path: file for the text, without times; None: no file.
        cap: largest size of that file, in bytes.
    """

    def __init__(
        self,
        api: KubernetesClient,
        ref: ObjectRef,
        container: str,
        put: Callable[[LogLine | LogFailing | LogEnded], object],
        *,
        path: Path | None = None,
        cap: int = MAX_LOG_BYTES,
    ) -> None:
        self._api = api.branch()
        self._ref = ref
        self._container = container
        self._put = put
        self._file_log = LineLog(path, cap)
        self._recent = RecentLines()
        self._ended_by_server = False  #: the server ended the last stream properly
        self._continues = False  #: the last line continues in the next
        self._kubelet_text = ""  #: the kubelet's message instead of a log
        self._failures = 0
        self._since = 0.0
        self._container_ended = threading.Event()  #: or the follower is closed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log {ref.name}/{container}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ended(self) -> None:
        """Note that the container has ended, as the pod's status says; from any thread."""
        self._container_ended.set()

    def close(self) -> None:
        """End the thread and wait for it; any number of times, from any other thread. No more is reported."""
        self._stop.set()
        self._container_ended.set()
        self._api.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        error: KubernetesError | None = None
        try:
            self._follow()
            error = self._read_rest()
        except NotFound as gone:
            error = None if self._ended_by_server else gone
        except KubernetesError as refused:
            error = refused
        except Exception as bug:  # noqa: BLE001 - whatever it is, an unreported error would stop the log silently
            error = Unavailable(self._call(), f"{type(bug).__name__}: {bug}")
        self._file_log.close()
        if not self._stop.is_set():
            if error is None and self._kubelet_text:
                error = KubernetesError(self._call(), self._kubelet_text)
            complete = error is None and not self._recent.gap
            self._put(LogEnded(self._ref, self._container, complete, error))

    def _follow(self) -> None:
        """Follow the log until the container has ended."""
        while not self._container_ended.is_set():
            began = time.monotonic()
            try:
                self._read(follow=True)
                if self._container_ended.wait(STATUS_S) or self._has_ended(self._api.get(self._ref)):
                    return
            except (NotFound, Invalid):
                raise
            except KubernetesError as error:
                self._retry_after_cut(error, time.monotonic() - began)
                continue
            self._failures += 1  # until a new line comes: the kubelet has no more lines, or was away
            if self._failures > 1:
                self._container_ended.wait(
                    retry_delay(self._failures, Unavailable(self._call(), self._kubelet_text))
                )

    def _retry_after_cut(self, error: KubernetesError, lasted_s: float) -> None:
        """Report a failure and wait, except at the first cut of a stream that worked."""
        self._failures = 1 if lasted_s >= STATUS_S else self._failures + 1
        if self._failures > 1 or not isinstance(error, Unavailable):
            self._report_failure(error)
            self._container_ended.wait(retry_delay(max(1, self._failures - 1), error))

    def _read_rest(self) -> KubernetesError | None:
        """Read the log from the last lines on: a server also ends a log properly when a kubelet dies."""
        until = time.monotonic() + LAST_READ_S
        self._failures = 0
        while not self._stop.is_set():
            try:
                self._read(follow=False)
            except Unavailable as error:
                self._failures += 1
                self._report_failure(error)
                pause = retry_delay(self._failures, error)
                if time.monotonic() + pause > until:
                    return error
                self._stop.wait(pause)
            else:
                return None
        return None

    def _read(self, *, follow: bool) -> None:
        """Read the log from the last lines to its end.

        Raises:
            NotFound: the pod is gone.
            Unavailable: the connection broke, or the kubelet does not know the container yet.
        """
        self._kubelet_text = ""
        try:
            stream = self._api.logs(self._ref, self._container, follow=follow, since=self._recent.resume())
        except (NotFound, Invalid) as error:
            if isinstance(error, NotFound):
                self._api.get(self._ref)  # a kubelet that has just started does not know its pods either
            elif "waiting to start" not in error.message:
                raise
            raise Unavailable(
                self._call(), error.message, status=error.status, reason=error.reason
            ) from error
        self._since = 0.0
        self._ended_by_server = False
        try:
            for line in stream:
                self._take_line(line)
            if stream.rest and not follow:
                self._take_line(stream.rest)
        finally:
            stream.close()
        self._ended_by_server = True

    def _take_line(self, line: bytes) -> None:
        found = split_time(line)
        goes_on, self._continues = self._continues, len(line) >= MAX_LINE_BYTES
        if found is None and not goes_on:
            self._kubelet_text = self._kubelet_text or line.decode(errors="replace")
            return
        second, text = found or (0, line)
        if found is None or self._recent.is_new(second, line):
            self._failures = 0
            self._file_log.write(text)
            self._put(LogLine(self._ref, self._container, text))

    def _has_ended(self, pod: Manifest) -> bool:
        status = pod.get("status") or {}
        containers = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
        state = next((one.get("state") or {} for one in containers if one.get("name") == self._container), {})
        return "terminated" in state or status.get("phase") in {"Succeeded", "Failed"}

    def _report_failure(self, error: KubernetesError) -> None:
        if not self._stop.is_set():
            self._since = self._since or time.monotonic()
            self._put(LogFailing(self._ref, self._container, error, self._since))

    def _call(self) -> ApiCall:
        return ApiCall(
            "get", "pods/log", f"{self._ref.name}/{self._container}", self._ref.namespace, self._api.server
        )


def split_time(line: bytes) -> tuple[int, bytes] | None:
    """Return the second (Unix time) and the text of a line; None if it has no time, as the kubelet's own messages."""
    found = _TIME.match(line)
    if found is None:
        return None
    text = line[found.end() :]
    return _unix_second(found[1], found[2]), text if len(text) < PART_BYTES[-1] else join_fragments(text)


def join_fragments(text: bytes) -> bytes:
    """Return a long line without the times between its parts."""
    for size in PART_BYTES:
        pieces, at = [], 0
        while found := _TIME.match(text, at + size):
            pieces.append(text[at : at + size])
            at = found.end()
        if pieces:
            return b"".join([*pieces, text[at:]])
    return text


class RecentLines:
    """Recognises repeated lines among the last ones. ``gap``: lines in between are lost, or may be."""

    def __init__(self) -> None:
        self.gap = False
        self._last: int | None = None  #: second of the last line
        self._lines: dict[int, Counter[int]] = {}  #: second -> hash of a line -> how often it came
        self._count = 0  #: of lines that are known
        self._bytes = 0  #: of all lines that were new
        self._last_line = 0  #: hash
        self._last_time = (0, b"")  #: of the last line
        self._replayed: dict[int, Counter[int]] = {}  #: those that may come again, since :meth:`resume`
        self._overlap_found = True  #: whether the last line before the cut has come again

    def resume(self) -> str:
        """Return the time from which to read again (RFC 3339); empty: from the beginning. Then repeats are expected."""
        since = 0 if self._last is None else self._last - 2 * MARGIN_S
        self._replayed = {second: Counter(lines) for second, lines in self._lines.items() if second >= since}
        self._overlap_found = self._last is None
        if self._last is None:
            return ""
        return datetime.fromtimestamp(self._last - MARGIN_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def is_new(self, second: int, line: bytes) -> bool:
        """Return whether *line*, with its time, is no repeat, and remember it."""
        key = hash(line)
        if key == self._last_line:
            self._overlap_found = True
        if self._replayed:
            lines = self._replayed.get(second)
            if lines is not None and lines[key] > 0:
                lines[key] -= 1
                return False
            if second > max(self._replayed) + MARGIN_S:
                self._replayed = {}
        if key in self._lines.get(second, ()) and _line_time(second, line) < self._last_time:
            # Only consecutive lines share a time: this line and its successors are repeats.
            self._replayed = {second: Counter(lines) for second, lines in self._lines.items()}
            self._replayed[second][key] -= 1
            return False
        if not self._overlap_found:
            self.gap = self._overlap_found = (
                True  # the last line did not come again: lines in between are lost
            )
        if self._bytes > FULL and self._last is not None and second - self._last >= SKIPPED_FILE_S:
            self.gap = True  # or the program printed nothing: log lines have no numbers
        self._bytes += len(line)
        self._remember(second, key, line)
        return True

    def _remember(self, second: int, key: int, line: bytes) -> None:
        self._last_line = key
        self._last_time = _line_time(second, line)
        if second != self._last:
            self._last = second
            # Twice the margin: the next line may be older, and repeats begin a margin before it.
            for old in sorted(old for old in self._lines if old < second - 2 * MARGIN_S):
                if self._count <= REMEMBERED_LINES:
                    break
                self._count -= self._lines.pop(old).total()
        self._lines.setdefault(second, Counter())[key] += 1
        self._count += 1


def _line_time(second: int, line: bytes) -> tuple[int, bytes]:
    """Return what orders lines: the second, and the digits after it."""
    return second, line[_FRACTION].split(b" ")[0].rstrip(b"Z")


def _unix_second(time: bytes, zone: bytes) -> int:
    """Return the Unix time of ``2026-11-21T15:53:54`` in a zone; 0 for an invalid date."""
    try:
        found = datetime.fromisoformat((time + (b"+00:00" if zone == b"Z" else zone)).decode())
        return int(found.timestamp())
    except ValueError:
        return 0
