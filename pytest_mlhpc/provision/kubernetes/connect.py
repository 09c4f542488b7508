"""Connect to a Kubernetes API server: kubeconfig, a pod's service account, TLS, and credential plug-ins.

Open it when a kubeconfig that works with kubectl does not work here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import re
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import copy_of, run_to_end
from pytest_mlhpc.provision.kubernetes.errors import one_line

if TYPE_CHECKING:
    from kubernetes.client import Configuration

    from pytest_mlhpc.provision.kubernetes.client import Access, KubernetesClient


#: Time limit of one call, in seconds; an API server ends a request after 60 s.
CALL_LIMIT_S = 30.0

#: A pod's service account (Kubernetes: "Accessing the Kubernetes API from a Pod").
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Idle connections that stay open; watches and logs do not count.
POOL_SIZE = 16

#: Time limit of a credential plug-in, in seconds; some ask a remote server.
PLUGIN_LIMIT_S = 60.0


def connect(
    *,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    environ: Mapping[str, str],
    account: Path = ACCOUNT,
    limit_s: float = CALL_LIMIT_S,
) -> KubernetesClient:
    """Return a client of the server that a kubeconfig names, or of the pod's own cluster. Nothing is sent yet.

    Like kubectl: *kubeconfig*, else ``KUBECONFIG`` (several, separated by ``:``), else ``~/.kube/config``, else the
    pod's service account. Files are never written. Credentials are read again when the server rejects them.

    Args:
        kubeconfig: path of a file, ``~`` allowed.
        context: of the kubeconfig; empty: its current one.
        namespace: empty: that of the context, else ``default``.
        environ: the process's environment.
        account: folder of the pod's service account.
        limit_s: time limit of a call, in seconds.

    Raises:
        UsageError: no such file or context, an unusable one, or no official client installed. Secrets are not quoted.
    """
    try:
        from pytest_mlhpc.provision.kubernetes.client import KubernetesClient, Login

        importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise UsageError(
            f"Kubernetes needs its official client, which cannot be imported here ({error}): "
            "pip install 'pytest-mlhpc[kubernetes]'"
        ) from error

    return KubernetesClient(Login(_loader(kubeconfig, context, environ, account)), limit_s, namespace)


def _loader(kubeconfig: str, context: str, environ: Mapping[str, str], account: Path) -> Callable[[], Access]:
    # A user without a home has no such file, and `~` stays in its name.
    default = Path(environ.get("HOME") or os.path.expanduser("~"), ".kube", "config")  # noqa: PTH111
    paths = kubeconfig or environ.get("KUBECONFIG", "") or (str(default) if default.is_file() else "")
    if paths:
        home = environ.get("HOME")
        files = [_expand_home(path, home) for path in paths.split(":") if path]
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
            chosen, cluster, user = _choose_context(merged.value, context, shown)
            _resolve_plugin(user, cluster, environ)
            impersonated = _impersonation(user.value["user"], shown) if user is not None else ()
            # None: paths in a file begin where that file lies.
            loader = KubeConfigLoader(
                merged, active_context=chosen["name"], config_base_path=None, temp_file_path=folder
            )
            loader.load_and_set(configuration)
            return _access(
                configuration, str(chosen["context"].get("namespace") or "default"), shown, impersonated
            )
        except (
            ConfigException,
            yaml.YAMLError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            # The text may contain the whole entry, token included.
            message = (
                str(error).partition("{")[0]
                if isinstance(error, ConfigException | OSError)
                else type(error).__name__
            )
            raise UsageError(f"kubeconfig {shown} cannot be used: {message}") from None


def _choose_context(config: Mapping[str, Any], context: str, shown: str) -> tuple[Any, Any, Any]:
    """Return the context's entry, and those of its cluster and user with their files (None: no user)."""
    contexts, clusters, users = (
        {one["name"]: one for one in config[part]} for part in ("contexts", "clusters", "users")
    )
    name = context or str(config.get("current-context") or "")
    if name not in contexts:
        hint = f" (did you mean {near!r}?)" if (near := nearest(name, contexts)) else ""
        known = ", ".join(sorted(contexts)) or "none at all"
        missing = f"no context {name!r}{hint}" if name else "no current context: set `context`"
        raise UsageError(f"kubeconfig {shown} has {missing}; it has {known}")
    found = contexts[name].value["context"]
    cluster = clusters.get(found.get("cluster"))
    if cluster is None or not cluster.value["cluster"].get("server"):
        lacks = "which it lacks" if cluster is None else "which has no `server`"
        raise UsageError(
            f"kubeconfig {shown}: context {name!r} names cluster {found.get('cluster')!r}, {lacks}"
        )
    return contexts[name].value, cluster, users.get(found.get("user"))


