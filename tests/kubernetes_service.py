"""A real Kubernetes for tests: a cluster of `ci/kubernetes` or one that the caller names, and what a test left on it."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import secrets
import shlex
import subprocess
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_api import AGENT, ApiError, address, ask
from services import (
    LIMIT_S,
    control,
    is_alive,
    leave,
    needs,
    required,
    session_folder,
    start,
    wait_until,
)

#: Every object of ours has it.
OURS = "app.kubernetes.io/managed-by=pytest-mlhpc"
_CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_NAMESPACED = (
    "/api/v1/{}/pods", "/api/v1/{}/configmaps", "/api/v1/{}/services", "/api/v1/{}/persistentvolumeclaims",
    "/api/v1/{}/secrets", "/apis/batch/v1/{}/jobs",
)  # fmt: skip


@dataclass(frozen=True)
class Kubernetes:
    """A real cluster; ``environment`` is all that its clients need. Only a private one may be broken."""

    kubeconfig: Path
    private: bool = False
    #: Of `ci/kubernetes`; None: somebody else's cluster.
    directory: Path | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    # --- questions

    def ask(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Any:
        """Return the answer, parsed if it is JSON.

        Raises:
            ApiError: It is none.
        """
        return ask(self.kubeconfig, method, path, body, kind)

    def items(self, path: str, labels: str = "") -> list[dict[str, Any]]:
        """Return a list of objects: ``items("/api/v1/namespaces/mine/pods", "a=b")``."""
        query = f"?labelSelector={urllib.parse.quote(labels)}" if labels else ""
        return self.ask("GET", path + query)["items"]

    def version(self) -> str:
        """Return what the server says that it is, like ``v1.20.2``."""
        return str(self.ask("GET", "/version")["gitVersion"])

    def server(self) -> str:
        """Return its address."""
        return address(self.kubeconfig)

    def run(self, *argv: str | Path, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command with this cluster in its environment."""
        return subprocess.run(
            list(map(str, argv)), env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip

    def user(self, name: str) -> Path:
        """Return the kubeconfig of ``limited`` or ``mlhpc``, users without any right but those that a test gives."""
        assert self.directory is not None, "only a cluster of ci/kubernetes has such users"
        return self.directory / f"kubeconfig-{name}"

    def host_folders(self) -> dict[str, str]:
        """Return name -> folder of this machine that a pod mounts, read-only, to run this very Python."""
        venv, prefix = self.environment["MLHPC_TEST_VENV"], self.environment["MLHPC_TEST_PREFIX"]
        return {"usr": "/usr", "venv": venv, "prefix": prefix}

    def requests(self, *, ours_too: bool = False) -> list[dict[str, Any]]:
        """Return every request of all but the cluster's own parts, in order: the audit log, one entry a request.

        Args:
            ours_too: With those of this class.
        """
        lines = Path(self.environment["MLHPC_KUBERNETES_AUDIT"]).read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        single = {entry["auditID"]: entry for entry in entries}.values()  # the last stage of each
        return [entry for entry in single if ours_too or entry.get("userAgent") != AGENT]

    # --- namespaces and users

    def make_namespace(self, name: str = "") -> str:
        """Make a namespace in which pods can be made at once; return its name."""
        name = name or f"mlhpc-test-{secrets.token_hex(4)}"
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        assert wait_until(lambda: self.takes_pod(name)), f"namespace {name} takes no pods"
        return name

    def takes_pod(self, namespace: str, name: str = "none") -> bool:
        """Return whether a pod could be made: it needs a service account, and that (up to 1.23) a token."""
        pod = {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
        try:
            self.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
        except ApiError as error:
            if error.status in {http.HTTPStatus.FORBIDDEN, http.HTTPStatus.INTERNAL_SERVER_ERROR}:
                return False
            raise
        return True

    def quota(self, namespace: str, **hard: str) -> str:
        """Make the quota ``small``; return its path once its controller has counted, before which it refuses all."""
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        self.ask("POST", quotas, {"metadata": {"name": "small"}, "spec": {"hard": hard}})
        path = f"{quotas}/small"
        assert wait_until(lambda: self.ask("GET", path)["status"].get("hard")), f"{path} is not counted"
        return path

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace and all in it; its pods at once, the rest when the cluster gets to it."""
        for pod in self.items(f"/api/v1/namespaces/{name}/pods"):
            self.forget(f"/api/v1/namespaces/{name}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0")
        self.forget(f"/api/v1/namespaces/{name}")

    def has(self, path: str) -> bool:
        """Return whether an object is there."""
        try:
            self.ask("GET", path)
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    def forget(self, path: str) -> None:
        """Delete an object, if it is there."""
        try:
            self.ask("DELETE", path)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise

    def grant(self, namespace: str, user: str, rules: list[dict[str, Any]]) -> None:
        """Give a user (``limited``, ``mlhpc``, or ``serviceaccount:NAME``) rights in a namespace, and take those of before."""
        kind, _, name = user.rpartition(":")
        subject = (
            {"kind": "ServiceAccount", "name": name, "namespace": namespace}
            if kind
            else {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
        )
        base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        for plural, more in (
            ("roles", {"rules": rules}),
            ("rolebindings", {"roleRef": reference, "subjects": [subject]}),
        ):
            self.forget(f"{base}/{plural}/{name}")
            self.ask("POST", f"{base}/{plural}", {"metadata": {"name": name}, **more})
        account = f"system:serviceaccount:{namespace}:{name}" if kind else name
        assert wait_until(lambda: self._may(account, namespace, rules[-1])), f"{user} gets no rights"

    def _may(self, user: str, namespace: str, rule: dict[str, Any]) -> bool:
        """Return whether the server lets a user do what a rule allows: it hears of new rules a moment later."""
        resource, _, subresource = rule["resources"][-1].partition("/")
        attributes = {
            "namespace": namespace, "verb": rule["verbs"][-1], "group": rule["apiGroups"][-1],
            "resource": resource, "subresource": subresource,
        }  # fmt: skip
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        answer = self.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def account(self, namespace: str, folder: Path, rules: list[dict[str, Any]]) -> Account:
        """Make a service account with these rights whose token can expire and be renewed."""
        name = f"account-{secrets.token_hex(3)}"
        self.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        self.grant(namespace, f"serviceaccount:{name}", rules)
        account = Account(self, namespace, name, folder / f"{name}.kubeconfig", folder / f"{name}.token")
        account.renew()
        return account

    # --- faults

    def kill(self, name: str, *, politely: bool = False) -> None:
        """Kill a daemon (``kube-apiserver``, ``kubelet.2``) or cut the power of a node (``node``, ``node.2``)."""
        self._fault("kill", name, *(["--politely"] if politely else []))

    def start(self, name: str) -> None:
        """Start it again and wait until it serves."""
        self._fault("start", name)

    def gpus(self, count: int, *, resource: str = "nvidia.com/gpu", node: str = "127.0.0.1") -> None:
        """Let a node say that it has so many devices."""
        self._fault("gpus", str(count), "--resource", resource, "--node", node)

    def runs(self, name: str) -> bool:
        """Return whether a daemon lives: ``kube-apiserver``, ``kubelet.2`` ..."""
        assert self.directory is not None
        return is_alive(self.directory, name)

    def _fault(self, *words: str) -> None:
        assert self.private, f"{words[0]} would disturb other tests: use the fixture own_kubernetes"
        assert self.directory is not None
        control("kubernetes", *words, directory=self.directory)


@dataclass(frozen=True)
class Account:
    """A service account; its kubeconfig names the file that holds its token, as sites with short-lived tokens do."""

    cluster: Kubernetes
    namespace: str
    name: str
    kubeconfig: Path
    token_file: Path

    def renew(self) -> None:
        """Write a new token; those of before hold."""
        core = f"/api/v1/namespaces/{self.namespace}"
        # A token that is bound to an object dies with it, long before the shortest lifetime (ten minutes) is over.
        secret = self.cluster.ask(
            "POST",
            f"{core}/secrets",
            {"metadata": {"generateName": f"{self.name}-", "labels": {"for": self.name}}},
        )["metadata"]
        bound = {"kind": "Secret", "apiVersion": "v1", "name": secret["name"], "uid": secret["uid"]}
        asked = {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}
        answer = self.cluster.ask("POST", f"{core}/serviceaccounts/{self.name}/token", asked)
        temporary = self.token_file.with_suffix(".new")
        temporary.write_text(answer["status"]["token"], encoding="ascii")
        temporary.replace(self.token_file)
        if not self.kubeconfig.exists():
            config = yaml.safe_load(self.cluster.kubeconfig.read_text(encoding="utf-8"))
            config["users"] = [{"name": "user", "user": {"tokenFile": str(self.token_file)}}]
            config["contexts"][0]["context"] |= {"user": "user", "namespace": self.namespace}
            config["current-context"] = config["contexts"][0]["name"]
            self.kubeconfig.write_text(json.dumps(config), encoding="utf-8")

    def expire(self) -> None:
        """Let every token that was given so far expire; return when the server refuses (it remembers a good one for 10 s)."""
        core = f"/api/v1/namespaces/{self.namespace}/secrets"
        for secret in self.cluster.items(core, f"for={self.name}"):
            self.cluster.forget(f"{core}/{secret['metadata']['name']}")
        assert wait_until(lambda: not self.is_accepted()), "the server goes on to take the token"

    def is_accepted(self) -> bool:
        """Return whether the server knows who has the present token."""
        try:
            Kubernetes(self.kubeconfig).ask("GET", f"/api/v1/namespaces/{self.namespace}/pods")
        except ApiError as error:
            return error.status != http.HTTPStatus.UNAUTHORIZED
        return True


# --- starting and ending


def start_kubernetes(directory: Path, *options: str, private: bool, install: bool) -> Kubernetes:
    """Start a cluster (or join it) that lives no longer than this process."""
    start("kubernetes", directory, *options, install=install)
    return cluster_of(directory, private=private)


def cluster_of(directory: Path, *, private: bool = False) -> Kubernetes:
    """Return the cluster that is up in a directory."""
    words = [shlex.split(line)[1] for line in control("kubernetes", "env", directory=directory).splitlines()]
    found = dict(word.split("=", 1) for word in words)
    found["PATH"] = (
        f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"  # what a shell would have made of it
    )
    return Kubernetes(Path(found["KUBECONFIG"]), private=private, directory=directory, environment=found)


def share_kubernetes(config: pytest.Config) -> Iterator[Kubernetes]:
    """Start one cluster for a whole session of pytest and yield it to this worker, as a session's fixture does."""
    directory = session_folder(config, "kubernetes")
    install = "kubernetes" in required(config)
    # Kubelets of 1.20 lose lines when they rotate a log, which they do with one of 10 MiB within ten seconds.
    options = ("--nodes", "2", "--gpus", "4", "--log-max-size", "200Mi")
    yield needs(
        config, "kubernetes", lambda: start_kubernetes(directory, *options, private=False, install=install)
    )
    leave("kubernetes", directory)


def private_kubernetes(config: pytest.Config, *options: str) -> Kubernetes:
    """Start a cluster that its tests may break, and end by `end_kubernetes`; options as of `ci/kubernetes up`."""
    directory = Path(tempfile.mkdtemp(prefix="mlhpc-kubernetes-"))
    install = "kubernetes" in required(config)
    return needs(
        config, "kubernetes", lambda: start_kubernetes(directory, *options, private=True, install=install)
    )


def end_kubernetes(cluster: Kubernetes) -> None:
    """Take a private cluster down, whatever else uses it."""
    assert cluster.directory is not None
    control("kubernetes", "down", "--purge", directory=cluster.directory)


def given_kubernetes(environment: Mapping[str, str]) -> Kubernetes | None:
    """Return the cluster that the caller has up.

    MLHPC_TEST_KUBERNETES names the directory of one of `ci/kubernetes`, MLHPC_TEST_KUBECONFIG the kubeconfig of any other
    one; KUBECONFIG counts where `ci/kubernetes env` set it. Any other KUBECONFIG is a site's: tests make nothing there.
    """
    if other := environment.get("MLHPC_TEST_KUBECONFIG"):
        variables = {"KUBECONFIG": other, "MLHPC_TEST_NAMESPACE": "default"}
        return Kubernetes(Path(other), environment=variables)
    named, config = environment.get("MLHPC_TEST_KUBERNETES"), environment.get("KUBECONFIG")
    directory = Path(named) if named else Path(config).parent if config else None
    if directory is None or not (directory / "pids/kube-apiserver").exists():
        return None
    return cluster_of(directory)


# --- what a test left


def clear_away(cluster: Kubernetes, namespaces: list[str], *, limit_s: float = LIMIT_S) -> list[str]:
    """Return what of ours a test left in its namespaces (in a private cluster: in any), in sentences.

    The garbage collector works every few seconds, but stands still for a minute and more when kinds of objects were added: other
    tests do that. What is being deleted is gone as far as the test goes. What is left is left to the deletion of the namespace.
    """
    if cluster.private and cluster.directory is not None:
        daemons = {entry.name for entry in (cluster.directory / "pids").glob("[!.]*")} - {"watcher"}
        if not daemons:
            return []  # the test took it down
        for name in _CONTROL_PLANE:  # what tells, and what collects; nodes may stay broken
            if not cluster.runs(name):
                cluster.start(name)
    scopes = [""] if cluster.private else [f"namespaces/{name}" for name in namespaces]
    if not scopes:
        return []

    def left() -> list[str]:
        return [line for scope in scopes for line in _ours(cluster, scope)]

    wait_until(lambda: not left(), limit_s)
    return left()


def _ours(cluster: Kubernetes, scope: str) -> list[str]:
    found = []
    for path in [*_NAMESPACED, *_custom(cluster)]:
        for thing in cluster.items(path.format(scope).replace("//", "/"), OURS):
            facts = thing["metadata"]
            if "deletionTimestamp" not in facts:
                kind = path.rpartition("/")[2]
                state = thing.get("status", {}).get("phase", "")
                found.append(
                    f"{kind}/{facts['name']}{f' ({state})' if state else ''} in {facts['namespace']}"
                )
    return found


def _custom(cluster: Kubernetes) -> list[str]:
    definitions = cluster.items("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    return [
        f"/apis/{one['spec']['group']}/{version['name']}/{{}}/{one['spec']['names']['plural']}"
        for one in definitions
        for version in one["spec"]["versions"]
        if one["spec"]["scope"] == "Namespaced" and version["storage"] and version["served"]
    ]
