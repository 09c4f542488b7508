"""Requests through the official client: time limits, sizes, credentials that expire, and whose fault a failure is."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import urllib3

from pytest_mlhpc.line import Line
from pytest_mlhpc.provision.kubernetes.api import CALL_LIMIT_S
from pytest_mlhpc.provision.kubernetes.errors import (
    Call,
    KubernetesError,
    Unavailable,
    error_of,
)
from pytest_mlhpc.provision.kubernetes.line import limited, on
from pytest_mlhpc.provision.kubernetes.login import Access, Login
from pytest_mlhpc.provision.kubernetes.stream import Stream, body
from pytest_mlhpc.results.foreign import read_json

#: Longest time to reach the server, TLS included, in seconds.
CONNECT_LIMIT_S = 10.0
#: Largest answer that is read, in bytes: some 10,000 objects; and of an error, which is a sentence.
MOST_BYTES, MOST_ERROR_BYTES = 256 * 1024 * 1024, 64 * 1024


@dataclass(frozen=True)
class Request:
    """What is sent. ``path`` is quoted; ``query`` is not. ``content`` is sent as JSON."""

    call: Call
    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    content: Mapping[str, Any] | None = None
    content_type: str = "application/json"


class Transport:
    """Requests to one server. A branch shares the server, but what is under way in it can be ended alone.

    Args:
        login: credentials, which are read again, once, when the server no longer takes them.
        limit_s: time limit of a call, in seconds.
        parent: of which this is a branch.
    """

    def __init__(self, login: Login, limit_s: float = CALL_LIMIT_S, parent: Transport | None = None) -> None:
        self.login = login
        self._limit_s = limit_s
        self._parent = parent
        self._lock = threading.Lock()  # guards what follows
        self._lines: set[Line] = set()
        self._branches: set[Transport] = set()
        self._closed = False

    def branch(self) -> Transport:
        """Return a transport that closes with this one, or before."""
        branch = Transport(self.login, self._limit_s, self)
        with self._lock:
            branch._closed = self._closed
            self._branches.add(branch)
        return branch

    def close(self) -> None:
        """End every request and stream that is under way, and take no more; from any thread."""
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
            self._parent.drop(self)

    def drop(self, branch: Transport) -> None:
        """Forget a branch that was closed."""
        with self._lock:
            self._branches.discard(branch)

    def ask(self, request: Request) -> dict[str, Any]:
        """Return the server's answer, a JSON object."""
        line = self._line(request.call)
        try:
            with limited(line, self._limit_s, _late(self._limit_s)):
                response = self._answered(
                    request, line, None
                )  # one clock: two that end at once say it in two ways
                try:
                    data = body(response, MOST_BYTES)
                except BaseException:
                    response.close()
                    raise
                response.release_conn()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise broken(request.call, line, error) from error
        finally:
            self._forget(line)
        return _json_object(request.call, data)

    def open(self, request: Request, silence_s: float | None = None) -> Stream:
        """Return an answer that goes on and on; *silence_s*: longest time in which nothing may come; None: any."""
        line = self._line(request.call)
        try:
            with limited(line, self._limit_s, _late(self._limit_s)):
                response = self._answered(request, line, silence_s)
        except BaseException as error:
            self._forget(line)
            if isinstance(error, (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)):
                raise broken(request.call, line, error) from error
            raise
        return Stream(response, line, request.call, self._forget)

    def _line(self, call: Call) -> Line:
        line = Line()
        with self._lock:
            if self._closed:
                raise Unavailable(call, "this connection was closed", reason="closed")
            self._lines.add(line)
        return line

    def _forget(self, line: Line) -> None:
        line.release()
        with self._lock:
            self._lines.discard(line)

    def _answered(self, request: Request, line: Line, read_s: float | None) -> urllib3.BaseHTTPResponse:
        """Return an answer of 200 to 299, asked for again with new credentials where the old ones are not taken."""
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
                return self._good(request.call, response)
            refused = _read_error(request.call, response)
        self.login.renew(access, request.call, refused)
        return self._good(request.call, self._send(self.login.access, request, line, read_s))

    def _send(
        self, access: Access, request: Request, line: Line, read_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        from kubernetes.client.exceptions import ApiException

        headers = {"Accept": "application/json, */*", "Content-Type": request.content_type}
        method, url, headers, content, _ = access.client.param_serialize(
            request.method, request.path, query_params=list(request.query), header_params=headers,
            body=request.content, auth_settings=["BearerToken"],
        )  # fmt: skip
        self.login.count()
        try:
            with on(line):
                found = access.client.call_api(
                    method, url, headers, content, _request_timeout=(CONNECT_LIMIT_S, read_s)
                )
        except ApiException as error:  # so the client tells TLS errors
            raise ssl.SSLError(0, str(error.reason)) from error
        response: urllib3.BaseHTTPResponse = found.response
        return response

    def _good(self, call: Call, response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
        if 200 <= response.status <= 299:
            return response
        raise _read_error(call, response)


def broken(call: Call, line: Line, error: Exception) -> KubernetesError:
    """Return the error for a connection that could not be made, or broke."""
    if line.why:
        return Unavailable(call, line.why, reason="closed" if line.why == "closed" else "")
    words = _words(error)
    if "CERTIFICATE_VERIFY_FAILED" in words:
        return KubernetesError(
            call, f"{words}; the certificate authority of the kubeconfig does not fit this server"
        )
    return Unavailable(call, words)


def _words(error: BaseException) -> str:
    """Return the system's own words for what is below urllib3's wrappings, without the objects in their texts."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return str(seen.strerror)
        seen = seen.__cause__ or seen.__context__
    return str(error).rpartition(">: ")[2] or type(error).__name__


def _late(limit_s: float) -> str:
    return f"no answer within {limit_s:g} s"


def _read_error(call: Call, response: urllib3.BaseHTTPResponse) -> KubernetesError:
    retry_after = response.headers.get("Retry-After", "")
    try:
        data = body(response, MOST_ERROR_BYTES, cut=True)
        response.release_conn()
    finally:
        response.close()  # what is left unread makes the connection useless
    try:
        answer: Any = read_json(data)
    except (ValueError, RecursionError):
        answer = data[:1000].decode(errors="replace")
    if 300 <= response.status <= 399:
        answer = f"it points elsewhere, to {response.headers.get('Location', '')!r}: the kubeconfig's `server` is no API server"
    return error_of(call, response.status, answer, retry_after)


def _json_object(call: Call, data: bytes) -> dict[str, Any]:
    try:
        found = read_json(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        start = data[:200].decode(errors="replace")
        raise Unavailable(call, f"the answer is no JSON object: {start!r}. Is this a Kubernetes API server?")
    return found
