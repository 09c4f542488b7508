"""From a kubeconfig, or from within a pod, to a server that can be asked."""

from __future__ import annotations

import base64
import hashlib
import importlib
import ipaddress
import re
import ssl
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.provision.kubernetes.api import CALL_LIMIT_S

if TYPE_CHECKING:
    from kubernetes.client import Configuration

    from pytest_mlhpc.provision.kubernetes.login import Access
    from pytest_mlhpc.provision.kubernetes.rest import RestApi

#: Where a pod finds its account (Kubernetes: "Accessing the Kubernetes API from a Pod").
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Connections that are kept open for the next request; watches and logs have their own and do not count.
KEPT_CONNECTIONS = 16


def connect(
    *,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    environ: Mapping[str, str],
    account: Path = ACCOUNT,
    limit_s: float = CALL_LIMIT_S,
) -> RestApi:
    """Return the server that a kubeconfig names, or the one of the pod that we are in. Nothing is asked of it yet.

    Like kubectl: *kubeconfig*, else ``KUBECONFIG`` (several, with ``:`` between), else ``~/.kube/config``, else the
    account of the pod. Files are never written. Credentials are read again when the server no longer takes them.

    Args:
        kubeconfig: path of a file, ``~`` allowed.
        context: of the kubeconfig; empty: its current one.
        namespace: empty: that of the context, else ``default``.
        environ: the process's environment.
        account: folder of the pod's account.
        limit_s: time limit of a call, in seconds.

    Raises:
        UsageError: there is no such file or context, or it cannot be used, or the client is not installed; secrets are
            not quoted.
    """
    try:
        from pytest_mlhpc.provision.kubernetes.login import Login
        from pytest_mlhpc.provision.kubernetes.rest import RestApi
        from pytest_mlhpc.provision.kubernetes.transport import Transport

        importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise UsageError(
            f"Kubernetes needs its official client, which cannot be imported here ({error}): "
            "pip install 'pytest-mlhpc[kubernetes]'"
        ) from error

    login = Login(_loader(kubeconfig, context, environ, account))
    return RestApi(Transport(login, limit_s), namespace)


def _loader(kubeconfig: str, context: str, environ: Mapping[str, str], account: Path) -> Callable[[], Access]:
    default = Path(environ.get("HOME") or "~", ".kube", "config").expanduser()
    paths = kubeconfig or environ.get("KUBECONFIG", "") or (str(default) if default.is_file() else "")
    if paths:
        home = environ.get("HOME")
        files = [_at_home(path, home) for path in paths.split(":") if path]
        return partial(_from_files, tuple(files), context, environ)
    if environ.get("KUBERNETES_SERVICE_HOST"):
        if context:
            raise UsageError(
                f"there is no kubeconfig, so no context {context!r}: leave it away, or set `kubeconfig`"
            )
        return partial(_from_pod, environ, account)
    raise UsageError(
        f"there is no kubeconfig: set `kubeconfig` of the partition or KUBECONFIG, or make {default}; this is no pod either"
    )


def _from_files(paths: tuple[str, ...], context: str, environ: Mapping[str, str]) -> Access:
    import yaml
    from kubernetes.client import Configuration
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    shown = ":".join(paths)
    configuration = Configuration()
    # The client writes certificates and keys to files for OpenSSL; they are read at once and vanish with the folder.
    with tempfile.TemporaryDirectory(prefix="mlhpc-tls-") as folder:
        try:
            merged = KubeConfigMerger(":".join(paths)).config
            if merged is None:
                raise UsageError(
                    f"there is no kubeconfig {shown}: set `kubeconfig` of the partition or KUBECONFIG"
                )
            chosen, cluster, user = _chosen(merged.value, context, shown)
            _take_plugin(user, cluster, environ)
            # None: paths in a file begin where that file lies.
            loader = KubeConfigLoader(
                merged, active_context=chosen["name"], config_base_path=None, temp_file_path=folder
            )
            loader.load_and_set(configuration)
            return _access(configuration, str(chosen["context"].get("namespace") or "default"))
        except (
            ConfigException,
            yaml.YAMLError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            # Its texts may go on with the whole entry, token included.
            words = (
                str(error).partition("{")[0]
                if isinstance(error, ConfigException | OSError)
                else type(error).__name__
            )
            raise UsageError(f"kubeconfig {shown} cannot be used: {words}") from None


def _chosen(config: Mapping[str, Any], context: str, shown: str) -> tuple[Any, Any, Any]:
    """Return the context's entry, and those of its cluster and user (None if it names none) with the file they are from."""
    contexts, clusters, users = (
        {one["name"]: one for one in config[part]} for part in ("contexts", "clusters", "users")
    )
    name = context or str(config.get("current-context") or "")
    if name not in contexts:
        hint = f" (did you mean {near!r}?)" if (near := nearest(name, contexts)) else ""
        known = ", ".join(sorted(contexts)) or "none at all"
        wanted = f"no context {name!r}{hint}" if name else "no current context: set `context`"
        raise UsageError(f"kubeconfig {shown} has {wanted}; it has {known}")
    found = contexts[name].value["context"]
    cluster = clusters.get(found.get("cluster"))
    if cluster is None or not cluster.value["cluster"].get("server"):
        lacks = "which it lacks" if cluster is None else "which has no `server`"
        raise UsageError(
            f"kubeconfig {shown}: context {name!r} names cluster {found.get('cluster')!r}, {lacks}"
        )
    return contexts[name].value, cluster, users.get(found.get("user"))


def _take_plugin(user: Any, cluster: Any, environ: Mapping[str, str]) -> None:
    """Put what a plug-in says in its place: the client itself would wait for it for ever, and hide its errors."""
    from pytest_mlhpc.provision.kubernetes.exec_plugin import credentials

    entry = user.value["user"] if user is not None else None
    if not isinstance(entry, dict) or not isinstance(entry.get("exec"), dict) or entry.get("token"):
        return
    directory = str(Path(user.path or ".").absolute().parent)
    status = credentials(entry.pop("exec"), cluster.value["cluster"], directory, environ)
    if status.get("token"):
        entry["token"] = status["token"]
    else:
        entry["client-certificate-data"] = base64.b64encode(status["clientCertificateData"].encode()).decode()
        entry["client-key-data"] = base64.b64encode(status["clientKeyData"].encode()).decode()


def _from_pod(environ: Mapping[str, str], account: Path) -> Access:
    from kubernetes.client import Configuration
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader

    configuration = Configuration()
    try:
        InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), environ=environ).load_and_set(
            configuration
        )
        namespace = (account / "namespace").read_text().strip()
        return _access(configuration, namespace or "default")
    except (ConfigException, OSError, ValueError) as error:
        raise UsageError(f"the account of this pod in {account} cannot be used: {error}") from None


