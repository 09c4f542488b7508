"""Credentials of one account at one server, read again when the server no longer takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.errors import Call, KubernetesError, Unauthorized

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


@dataclass(frozen=True)
class Access:
    """A way to a server: the official client with our credentials."""

    client: ApiClient
    server: str
    namespace: str
    authority: str = ""  #: which certificate authority it has, to tell clusters apart that have one URL


class Login:
    """Shared by all that ask one server. ``requests`` counts what was sent with it.

    Args:
        load: reads the credentials; UsageError.
    """

    def __init__(self, load: Callable[[], Access]) -> None:
        self.requests = 0
        self.access = load()
        self._load = load
        self._lock = threading.Lock()
        self._renewing = threading.Lock()

    def count(self) -> None:
        """Note that a request is sent."""
        with self._lock:
            self.requests += 1

    def renew(self, used: Access, call: Call, refused: Exception) -> None:
        """Read the credentials again, unless another thread did since *used*; who comes second waits for the first.

        Raises:
            Unauthorized: they cannot be read.
        """
        with self._renewing:
            if self.access is not used:
                return
            words = refused.message if isinstance(refused, KubernetesError) else str(refused)
            try:
                found = self._load()
            except UsageError as error:
                raise Unauthorized(call, f"{words}; {error}", status=401) from error
            if (found.server, found.authority) != (used.server, used.authority):
                # Somebody has chosen another context meanwhile: what we look for is not there.
                found.client.close()
                raise Unauthorized(
                    call,
                    f"{words}; and the kubeconfig leads to another cluster, {found.server}, now",
                    status=401,
                )
            self.access = found
        used.client.close()  # what is under way with it goes on

    def close(self) -> None:
        """Give back connections that wait for a next request."""
        self.access.client.close()
