"""Who may talk to the API: certificates, users with their tokens, and their kubeconfigs."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError

from testkubernetes.settings import MOST_NODES, Settings, node_name


@dataclass(frozen=True)
class User:
    """One line of the API server's token file."""

    name: str
    groups: tuple[str, ...] = ()
    #: What its kubeconfig is called, if it is for those outside.
    kubeconfig: str = ""


USERS = {
    "admin": User("admin", ("system:masters",), "kubeconfig"),
    # Without any right; a test gives `mlhpc` those of the documented Role, and nobody anything to `limited`.
    "limited": User("limited", (), "kubeconfig-limited"),
    "mlhpc": User("mlhpc", (), "kubeconfig-mlhpc"),
    "controller-manager": User("system:kube-controller-manager", ("system:masters",)),
    "scheduler": User("system:kube-scheduler"),
    "probe": User("system:mlhpc-probe", ("system:masters",)),
    **{
        f"node{number}": User(f"system:node:{node_name(number)}", ("system:nodes",))
        for number in range(1, MOST_NODES + 1)
    },
}


def make(directory: Path, settings: Settings) -> None:
    """Write certificates, the token file and all kubeconfigs; what is there is replaced."""
    folder = directory / "pki"
    folder.mkdir(mode=0o700, exist_ok=True)
    _certify(
        folder,
        "ca",
        "/CN=mlhpc-test-ca",
        "basicConstraints=critical,CA:TRUE",
        "keyUsage=critical,keyCertSign,cRLSign",
    )
    names = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"
    _certify(
        folder, "apiserver", "/CN=kube-apiserver", f"subjectAltName={names}", "extendedKeyUsage=serverAuth"
    )
    _certify(
        folder,
        "kubelet-client",
        "/O=system:masters/CN=kube-apiserver-kubelet-client",
        "extendedKeyUsage=clientAuth",
    )
    tokens = {key: secrets.token_hex(16) for key in USERS}
    lines = [f'{tokens[key]},{user.name},{key},"{",".join(user.groups)}"\n' for key, user in USERS.items()]
    _write(folder / "tokens.csv", "".join(lines))
    for key, user in USERS.items():
        path = directory / user.kubeconfig if user.kubeconfig else folder / f"{key}.kubeconfig"
        _write(path, kubeconfig(folder / "ca.crt", settings.server, tokens[key]))


def kubeconfig(authority: Path, server: str, token: str) -> str:
    """Return the text of a kubeconfig; JSON is YAML."""
    certificate = base64.b64encode(authority.read_bytes()).decode()
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "mlhpc",
            "clusters": [
                {"name": "mlhpc", "cluster": {"server": server, "certificate-authority-data": certificate}}
            ],
            "contexts": [{"name": "mlhpc", "context": {"cluster": "mlhpc", "user": "user", "namespace": "default"}}],
            "users": [{"name": "user", "user": {"token": token}}],
        },
        indent=1,
    )  # fmt: skip


def token_of(directory: Path, key: str) -> str:
    """Return the token of one of USERS.

    Raises:
        ClusterError: The cluster has none; it never came up.
    """
    try:
        lines = (directory / "pki/tokens.csv").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for token, _, uid in (line.split(",")[:3] for line in lines):
        if uid == key:
            return token
    raise ClusterError(f"no user {key} in {directory}; `ci/kubernetes up` starts a cluster there")


def _certify(folder: Path, name: str, subject: str, *extensions: str) -> None:
    """Make a key and its certificate, signed by ``ca`` unless it is that."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    # `req -x509` takes extensions from a file alone when the signer is another one, and that file by any name.
    config = folder / f"{name}.cnf"
    text = "\n".join(
        ["[req]", "distinguished_name=dn", "x509_extensions=own", "[dn]", "[own]", *extensions, ""]
    )
    config.write_text(text, encoding="ascii")
    signer = [] if name == "ca" else ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    argv = [
        "openssl", "req", "-x509", "-config", str(config), "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-subj", subject, "-days", "3650", "-keyout", str(key), "-out", str(certificate), *signer,
    ]  # fmt: skip
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise ClusterError(f"openssl cannot make {certificate}: {done.stderr.strip()[-500:]}")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_text(text, encoding="ascii")
    temporary.replace(path)
