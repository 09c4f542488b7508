"""The calls to a Kubernetes API server, on plain JSON: the official client's models reject what some sites use.

Open it to see which calls are made and what they return, or when a call hangs, times out, or reports the wrong cause. Each call
takes at most ``connect.CALL_LIMIT_S``, from any thread. Streams (watch, logs) take that long to begin, and last until the server
or :meth:`KubernetesClient.close` ends them.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import http.client
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import quote
from weakref import WeakSet

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
    Conflict,
    Expired,
    KubernetesError,
    NotFound,
    Unauthorized,
    Unavailable,
    error_from_status,
)
from pytest_mlhpc.provision.kubernetes.objects import EVENT, Manifest, ObjectRef, Resource, event_time

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
#: Objects in one page of a list, as in kubectl and client-go.
PAGE_SIZE = 500
#: Longest silence of a watch, in seconds: since 1.19 servers send a bookmark every minute.
WATCH_SILENCE_S = 200.0

#: What becomes of an object's dependants when it is deleted (metav1.DeleteOptions).
Propagation = Literal["Background", "Foreground", "Orphan"]
#: What breaks a connection.
_BROKEN = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)


@dataclass(frozen=True)
class Listing:
    """All matching objects, and the resource version from which a watch continues."""

    items: tuple[Manifest, ...]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """One event: ADDED, MODIFIED, DELETED or BOOKMARK. An ERROR event is raised as a KubernetesError instead."""

    type: str
    object: Manifest


@dataclass(frozen=True)
class ApiRequest:
    """A request. ``path`` is quoted, ``query`` is not; ``content`` is sent as JSON, of the type ``form``."""

    call: ApiCall
    method: str
    path: str
    query: Sequence[tuple[str, str]] = ()
    content: Mapping[str, Any] | None = None
    form: str = "application/json"


@dataclass(frozen=True)
class Access:
    """The official client with credentials for one server.

    ``authority`` is the SHA-256 of its certificate authority, empty for the system's: it tells clusters apart that have one
    URL. ``impersonated`` are headers that say as whom it acts; one may be there several times.
    """

    client: ApiClient
    server: str
    namespace: str
    authority: str = ""
    impersonated: tuple[tuple[str, str], ...] = ()


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
                text = f"{answer}; and the kubeconfig leads to another cluster, {found.server}, now"
                raise Unauthorized(call, text, status=401)
            self.access = found
        used.client.close()  # what is under way with it goes on


class KubernetesClient:
    """One server, one account, and a namespace that calls without one use.

    Args:
        login: credentials, read again once if the server rejects them.
        limit_s: time limit of a call, in seconds.
        namespace: empty: that of the credentials.
        is_branch: closing it closes no connections that others use.

    Raises (every method):
        KubernetesError: see ``errors.py``; Unavailable if the server does not answer.
    """

    def __init__(self, login: Login, limit_s: float, namespace: str = "", *, is_branch: bool = False) -> None:
        self.namespace = namespace or login.access.namespace
        self._login = login
        self._limit_s = limit_s
        self._is_branch = is_branch
        self._lock = threading.Lock()  # guards what follows
        self._lines: set[CancellableConnection] = set()
        self._branches: WeakSet[KubernetesClient] = WeakSet()
        self._closed = False

    @property
    def server(self) -> str:
        """The server's URL."""
        return self._login.access.server

    @property
    def authority(self) -> str:
        """SHA-256 of the server's certificate authority; empty if it is one of the system's."""
        return self._login.access.authority

    @property
    def requests(self) -> int:
        """The number of requests sent, branches included."""
        return self._login.requests

    def branch(self) -> KubernetesClient:
        """Return a client of the same server; closing it ends its own calls and streams only."""
        branch = KubernetesClient(self._login, self._limit_s, self.namespace, is_branch=True)
        with self._lock:
            branch._closed = self._closed
            self._branches.add(branch)
        return branch

    def close(self) -> None:
        """End all calls and streams, branches included, and refuse new ones; from any thread."""
        with self._lock:
            self._closed = True
            lines, branches = list(self._lines), list(self._branches)
        for line in lines:
            line.cut("closed")
        for branch in branches:
            branch.close()
        if not self._is_branch:
            self._login.access.client.close()

    def version(self) -> str:
        """Return the server's version, like v1.20.2."""
        found = self._ask(ApiRequest(ApiCall("get", "version", "", "", self.server), "GET", "/version"))
        return str(found.get("gitVersion") or f"{found.get('major', 0)}.{found.get('minor', 0)}")

    def versions(self, group: str) -> tuple[str, ...]:
        """Return the server's versions of an API group, the preferred one first.

        Raises:
            NotFound: the server has no such group.
        """
        call = ApiCall("get", f"versions of {group}", "", "", self.server)
        found = self._ask(ApiRequest(call, "GET", f"/apis/{quote(group, safe='')}"))
        first = (found.get("preferredVersion") or {}).get("version")
        others = [one.get("version") for one in found.get("versions") or ()]
        return tuple(dict.fromkeys(str(one) for one in [first, *others] if one))

    def create(self, resource: Resource, manifest: Manifest, namespace: str = "") -> Manifest:
        """Create an object and return it as the server stores it. *manifest* is not changed."""
        metadata = manifest.get("metadata") or {}
        namespace = namespace or str(metadata.get("namespace") or self.namespace)
        name = str(metadata.get("name") or metadata.get("generateName") or "")
        call = self._call("create", resource, namespace, name)
        path = resource.path(namespace)
        return self._ask(ApiRequest(call, "POST", path, content=copy.deepcopy(manifest)))

    def get(self, ref: ObjectRef) -> Manifest:
        """Return an object.

        Raises:
            NotFound: there is none.
        """
        return self._ask_object("get", "GET", ref)

    def patch(self, ref: ObjectRef, body: Mapping[str, Any]) -> Manifest:
        """Change an object by a JSON merge patch (RFC 7386) and return it."""
        return self._ask_object("patch", "PATCH", ref, body, "application/merge-patch+json")

    def delete(
        self, ref: ObjectRef, *, grace_s: int | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object and its dependants. A missing object, or another with its name (uid), is no error."""
        options: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if ref.uid:
            options["preconditions"] = {"uid": ref.uid}
        try:
            self._ask_object("delete", "DELETE", ref, options)
        except NotFound:
            return
        except Conflict as error:
            if not ref.uid or "uid" not in error.message.lower():
                raise

    def list(self, resource: Resource, *, labels: str = "", fields: str = "", namespace: str = "") -> Listing:
        """Return all matching objects, in pages; in one request if the server forgets the list between pages."""
        try:
            return self._list(resource, labels, fields, namespace or self.namespace, PAGE_SIZE)
        except Expired:
            return self._list(resource, labels, fields, namespace or self.namespace, 0)

    def events(self, uid: str) -> builtins.list[Manifest]:
        """Return the cluster's events about the object with this uid, oldest first."""
        return sorted(self.list(EVENT, fields=f"involvedObject.uid={uid}").items, key=event_time)

    def watch(
        self,
        resource: Resource,
        *,
        labels: str = "",
        resource_version: str,
        timeout_s: float,
        namespace: str = "",
    ) -> Stream[WatchEvent]:
        """Return the events since *resource_version*. The server ends the watch after *timeout_s* seconds.

        Raises (while iterating):
            Expired: the resource version is too old.
            Unavailable: the connection broke, or sent something that is no watch event.
            KubernetesError: the server sent another ERROR event.
        """
        namespace = namespace or self.namespace
        query = [
            ("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", resource_version),
            ("timeoutSeconds", str(round(timeout_s))), *_without_empty(labelSelector=labels),
        ]  # fmt: skip
        call = self._call("watch", resource, namespace)
        request = ApiRequest(call, "GET", resource.path(namespace), query)
        opened = self._open(request, min(WATCH_SILENCE_S, timeout_s + 30.0))
        return Stream(opened, call, self._forget, MAX_EVENT_BYTES, _watch_event, whole=True)

    def logs(self, ref: ObjectRef, container: str, *, follow: bool, since: str = "") -> Stream[bytes]:
        """Return the lines of a container's log, as bytes without newline; very long lines come in pieces.

        *since* is an RFC 3339 time; kubelets ignore fractions of a second. Each line begins with its time (RFC 3339, ns)
        and a space.

        Raises (while iterating):
            Unavailable: the connection broke.
        """
        query = [("container", container)]
        query += [("follow", str(follow).lower()), ("timestamps", "true")]
        query += _without_empty(sinceTime=since)
        namespace = ref.namespace or self.namespace
        call = ApiCall("get", f"{ref.resource}/log", f"{ref.name}/{container}", namespace, self.server)
        request = ApiRequest(call, "GET", ref.resource.path(namespace, ref.name, "log"), query)
        # A program may print nothing for hours; TCP keep-alive finds a dead connection.
        return Stream(self._open(request, None), call, self._forget, MAX_LINE_BYTES, lambda _call, text: text)

    def _list(self, resource: Resource, labels: str, fields: str, namespace: str, page: int) -> Listing:
        call = self._call("list", resource, namespace)
        selectors = _without_empty(labelSelector=labels, fieldSelector=fields, limit=str(page or ""))
        items: builtins.list[Manifest] = []
        onward = ""
        while True:
            query = (*selectors, *_without_empty(**{"continue": onward}))
            found = self._ask(ApiRequest(call, "GET", resource.path(namespace), query))
            metadata, some = found.get("metadata"), found.get("items")
            if not isinstance(metadata, dict) or not isinstance(some or [], builtins.list):
                raise Unavailable(call, "the answer is no list. Is this a Kubernetes API server?")
            kind = {"apiVersion": resource.api_version, "kind": resource.kind}  # which lists omit
            items += [{**kind, **item} for item in some or [] if isinstance(item, dict)]
            before, onward = onward, str(metadata.get("continue") or "")
            if not onward or onward == before:
                return Listing(tuple(items), str(metadata.get("resourceVersion") or ""))

    def _call(self, verb: str, resource: Resource, namespace: str, name: str = "") -> ApiCall:
        return ApiCall(verb, str(resource), name, namespace if resource.namespaced else "", self.server)

    def _ask_object(
        self, verb: str, method: str, ref: ObjectRef, content: Any = None, form: str = "application/json"
    ) -> Manifest:
        namespace = ref.namespace or self.namespace
        call = self._call(verb, ref.resource, namespace, ref.name)
        path = ref.resource.path(namespace, ref.name)
        return self._ask(ApiRequest(call, method, path, content=content, form=form))

    def _ask(self, request: ApiRequest) -> Manifest:
        """Return the server's answer, a JSON object."""
        with self._line(request.call) as line, time_limit(line, self._limit_s):
            # No socket timeout: two limits that end at once would give two texts.
            response = self._send_authenticated(request, line, None)
            try:
                data = read_body(response, MAX_ANSWER_BYTES)
            except BaseException:
                response.close()
                raise
            response.release_conn()
        self._forget(line)
        return _json_object(request.call, data)

    def _open(self, request: ApiRequest, silence_s: float | None) -> Opened:
        """Return an answer of unlimited length. *silence_s* is the longest time without data, in seconds; None: any."""
        with self._line(request.call) as line, time_limit(line, self._limit_s):
            return self._send_authenticated(request, line, silence_s), line

    @contextlib.contextmanager
    def _line(self, call: ApiCall) -> Iterator[CancellableConnection]:
        """Give what :meth:`close` cuts. It is forgotten if that fails, else by who uses it."""
        line = CancellableConnection()
        with self._lock:
            if self._closed:
                raise Unavailable(call, "this connection was closed", reason="closed")
            self._lines.add(line)
        try:
            yield line
        except BaseException as error:
            self._forget(line)
            if isinstance(error, _BROKEN):
                raise connection_error(call, line, error) from error
            raise

    def _forget(self, line: CancellableConnection) -> None:
        line.release()
        with self._lock:
            self._lines.discard(line)

    def _send_authenticated(
        self, request: ApiRequest, line: CancellableConnection, read_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer of 200 to 299. A request with rejected credentials is repeated with new ones."""
        access = self._login.access
        refused: Exception
        try:
            response = self._send(access, request, line, read_s)
        except ssl.SSLError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):  # of the server: ours would not help
                raise
            refused = error
        else:
            if response.status != 401:
                return _checked(request.call, response)
            refused = _read_error(request.call, response)
        self._login.renew(access, request.call, refused)
        return _checked(request.call, self._send(self._login.access, request, line, read_s))

    def _send(
        self, access: Access, request: ApiRequest, line: CancellableConnection, read_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        from kubernetes.client.exceptions import ApiException

        headers = {"Accept": "application/json, */*", "Content-Type": request.form}
        method, url, headers, content, _ = access.client.param_serialize(
            request.method, request.path, query_params=[*request.query], header_params=headers,
            body=request.content, auth_settings=["BearerToken"],
        )  # fmt: skip
        sent = urllib3.HTTPHeaderDict(headers)
        for name, value in access.impersonated:
            sent.add(name, value)
        self._login.count()
        limits = (CONNECT_LIMIT_S, read_s)
        try:
            with use_line(line):
                found = access.client.call_api(method, url, sent, content, _request_timeout=limits)
        except ApiException as error:  # so the client tells TLS errors
            raise ssl.SSLError(0, str(error.reason)) from error
        response: urllib3.BaseHTTPResponse = found.response
        return response


Item = TypeVar("Item")
#: An answer whose body was not read yet, and its connection.
Opened = tuple[urllib3.BaseHTTPResponse, CancellableConnection]


class Stream(Generic[Item]):
    """The items of one answer, until the server ends it or :meth:`close` is called from any thread. They come once.

    ``rest`` is a last line without newline; after a cut connection it is incomplete.

    Args:
        opened: the response to read, and its connection.
        call: the call, for error texts.
        forget: called once with the connection when reading is over.
        longest: longest line, in bytes; longer ones come in pieces.
        parse: makes an item of a line; None: there is none in it.
        whole: the last line has a newline too.
    """

    def __init__(
        self,
        opened: Opened,
        call: ApiCall,
        forget: Callable[[CancellableConnection], None],
        longest: int,
        parse: Callable[[ApiCall, bytes], Item | None],
        *,
        whole: bool = False,
    ) -> None:
        self.rest = b""
        self._response, self._line = opened
        self._call, self._forget = call, forget
        self._longest, self._parse, self._whole = longest, parse, whole
        self._unread = threading.Lock()  #: taken once, by who reads or by who closes before anybody has read

    def __iter__(self) -> Iterator[Item]:
        """Return the items as they arrive.

        Raises:
            Unavailable: the connection broke before the server ended the answer.
        """
        if not self._unread.acquire(blocking=False):
            return
        rest: list[bytes] = []
        try:
            for line in split_lines(iter(self._piece, b""), self._longest, rest):
                if (item := self._parse(self._call, line)) is not None:
                    yield item
        finally:
            self._end()
        self.rest = b"".join(rest)
        if self._whole and self.rest.strip() and not self._line.why:
            raise Unavailable(self._call, "the watch ended in the middle of an event")

    def close(self) -> None:
        """End the stream. A blocked reader wakes at once and gets no error, and cleans up."""
        self._line.cut("closed")
        if self._unread.acquire(blocking=False):
            self._end()

    def _end(self) -> None:
        self._response.close()
        self._forget(self._line)

    def _piece(self) -> bytes:
        try:
            return self._response.read1(READ_BYTES)
        except (*_BROKEN, ValueError) as error:
            if self._line.why == "closed":
                return b""
            why = self._line.why or f"the connection broke: {type(error).__name__}"
            raise Unavailable(self._call, why) from error


def _watch_event(call: ApiCall, line: bytes) -> WatchEvent | None:
    """Return the event in *line*; an ERROR event is raised."""
    if not line.strip():
        return None
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


def _without_empty(**parameters: str) -> list[tuple[str, str]]:
    """Return the parameters that are not empty."""
    return [(name, value) for name, value in parameters.items() if value]


def _checked(call: ApiCall, response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
    if 200 <= response.status <= 299:
        return response
    raise _read_error(call, response)


def connection_error(call: ApiCall, line: CancellableConnection, error: Exception) -> KubernetesError:
    """Return the error for a connection to the API server that failed or broke."""
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


@contextlib.contextmanager
def time_limit(line: CancellableConnection, seconds: float) -> Iterator[None]:
    """Cut *line* after *seconds*. Socket timeouts do not limit a server that keeps sending a little."""
    timer = threading.Timer(seconds, line.cut, (f"no answer within {seconds:g} s",))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
