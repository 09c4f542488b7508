"""The few questions that this script itself has for the API."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from testcluster.errors import ClusterError

from testkubernetes import access
from testkubernetes.settings import Settings

#: Longest wait for one answer, in seconds.
_LIMIT_S = 120.0


class Api:
    """The API server of one cluster, asked as a user whom the audit log leaves out."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        """Read how it is reached; nothing is asked."""
        self._port = settings.port
        self._token = access.token_of(directory, "probe")
        self._context = ssl.create_default_context(cafile=str(directory / "pki/ca.crt"))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and answer, which is parsed if it is JSON; status 0: nobody answered."""
        kind = "application/json-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=_LIMIT_S, context=self._context
        )
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def is_ready(self) -> bool:
        """Return whether the server serves."""
        return self.ask("GET", "/readyz")[0] == http.HTTPStatus.OK

    def node_states(self) -> dict[str, str]:
        """Return name -> ``Ready``, ``NotReady`` or ``Unknown`` of every node; empty when nobody answers."""
        status, answer = self.ask("GET", "/api/v1/nodes")
        if status != http.HTTPStatus.OK:
            return {}
        return {node["metadata"]["name"]: _state(node) for node in answer["items"]}

    def has_service_account(self) -> bool:
        """Return whether pods can be made: each needs an account and its token, which the controller manager makes."""
        status, answer = self.ask("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        return status == http.HTTPStatus.OK and bool(answer.get("secrets"))

    def pretend(self, count: int, resource: str, node: str) -> None:
        """Let a node say that it has ``count`` of a device; 0: none.

        Raises:
            ClusterError: The API refuses it.
        """
        name = resource.replace("~", "~0").replace("/", "~1")
        changes: list[dict[str, str]] = [{"op": "remove", "path": f"/status/capacity/{name}"}]
        if count:  # what is allocatable a kubelet makes of it, within a second; nobody should wait for that
            parts = ("capacity", "allocatable")
            changes = [{"op": "add", "path": f"/status/{part}/{name}", "value": str(count)} for part in parts]
        status, answer = self.ask("PATCH", f"/api/v1/nodes/{node}/status", changes)
        absent = count == 0 and status == http.HTTPStatus.UNPROCESSABLE_ENTITY  # there was none
        if status != http.HTTPStatus.OK and not absent:
            words = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise ClusterError(f"node {node} takes no {resource}: {words}")


def answers_well(port: int) -> bool:
    """Return whether a kubelet says that it is healthy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _state(node: dict[str, Any]) -> str:
    words = {"True": "Ready", "False": "NotReady"}
    conditions = node["status"].get("conditions", [])
    return next(
        (words.get(one["status"], "Unknown") for one in conditions if one["type"] == "Ready"), "Unknown"
    )