def _resolve_plugin(user: Any, cluster: Any, environ: Mapping[str, str]) -> None:
    """Replace a credential plug-in by its output: the official client has no time limit, and hides errors."""
    entry = user.value["user"] if user is not None else None
    if not isinstance(entry, dict) or not isinstance(entry.get("exec"), dict) or entry.get("token"):
        return
    directory = str(Path(user.path or ".").absolute().parent)
    status = plugin_credentials(entry.pop("exec"), cluster.value["cluster"], directory, environ)
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
        return _access(configuration, namespace or "default", f"of this pod in {account}")
    except (ConfigException, OSError, ValueError) as error:
        raise UsageError(f"the account of this pod in {account} cannot be used: {error}") from None


def _impersonation(user: Any, shown: str) -> tuple[tuple[str, str], ...]:
    """Return headers for ``as``, ``as-uid``, ``as-groups`` and ``as-user-extra`` of a kubeconfig's user.

    The official client ignores these keys, and would act with all rights of the credentials.
    """
    if not isinstance(user, dict):
        return ()
    headers = {"Impersonate-User": user.get("as"), "Impersonate-Uid": user.get("as-uid")}
    headers["Impersonate-Group"] = user.get("as-groups")
    extra = user.get("as-user-extra") or {}
    if not isinstance(extra, dict):
        raise UsageError(f"kubeconfig {shown}: `as-user-extra` is no mapping")
    headers |= {f"Impersonate-Extra-{quote(str(key).lower(), safe='')}": extra[key] for key in extra}
    found = []
    for header, values in headers.items():
        for value in values if isinstance(values, list) else [values]:
            if value is None or value == "":
                continue
            if not (isinstance(value, str) and value.isascii() and value.isprintable()):
                raise UsageError(
                    f"kubeconfig {shown}: {header} cannot be {value!r:.80}: it is no printable text"
                )
            found.append((header, value))
    if found and found[0][0] != "Impersonate-User":
        raise UsageError(
            f"kubeconfig {shown}: {found[0][0]} needs a user to impersonate, and `as` is missing"
        )
    return tuple(found)


def _access(
    configuration: Configuration,
    namespace: str,
    shown: str,
    impersonated: tuple[tuple[str, str], ...] = (),
) -> Access:
    """Return an ApiClient that neither retries nor follows redirects, and keeps no key in a file."""
    from kubernetes.client import ApiClient
    from kubernetes.utils.keepalive import tcp_keepalive_socket_options

    from pytest_mlhpc.config.http import track_connections
    from pytest_mlhpc.node.agents.nodes import is_loopback
    from pytest_mlhpc.provision.kubernetes.client import Access

    server = configuration.host
    _clean_token(configuration)
    configuration.refresh_api_key_hook = None  # it would run plug-ins and read files; see Login
    configuration.retries = False
    configuration.connection_pool_maxsize = POOL_SIZE
    # A dead peer under an idle watch is found after 30 s + 4 * 15 s.
    configuration.socket_options = tcp_keepalive_socket_options(count=4)
    if is_loopback(urlsplit(server).hostname or "") and not _names_proxy(configuration):
        configuration.proxy = None
    _check_proxy(configuration, shown)
    context = _tls(configuration) if server.startswith("https:") else None
    client = ApiClient(configuration)
    client.user_agent = f"pytest-mlhpc/{metadata.version('pytest-mlhpc')}"
    manager = client.rest_client.pool_manager
    track_connections(manager)
    if context is not None:
        for key in ("ca_certs", "cert_file", "key_file", "ca_cert_data"):
            manager.connection_pool_kw.pop(key, None)
        manager.connection_pool_kw["ssl_context"] = context
    return Access(client, server, namespace, _authority(configuration), impersonated)


def _check_proxy(configuration: Configuration, shown: str) -> None:
    """Refuse a proxy that is none of HTTP: connections that can be cancelled would go past a SOCKS proxy."""
    from kubernetes.client.rest import should_bypass_proxies

    proxy = configuration.proxy
    if not proxy or should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        return
    scheme, colon, rest = str(proxy).partition("://")
    if scheme.lower() not in {"http", "https"} or not rest:
        source = "`proxy-url`" if _names_proxy(configuration) else "the environment"
        named = f"a {scheme.upper()} proxy" if colon else "what is no URL"
        raise UsageError(
            f"kubeconfig {shown}: {source} names {named}; only http:// and https:// proxies can be used"
        )


