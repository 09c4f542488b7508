"""Writing to InfluxDB through ``/api/v2/write`` (1.8, 2.x, 3 Core) by influxdb-client, one synchronous request at a time.

Its batching mode loses points when the server is away or the process ends; its synchronous mode raises for every write that
was not acknowledged, and that is what the spool needs.
"""

from __future__ import annotations

import contextlib
import types
import zlib
from dataclasses import dataclass
from typing import Any, Protocol, Self

from pytest_mlhpc.errors import MlhpcError, UsageError
from pytest_mlhpc.influx.credentials import Server
from pytest_mlhpc.node.foreign import read_json

#: What a server answers when it does not take what was sent, as it is: line protocol it cannot read, a type that does not fit,
#: a body that is too large, a time outside of the retention. Anything else may be different tomorrow.
REFUSED = frozenset({400, 413, 422})
_NO_CONTENT = 204
#: Level 1 packs line protocol to a twelfth already; higher ones take several times as long for little.
_LEVEL = 1
_GZIP = 31
_LONGEST_REASON = 500


class RefusedError(MlhpcError):
    """The server does not take these lines, and never will."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"{status}: {reason}")


class UnavailableError(MlhpcError):
    """The server did not take the lines now. ``retry_after_s`` is what it asked for, where it did."""

    def __init__(self, text: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(text)


class Sink(Protocol):
    """What takes lines."""

    def write(self, lines: bytes) -> None:
        """Write lines; when it returns, the server has acknowledged all of them.

        Raises:
            RefusedError: some or all of them are not taken.
            UnavailableError: nothing is known about any of them.
        """


@dataclass(frozen=True)
class _Library:
    """The parts of influxdb-client that are used."""

    service: Any
    failure: type[Exception]
    transport: type[Exception]
    client: Any


class InfluxSink:
    """One server. Use as a context manager."""

    def __init__(self, server: Server, *, timeout_s: float) -> None:
        """Make a client; nothing is asked yet.

        Raises:
            UsageError: influxdb-client is not installed.
        """
        self._server = server
        self._library = _load(server, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._library.client.close()

    def write(self, lines: bytes) -> None:
        """Write lines; see :class:`Sink`."""
        packer = zlib.compressobj(_LEVEL, wbits=_GZIP)
        body = packer.compress(lines) + packer.flush()
        library, server = self._library, self._server
        try:
            _, status, _ = library.service.post_write_with_http_info(
                org=server.org, bucket=server.bucket, body=body, precision="ns", content_encoding="gzip"
            )
        except library.failure as error:
            raise self._failure(error) from None  # the library's error holds the whole answer
        except (library.transport, OSError, UnicodeDecodeError) as error:
            raise UnavailableError(f"{server.url} does not answer: {self._words(error)}") from None
        if status != _NO_CONTENT:  # a portal that wants a password answers 200 and a page
            raise UnavailableError(
                f"{server.url} answered {status} to a write, as InfluxDB never does; check the address",
                status,
            )

    def _failure(self, error: Any) -> MlhpcError:
        status = int(error.status or 0)
        reason = self._reason(error)
        if status in REFUSED:
            return RefusedError(status, reason)
        if not status:
            return UnavailableError(f"{self._server.url}: {reason}")
        return UnavailableError(
            f"{self._server.url} answered {status}: {reason}{hint(status, self._server)}",
            status,
            _retry_after(error),
        )

    def _reason(self, error: Any) -> str:
        """Return what the server says, in a line, without our token."""
        text = str(error.body or error.reason or "")
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            text = str(read_json(text).get("message") or text)
        return self._server.hide(" ".join(text.split()))[:_LONGEST_REASON] or "no reason given"

    def _words(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        return self._server.hide(text.rpartition("Caused by ")[2])[:_LONGEST_REASON] or type(error).__name__


def hint(status: int, server: Server) -> str:
    """Return what to do about an answer, to be put behind it."""
    match status:
        case 401:
            return " (check MLHPC_INFLUX_TOKEN)"
        case 403:
            return f" (the token may not write to {server.bucket!r})"
        case 404:
            return (
                f" (is there a bucket or database {server.bucket!r}? MLHPC_INFLUX_BUCKET, MLHPC_INFLUX_ORG)"
            )
        case _:
            return ""


def _retry_after(error: Any) -> float:
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except (AttributeError, TypeError, ValueError):
        return 0.0


def _load(server: Server, timeout_s: float) -> _Library:
    try:
        from influxdb_client.client.influxdb_client import InfluxDBClient
        from influxdb_client.rest import ApiException
        from influxdb_client.service.write_service import WriteService
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise UsageError(
            f"InfluxDB needs a package that is not installed ({error.name}): pip install 'pytest-mlhpc[influx]'"
        ) from error
    client = InfluxDBClient(
        url=server.url,
        token=server.token,
        org=server.org,
        timeout=int(timeout_s * 1000),
        ssl_ca_cert=server.ca or None,
        retries=False,  # no second try and no redirect behind our back: the token goes to one host only
    )
    service = WriteService(client.api_client)  # type: ignore[no-untyped-call]  # the library's
    return _Library(service, ApiException, HTTPError, client)
