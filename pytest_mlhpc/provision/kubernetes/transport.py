"""HTTP requests to an API server: time limits, credentials that expire, cancellation, logs and watches as streams.

Open it when a call hangs, times out, or reports the wrong cause. The calls themselves are in ``client.py``.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import urllib3

from pytest_mlhpc.config.http import (
    READ_BYTES,
    CancellableConnection,
    read_body,
    split_lines,
    system_message,
    use_line,
)
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.provision.kubernetes.errors import (
    ApiCall,
    KubernetesError,
    Unauthorized,
    Unavailable,
    error_from_status,
)
from pytest_mlhpc.provision.kubernetes.objects import Manifest

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


#: Longest time to reach the server, TLS included, in seconds.
CONNECT_LIMIT_S = 10.0
#: Largest answer, about 10,000 objects, and largest error answer, in bytes.
MAX_ANSWER_BYTES, MAX_ERROR_BYTES = 256 * 1024 * 1024, 64 * 1024


#: Longest watch event, in bytes: etcd stores objects of at most 1.5 MiB by default, and their JSON may be longer.
MAX_EVENT_BYTES = 64 * 1024 * 1024
#: Longest piece of a log line, in bytes.
MAX_LINE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class ApiRequest:
    """A request. ``path`` is quoted, ``query`` is not; ``content`` is sent as JSON."""

    call: ApiCall
    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    content: Mapping[str, Any] | None = None
    content_type: str = "application/json"


class HttpTransport:
    """Requests to one server. A branch shares its credentials, and can be closed alone.

    Args:
        login: credentials, read again once if the server rejects them.
        limit_s: time limit of a call, in seconds.
        parent: the transport of which this is a branch.
    """

    def __init__(self, login: Login, limit_s: float, parent: HttpTransport | None = None) -> None:
        self.login = login
        self._limit_s = limit_s
        self._parent = parent
        self._lock = threading.Lock()  # guards what follows
        self._lines: set[CancellableConnection] = set()
        self._branches: set[HttpTransport] = set()
        self._closed = False

    def branch(self) -> HttpTransport:
        """Return a transport that closes with this one, or before."""
        branch = HttpTransport(self.login, self._limit_s, self)
        with self._lock:
            branch._closed = self._closed
            self._branches.add(branch)
        return branch

    def close(self) -> None:
        """End all requests and streams, and refuse new ones; from any thread."""
        with self._lock:
            self._closed = True
            lines, branches = list(self._lines), list(self._branches)
        for line in lines:
            line.cut("closed")
        for branch in branches:
            branch.close()
        if self._parent is None:
            self.login.close()
        else:
            self._parent.remove_branch(self)

    def remove_branch(self, branch: HttpTransport) -> None:
        """Forget a branch that was closed."""
        with self._lock:
            self._branches.discard(branch)

    def ask(self, request: ApiRequest) -> dict[str, Any]:
        """Return the server's answer, a JSON object.

        Raises:
            KubernetesError: the call failed.
        """
        line = self._line(request.call)
        try:
            with time_limit(line, self._limit_s, f"no answer within {self._limit_s:g} s"):
                # No socket timeout: two limits that end at once would give two texts.
                response = self._send_authenticated(request, line, None)
                try:
                    data = read_body(response, MAX_ANSWER_BYTES)
                except BaseException:
                    response.close()
                    raise
                response.release_conn()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise connection_error(request.call, line, error) from error
        finally:
            self._forget(line)
        return _json_object(request.call, data)

    def open(self, request: ApiRequest, silence_s: float | None = None) -> ResponseStream:
        """Return an answer of unlimited length. *silence_s* is the longest time without data, in seconds; None: any.

        Raises:
            KubernetesError: the call failed.
        """
        line = self._line(request.call)
        try:
            with time_limit(line, self._limit_s, f"no answer within {self._limit_s:g} s"):
                response = self._send_authenticated(request, line, silence_s)
        except BaseException as error:
            self._forget(line)
            if isinstance(error, (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)):
                raise connection_error(request.call, line, error) from error
            raise
        return ResponseStream(response, line, request.call, self._forget)

    def _line(self, call: ApiCall) -> CancellableConnection:
        line = CancellableConnection()
        with self._lock:
            if self._closed:
                raise Unavailable(call, "this connection was closed", reason="closed")
            self._lines.add(line)
        return line

    def _forget(self, line: CancellableConnection) -> None:
        line.release()
        with self._lock:
            self._lines.discard(line)

    def _send_authenticated(
        self, request: ApiRequest, line: CancellableConnection, read_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer of 200 to 299. A request with rejected credentials is repeated with new ones."""
        access = self.login.access
        refused: Exception
        try:
            response = self._send(access, request, line, read_s)
        except ssl.SSLError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):  # of the server: ours would not help
                raise
            refused = error
        else:
            if response.status != 401:
                return self._checked(request.call, response)
            refused = _read_error(request.call, response)
        self.login.renew(access, request.call, refused)
        return self._checked(request.call, self._send(self.login.access, request, line, read_s))

    def _send(
        self, access: Access, request: ApiRequest, line: CancellableConnection, read_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        from kubernetes.client.exceptions import ApiException

        headers = {"Accept": "application/json, */*", "Content-Type": request.content_type}
        method, url, headers, content, _ = access.client.param_serialize(
            request.method, request.path, query_params=list(request.query), header_params=headers,
            body=request.content, auth_settings=["BearerToken"],
        )  # fmt: skip
        sent = urllib3.HTTPHeaderDict(headers)
        for name, value in access.impersonated:
            sent.add(name, value)
        self.login.count()
        try:
            with use_line(line):
                found = access.client.call_api(
                    method, url, sent, content, _request_timeout=(CONNECT_LIMIT_S, read_s)
                )
        except ApiException as error:  # so the client tells TLS errors
            raise ssl.SSLError(0, str(error.reason)) from error
        response: urllib3.BaseHTTPResponse = found.response
        return response

    def _checked(self, call: ApiCall, response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
        if 200 <= response.status <= 299:
            return response
        raise _read_error(call, response)


def connection_error(call: ApiCall, line: CancellableConnection, error: Exception) -> KubernetesError:
    """Return the error for a connection that failed or broke."""
    if line.why:
        return Unavailable(call, line.why, reason="closed" if line.why == "closed" else "")
    message = system_message(error)
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return KubernetesError(
            call, f"{message}; the certificate authority of the kubeconfig does not fit this server"
        )
    return Unavailable(call, message)


def _read_error(call: ApiCall, response: urllib3.BaseHTTPResponse) -> KubernetesError:
    retry_after = response.headers.get("Retry-After", "")
    try:
        data = read_body(response, MAX_ERROR_BYTES, cut=True)
        response.release_conn()
    finally:
        response.close()  # what is left unread makes the connection useless
    try:
        answer: Any = read_json(data)
    except (ValueError, RecursionError):
        answer = data[:1000].decode(errors="replace")
    if 300 <= response.status <= 399:
        answer = f"it points elsewhere, to {response.headers.get('Location', '')!r}: the kubeconfig's `server` is no API server"
    return error_from_status(call, response.status, answer, retry_after)


def _json_object(call: ApiCall, data: bytes) -> dict[str, Any]:
    try:
        found = read_json(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        start = data[:200].decode(errors="replace")
        raise Unavailable(call, f"the answer is no JSON object: {start!r}. Is this a Kubernetes API server?")
    return found


class ResponseStream:
    """The bytes of one answer, until the server ends it or :meth:`close` is called from any thread.

    Args:
        response: the response to read.
        line: its connection.
        call: the call, for error texts.
        forget: called once with *line* when reading is over.
    """

    def __init__(
        self,
        response: urllib3.BaseHTTPResponse,
        line: CancellableConnection,
        call: ApiCall,
        forget: Callable[[CancellableConnection], None],
    ) -> None:
        self._response = response
        self._line = line
        self._call = call
        self._forget = forget
        self._lock = threading.Lock()
        self._state = "new"

    def __iter__(self) -> Iterator[bytes]:
        """Return the data as it arrives; once.

        Raises:
            Unavailable: the connection broke before the server ended the answer.
        """
        with self._lock:
            if self._state != "new":
                return
            self._state = "read"
        try:
            while piece := self._piece():
                yield piece
        finally:
            self._end()

    def close(self) -> None:
        """End the stream. A blocked reader wakes at once and gets no error."""
        self._line.cut("closed")
        with self._lock:
            if self._state == "read":  # who reads cleans up
                return
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._state == "ended":
                return
            self._state = "ended"
        self._response.close()
        self._forget(self._line)

    def _piece(self) -> bytes:
        try:
            return self._response.read1(READ_BYTES)
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            if self._line.why == "closed":
                return b""
            why = self._line.why or f"the connection broke: {type(error).__name__}"
            raise Unavailable(self._call, why) from error


class LogStream:
    """Lines of a container's log, as bytes without newline; very long lines come in pieces.

    Iteration ends when the server ends the log, or after :meth:`close`. ``rest`` is a last line without newline;
    after a cut connection it is incomplete.

    Raises (while iterating):
        Unavailable: the connection broke.
    """

    def __init__(self, stream: ResponseStream) -> None:
        self.rest = b""
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        """Return the lines as they arrive."""
        rest: list[bytes] = []
        yield from split_lines(self._stream, MAX_LINE_BYTES, rest)
        self.rest = b"".join(rest)

    def close(self) -> None:
        """End the stream and wake its reader; from any thread, any number of times."""
        self._stream.close()


@dataclass(frozen=True)
class WatchEvent:
    """One event: ADDED, MODIFIED, DELETED or BOOKMARK. An ERROR event is raised as a KubernetesError instead."""

    type: str
    object: Manifest


class WatchStream:
    """Events of a watch. Iteration ends when the server ends the watch, or after :meth:`close`.

    Raises (while iterating):
        Expired: the resource version is too old.
        Unavailable: the connection broke, or sent something that is no watch event.
        KubernetesError: the server sent another ERROR event.
    """

    def __init__(self, stream: ResponseStream, call: ApiCall) -> None:
        self._stream = stream
        self._call = call
        self._closed = False

    def __iter__(self) -> Iterator[WatchEvent]:
        """Return the events as they arrive."""
        rest: list[bytes] = []
        for line in split_lines(self._stream, MAX_EVENT_BYTES, rest):
            if line.strip():
                yield _parse_event(self._call, line)
        if not self._closed and any(part.strip() for part in rest):
            raise Unavailable(self._call, "the watch ended in the middle of an event")

    def close(self) -> None:
        """End the stream and wake its reader; from any thread, any number of times."""
        self._closed = True
        self._stream.close()


def _parse_event(call: ApiCall, line: bytes) -> WatchEvent:
    """Return the event in *line*; an ERROR event is raised."""
    try:
        found = read_json(line)
        kind, content = found["type"], found["object"]
    except (ValueError, RecursionError, TypeError, KeyError):
        kind, content = None, None
    if not (isinstance(kind, str) and isinstance(content, dict)):
        raise Unavailable(call, f"this is no watch event: {line[:200].decode(errors='replace')!r}")
    if kind == "ERROR":
        code = content.get("code")
        raise error_from_status(call, code if isinstance(code, int) else 500, content)
    return WatchEvent(kind, content)


@dataclass(frozen=True)
class Access:
    """The official client with credentials for one server."""

    client: ApiClient
    server: str
    namespace: str
    authority: str = ""  #: which certificate authority it has, to tell clusters apart that have one URL
    impersonated: tuple[
        tuple[str, str], ...
    ] = ()  #: headers that say as whom it acts; one may be there several times


class Login:
    """The current credentials of one account, shared by all its clients. ``requests`` counts what was sent.

    Args:
        load: reads the credentials; raises UsageError.
    """

    def __init__(self, load: Callable[[], Access]) -> None:
        self.requests = 0
        self.access = load()
        self._load = load
        self._lock = threading.Lock()
        self._renewing = threading.Lock()

    def count(self) -> None:
        """Count a request."""
        with self._lock:
            self.requests += 1

    def renew(self, used: Access, call: ApiCall, refused: Exception) -> None:
        """Read the credentials again, unless another thread has replaced *used*; concurrent callers wait.

        Raises:
            Unauthorized: they cannot be read, or lead to another cluster.
        """
        with self._renewing:
            if self.access is not used:
                return
            answer = refused.message if isinstance(refused, KubernetesError) else str(refused)
            try:
                found = self._load()
            except UsageError as error:
                raise Unauthorized(call, f"{answer}; {error}", status=401) from error
            if (found.server, found.authority) != (used.server, used.authority):
                # The kubeconfig's context was changed meanwhile: our objects are not in this cluster.
                found.client.close()
                raise Unauthorized(
                    call,
                    f"{answer}; and the kubeconfig leads to another cluster, {found.server}, now",
                    status=401,
                )
            self.access = found
        used.client.close()  # what is under way with it goes on

    def close(self) -> None:
        """Close idle connections."""
        self.access.client.close()


@contextlib.contextmanager
def time_limit(line: CancellableConnection, seconds: float, why: str) -> Iterator[None]:
    """Cut *line* after *seconds*. Socket timeouts do not limit a server that keeps sending a little."""
    timer = threading.Timer(seconds, line.cut, (why,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
