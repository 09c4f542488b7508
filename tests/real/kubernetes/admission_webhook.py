"""An admission webhook for tests: a TLS server in this process that the cluster's API server asks about each object."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from certificates import certificate
from kubernetes_service import Kubernetes
from services import wait_until

#: What is to be said of an object that somebody creates: empty allows it; or how it is changed, as a JSON patch.
Verdict = Callable[[Mapping[str, Any]], str | list[dict[str, Any]]]


@contextlib.contextmanager
def admission_webhook(
    cluster: Kubernetes,
    namespace: str,
    folder: Path,
    verdict: Verdict,
    *,
    resources: tuple[str, ...] = ("pods", "jobs"),
    kind: str = "validating",
) -> Iterator[None]:
    """Let *verdict* judge what is created in *namespace*; while it does not return, the API server waits, for two seconds.

    One of *kind* mutating may change it. An API server asks a new webhook after a while: when this returns, it does.
    """
    name = f"mlhpc-test-{secrets.token_hex(4)}"
    asks = threading.Event()

    def judge(asked: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        if asked["object"]["metadata"].get("name") != name:
            return verdict(asked)
        asks.set()
        return ""

    context, trusted = certificate(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(judge))
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    cluster.ask(
        "PATCH",
        f"/api/v1/namespaces/{namespace}",
        {"metadata": {"labels": {name: "yes"}}},
        kind="application/merge-patch+json",
    )
    path = f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations"
    authority = base64.b64encode(trusted.read_bytes()).decode("ascii")
    hook = {
        "name": "guard.mlhpc.test",
        "clientConfig": {"url": f"https://127.0.0.1:{server.server_address[1]}/", "caBundle": authority},
        "namespaceSelector": {"matchLabels": {name: "yes"}},
        "rules": [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": list(resources)}],
        "failurePolicy": "Fail",
        "timeoutSeconds": 2,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }  # fmt: skip
    try:
        cluster.ask("POST", path, {"metadata": {"name": name}, "webhooks": [hook]})
        assert wait_until(lambda: cluster.takes_pod(namespace, name) and asks.is_set()), (
            "nobody asks the webhook"
        )
        yield
    finally:
        cluster.forget(f"{path}/{name}")
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(verdict: Verdict) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            asked = json.loads(self.rfile.read(length))["request"]
            words = verdict(asked)
            said = {"uid": asked["uid"], "allowed": not isinstance(words, str) or not words}
            if isinstance(words, list):
                patch = base64.b64encode(json.dumps(words).encode()).decode("ascii")
                said.update(patchType="JSONPatch", patch=patch)
            elif words:
                said["status"] = {"code": 403, "message": words}
            answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": said}
            body = json.dumps(answer).encode()
            with contextlib.suppress(OSError):  # the API server has not waited so long
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    return Handler