def _access(configuration: Configuration, namespace: str) -> Access:
    """Return an ApiClient that never tries again by itself, follows no redirect, and holds no key in a file."""
    from kubernetes.client import ApiClient
    from kubernetes.utils.keepalive import tcp_keepalive_socket_options

    from pytest_mlhpc.provision.kubernetes.line import hold_connections
    from pytest_mlhpc.provision.kubernetes.login import Access

    server = configuration.host
    _clean_token(configuration)
    configuration.refresh_api_key_hook = None  # it would run plug-ins and read files unasked; see Transport
    configuration.retries = False
    configuration.connection_pool_maxsize = KEPT_CONNECTIONS
    # A dead peer under an idle watch is found after 30 s + 4 * 15 s.
    configuration.socket_options = tcp_keepalive_socket_options(count=4)
    if _is_loopback(server) and not _names_proxy(configuration):
        configuration.proxy = None
    context = _tls(configuration) if server.startswith("https:") else None
    client = ApiClient(configuration)
    client.user_agent = f"pytest-mlhpc/{metadata.version('pytest-mlhpc')}"
    manager = client.rest_client.pool_manager
    hold_connections(manager)
    if context is not None:
        for key in ("ca_certs", "cert_file", "key_file", "ca_cert_data"):
            manager.connection_pool_kw.pop(key, None)
        manager.connection_pool_kw["ssl_context"] = context
    return Access(client, server, namespace, _authority(configuration))


def _authority(configuration: Configuration) -> str:
    """Return the SHA-256 of the certificates that a server is known by, however they are written; empty: the system's."""
    if not configuration.ssl_ca_cert:
        return ""
    text = Path(configuration.ssl_ca_cert).read_text(encoding="ascii", errors="replace")
    found = re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", text, re.DOTALL)
    certificates = sorted("".join(one.split()) for one in found)
    return hashlib.sha256("\n".join(certificates).encode()).hexdigest()


def _clean_token(configuration: Configuration) -> None:
    """Take the newline away with which token files end; a token that no header may hold would be quoted by the refusal."""
    token = configuration.api_key.get("BearerToken")
    if token is None:
        return
    configuration.api_key["BearerToken"] = token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise UsageError(
            "the token of the kubeconfig or of its token file has characters that no token has: log in again"
        )


def _tls(configuration: Configuration) -> ssl.SSLContext:
    """Return one context for all connections, with everything read: reading files for each would need them to stay."""
    from urllib3.util.ssl_ import create_urllib3_context

    context = create_urllib3_context(
        cert_reqs=ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE
    )
    if configuration.ssl_ca_cert:
        context.load_verify_locations(cafile=configuration.ssl_ca_cert)
    elif configuration.verify_ssl:
        context.load_default_certs()
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _at_home(path: str, home: str | None) -> str:
    return str(Path(home, path[2:])) if home and path.startswith("~/") else path


def _names_proxy(configuration: Configuration) -> bool:
    """Whether the kubeconfig itself names a proxy (``proxy-url``), rather than a variable of the environment."""
    return not configuration._proxy_from_env  # noqa: SLF001 - it tells nowhere else


def _is_loopback(url: str) -> bool:
    """Whether *url* is of this machine: no proxy on another one could reach it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
