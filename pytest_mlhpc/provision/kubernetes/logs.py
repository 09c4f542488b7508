"""Following one container's log: live, once each line, over every cut of the connection, until the container has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.provision.kubernetes.api import KubernetesApi, Manifest
from pytest_mlhpc.provision.kubernetes.errors import Call, Invalid, KubernetesError, NotFound, Unavailable
from pytest_mlhpc.provision.kubernetes.kept_log import KeptLog
from pytest_mlhpc.provision.kubernetes.log_text import Recent, taken_apart
from pytest_mlhpc.provision.kubernetes.pauses import pause_after
from pytest_mlhpc.provision.kubernetes.resources import ObjectRef
from pytest_mlhpc.provision.kubernetes.stream import MOST_LINE_BYTES

#: Most bytes of one container's text that are kept in its file.
LOG_CAP = 256 * 1024 * 1024
#: How long after the end of a log the pod's status is waited for before it is asked for, in seconds: kubelets look at their
#: containers once a second and then tell the server.
STATUS_S = 3.0
#: How long the last look at an ended container's log is tried while nobody answers, in seconds.
LAST_LOOK_S = 90.0


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a container, without its newline and its time."""

    ref: ObjectRef
    container: str
    line: bytes


@dataclass(frozen=True)
class LogTrouble:
    """The log cannot be read, since then (``time.monotonic()``); told at every failing try. It is tried again."""

    ref: ObjectRef
    container: str
    error: KubernetesError
    since: float


@dataclass(frozen=True)
class LogEnded:
    """Nothing more will come. ``complete``: all that the container printed was told; if not, ``error`` may say why.

    A long log with a silence in it counts as incomplete: a kubelet may have passed over a file then (see ``log_text``).
    """

    ref: ObjectRef
    container: str
    complete: bool
    error: KubernetesError | None = None
    trouble: str = ""  #: why the file that keeps the text is not complete


class LogFollower:
    """One thread for one container that has started, begun by :meth:`start`; it ends with the log, or by :meth:`close`.

    Args:
        api: the server; a branch of it is used, so that closing ends what is under way.
        ref: the pod.
        container: its name.
        put: takes each report, from this thread; must not wait.
        keep: file for the text, without times.
        cap: most bytes of that file.
    """

    def __init__(
        self,
        api: KubernetesApi,
        ref: ObjectRef,
        container: str,
        put: Callable[[LogLine | LogTrouble | LogEnded], object],
        *,
        keep: Path | None = None,
        cap: int = LOG_CAP,
    ) -> None:
        self._api = api.branch()
        self._ref = ref
        self._container = container
        self._put = put
        self._kept = KeptLog(keep, cap)
        self._recent = Recent()
        self._proper = False  #: the server itself ended the last stream
        self._long = False  #: the last line goes on in the next
        self._words = ""  #: what the kubelet said instead of a log
        self._failures = 0
        self._since = 0.0
        self._over = threading.Event()  #: the container has ended, or we are to
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log {ref.name}/{container}")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ended(self) -> None:
        """Say that the container has ended, as the pod's status says: so that nobody needs to ask. From any thread."""
        self._over.set()

    def close(self) -> None:
        """End it and wait for the thread; any number of times, from any thread but its own. No more is reported."""
        self._stop.set()
        self._over.set()
        self._api.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        error: KubernetesError | None = None
        try:
            self._follow()
            error = self._last_look()
        except NotFound as gone:
            error = None if self._proper else gone
        except KubernetesError as refused:
            error = refused
        except Exception as bug:  # noqa: BLE001 - whatever it is, silence would be the worst answer
            error = Unavailable(self._call(), f"{type(bug).__name__}: {bug}")
        self._kept.close()
        if not self._stop.is_set():
            if error is None and self._words:
                error = KubernetesError(self._call(), self._words)
            complete = error is None and not self._recent.hole
            self._put(LogEnded(self._ref, self._container, complete, error, self._kept.trouble))

    def _follow(self) -> None:
        """Follow until the container has ended."""
        while not self._over.is_set():
            began = time.monotonic()
            try:
                self._read(follow=True)
            except (NotFound, Invalid):
                raise
            except KubernetesError as error:
                self._cut(error, time.monotonic() - began)
                continue
            if self._over.wait(STATUS_S) or self._has_ended(self._api.get(self._ref)):
                return
            self._failures += 1  # until a new line comes: the kubelet has no more to say, or was away
            if self._failures > 1:
                self._over.wait(pause_after(self._failures, Unavailable(self._call(), self._words)))

    def _cut(self, error: KubernetesError, lasted_s: float) -> None:
        """Tell a failing try and wait, but for the first cut of a stream that was good so far."""
        self._failures = 1 if lasted_s >= STATUS_S else self._failures + 1
        if self._failures > 1 or not isinstance(error, Unavailable):
            self._tell(error)
            self._over.wait(pause_after(max(1, self._failures - 1), error))

    def _last_look(self) -> KubernetesError | None:
        """Read once more what there is since the last lines: a server ends a log properly also where a kubelet died."""
        until = time.monotonic() + LAST_LOOK_S
        self._failures = 0
        while not self._stop.is_set():
            try:
                self._read(follow=False)
            except Unavailable as error:
                self._failures += 1
                self._tell(error)
                pause = pause_after(self._failures, error)
                if time.monotonic() + pause > until:
                    return error
                self._stop.wait(pause)
            else:
                return None
        return None

    def _read(self, *, follow: bool) -> None:
        """Read the log from where it was left until its end; a cut raises Unavailable."""
        self._words = ""
        try:
            stream = self._api.logs(self._ref, self._container, follow=follow, since=self._recent.resume())
        except Invalid as error:
            if "waiting to start" not in error.message:
                raise
            raise Unavailable(
                self._call(), error.message, status=error.status, reason=error.reason
            ) from error
        self._since = 0.0
        self._proper = False
        try:
            for line in stream:
                self._take(line)
            if stream.rest and not follow:
                self._take(stream.rest)
        finally:
            stream.close()
        self._proper = True

    def _take(self, line: bytes) -> None:
        found = taken_apart(line)
        goes_on, self._long = self._long, len(line) >= MOST_LINE_BYTES
        if found is None and not goes_on:
            self._words = self._words or line.decode(errors="replace")
            return
        second, text = found or (0, line)
        if found is None or self._recent.is_new(second, line):
            self._failures = 0
            self._kept.write(text)
            self._put(LogLine(self._ref, self._container, text))

    def _has_ended(self, pod: Manifest) -> bool:
        status = pod.get("status") or {}
        containers = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
        state = next((one.get("state") or {} for one in containers if one.get("name") == self._container), {})
        return "terminated" in state or status.get("phase") in {"Succeeded", "Failed"}

    def _tell(self, error: KubernetesError) -> None:
        if not self._stop.is_set():
            self._since = self._since or time.monotonic()
            self._put(LogTrouble(self._ref, self._container, error, self._since))

    def _call(self) -> Call:
        return Call(
            "get", "pods/log", f"{self._ref.name}/{self._container}", self._ref.namespace, self._api.server
        )