def _authority(configuration: Configuration) -> str:
    """Return the SHA-256 of the CA certificates, however they are formatted; empty for the system's."""
    if not configuration.ssl_ca_cert:
        return ""
    text = Path(configuration.ssl_ca_cert).read_text(encoding="ascii", errors="replace")
    found = re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", text, re.DOTALL)
    certificates = sorted("".join(one.split()) for one in found)
    return hashlib.sha256("\n".join(certificates).encode()).hexdigest()


def _clean_token(configuration: Configuration) -> None:
    """Strip the token's newline. A token that no header can carry is refused without being quoted."""
    token = configuration.api_key.get("BearerToken")
    if token is None:
        return
    configuration.api_key["BearerToken"] = token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise UsageError(
            "the token of the kubeconfig or of its token file has characters that no token has: log in again"
        )


def _tls(configuration: Configuration) -> ssl.SSLContext:
    """Return one TLS context for all connections, with all files read."""
    from urllib3.util.ssl_ import create_urllib3_context

    context = create_urllib3_context(
        cert_reqs=ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE
    )
    # As kubectl: clusters have certificates without the extensions that RFC 5280 demands, which Python 3.13 refuses.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if configuration.ssl_ca_cert:
        context.load_verify_locations(cafile=configuration.ssl_ca_cert)
    elif configuration.verify_ssl:
        context.load_default_certs()
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _expand_home(path: str, home: str | None) -> str:
    return str(Path(home, path[2:])) if home and path.startswith("~/") else path


def _names_proxy(configuration: Configuration) -> bool:
    """Return whether the kubeconfig names a proxy (``proxy-url``), rather than an environment variable."""
    return not configuration._proxy_from_env  # noqa: SLF001 - it tells nowhere else


def plugin_credentials(
    config: Mapping[str, Any], cluster: Mapping[str, Any], directory: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run a credential plug-in (client.authentication.k8s.io) and return its ``status``.

    The status has ``token``, or a client certificate and its key in PEM.

    Args:
        config: the kubeconfig's ``exec`` entry.
        cluster: the cluster's entry, passed to plug-ins with ``provideClusterInfo``.
        directory: of the kubeconfig; a relative command starts there.
        environ: of this process.

    Raises:
        UsageError: it cannot be started, fails, or prints no credentials. Only its stderr is quoted.
    """
    command, version = config.get("command"), config.get("apiVersion")
    if not (isinstance(command, str) and command and isinstance(version, str)):
        raise UsageError("`exec` of the kubeconfig has no `command` or no `apiVersion`")
    argv = [command, *map(str, config.get("args") or [])]
    if os.sep in command:
        argv[0] = str(Path(directory, command))
    spec: dict[str, Any] = {"interactive": False}
    if config.get("provideClusterInfo"):
        spec["cluster"] = dict(cluster)
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    env = {
        **copy_of(environ),
        **_plugin_environment(config.get("env")),
        "KUBERNETES_EXEC_INFO": json.dumps(info),
    }
    out = _run_plugin(argv, env, directory or None, str(config.get("installHint") or ""))
    try:
        found = read_json(out)
        status = found["status"]
    except (ValueError, RecursionError, TypeError, KeyError):
        status = None
    if not isinstance(status, dict) or not (
        status.get("token") or (status.get("clientCertificateData") and status.get("clientKeyData"))
    ):
        raise UsageError(
            f"the credential plug-in {argv[0]} printed no credentials: run it by hand, or log in again"
        )
    return status


def _plugin_environment(listed: Any) -> dict[str, str]:
    entries = listed if isinstance(listed, list) else []
    return {
        str(one["name"]): str(one.get("value", ""))
        for one in entries
        if isinstance(one, dict) and "name" in one
    }


def _run_plugin(argv: list[str], env: Mapping[str, str], directory: str | None, hint: str) -> bytes:
    try:
        done = run_to_end(
            argv, PLUGIN_LIMIT_S, env=dict(env), cwd=directory
        )  # it has no terminal to ask for a password
    except OSError as error:
        more = f". {one_line(hint)}" if hint else ""
        raise UsageError(
            f"the credential plug-in {argv[0]} cannot be started: {error.strerror}{more}"
        ) from error
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the credential plug-in {argv[0]} did not end within {PLUGIN_LIMIT_S:g} s"
        ) from None
    if done.returncode:
        message = one_line(done.stderr.decode(errors="replace")) or "it printed no error"
        raise UsageError(
            f"the credential plug-in {argv[0]} ended with exit code {done.returncode}: {message}"
        )
    return done.stdout
