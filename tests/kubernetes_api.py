"""The API of a Kubernetes server, asked directly: tests must not trust the client that they test."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

import yaml

#: Who asks, in the server's audit log.
AGENT = "tests-of-pytest-mlhpc"
#: One answer of the API, in seconds.
LIMIT_S = 300.0


class ApiError(Exception):
    """The API refused, or nobody answered (status 0)."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status


def ask(kubeconfig: Path, method: str, path: str, body: Any, kind: str) -> Any:
    """Return the answer to one request, parsed if it is JSON.

    Raises:
        ApiError: It is none.
    """
    port, context, headers, host = _access(kubeconfig)
    connection = http.client.HTTPSConnection(host, port, timeout=LIMIT_S, context=context)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {**headers, "Content-Type": kind, "User-Agent": AGENT})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(0, str(error)) from error
    finally:
        connection.close()
    if answer.status >= http.HTTPStatus.BAD_REQUEST:
        raise ApiError(answer.status, text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def address(kubeconfig: Path) -> str:
    """Return host and port of the server."""
    port, _, _, host = _access(kubeconfig)
    return f"{host}:{port}"


def _access(kubeconfig: Path) -> tuple[int, ssl.SSLContext, dict[str, str], str]:
    """Return port, certificates, headers and host of a kubeconfig's current context."""
    config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    address = urllib.parse.urlsplit(cluster["server"])
    authority = cluster.get("certificate-authority-data")
    tls = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"),
        cadata=base64.b64decode(authority).decode() if authority else None,
    )
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile() as file:
            file.write(
                b"\n".join(base64.b64decode(user[f"client-{part}-data"]) for part in ("certificate", "key"))
            )
            file.flush()
            tls.load_cert_chain(file.name)
    token = (
        Path(user["tokenFile"]).read_text(encoding="ascii") if "tokenFile" in user else user.get("token", "")
    )
    headers = {"Authorization": f"Bearer {token.strip()}"} if token else {}
    return address.port or 443, tls, headers, address.hostname or ""


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)
