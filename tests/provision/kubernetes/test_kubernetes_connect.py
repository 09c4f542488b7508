"""Connections by a kubeconfig or a pod's account: what is read, what is refused, and that no secret is quoted."""

import base64
import contextlib
import io
import json
import logging
import ssl
import subprocess
import sys
from pathlib import Path

import certifi
import pytest
from certificates import certificate, chain
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_wire import Scripted, kubeconfig
from odd_values import changed
from urllib3.util import ssl_

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.client import Access, Login
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.errors import ApiCall, Unauthorized, Unavailable
from pytest_mlhpc.provision.kubernetes.objects import POD

LIST = {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def serve(closing):
    """Start a server; return it and its URL."""

    def go(answer=lambda asked: asked.answer(LIST)):
        server = closing(Scripted(answer))
        return server, f"http://127.0.0.1:{server.port}"

    return go


@pytest.fixture
def connected(closing):
    return lambda environ=None, **settings: closing(connect(environ=environ or {}, **settings))


@pytest.fixture
def config(tmp_path):
    """Write a kubeconfig; return its path."""
    return lambda *words, **cluster: str(kubeconfig(tmp_path / "config", *(words or [NOBODY]), **cluster))


def test_the_kubeconfig_that_is_named_wins_over_the_variable(connected, config, tmp_path):
    environ = {"KUBECONFIG": str(kubeconfig(tmp_path / "other", "http://127.0.0.2:9"))}
    servers = connected(environ, kubeconfig=config()).server, connected(environ).server
    assert servers == (NOBODY, "http://127.0.0.2:9")


def test_the_home_directory_is_the_last_place(connected, tmp_path):
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube/config", NOBODY)
    for settings in ({}, {"kubeconfig": "~/.kube/config"}):
        assert connected({"HOME": str(tmp_path)}, **settings).server == NOBODY


def test_several_files_are_one_configuration(connected, config, tmp_path):
    whole = json.loads(Path(config()).read_text())
    (tmp_path / "a").write_text(json.dumps({**whole, "users": [], "clusters": []}))
    (tmp_path / "b").write_text(json.dumps({**whole, "contexts": []}))
    assert connected({"KUBECONFIG": f"{tmp_path}/a:{tmp_path}/none:{tmp_path}/b"}).server == NOBODY


@pytest.mark.parametrize(("asked", "namespace"), [({"namespace": "theirs"}, "theirs"), ({}, "mine")])
def test_the_namespace_is_the_one_asked_for_else_that_of_the_context(connected, config, asked, namespace):
    assert connected(kubeconfig=config(), **asked).namespace == namespace


def test_the_token_is_sent_and_never_logged(serve, connected, config, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    server, url = serve()
    connected(kubeconfig=config(url)).list(POD)
    headers = server.asked[0].headers
    assert headers["authorization"] == "Bearer secret-token"
    assert headers["user-agent"].startswith("pytest-mlhpc/")
    assert "secret-token" not in caplog.text + "".join(capfd.readouterr())


def test_a_token_file_may_end_with_a_newline(serve, connected, config, tmp_path):
    (tmp_path / "token").write_text("from-file\n")
    server, url = serve()
    connected(kubeconfig=config(url, {"tokenFile": "token"})).list(POD)
    assert server.asked[0].headers["authorization"] == "Bearer from-file"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_no_proxy_of_the_environment_is_asked_for_loopback(serve, connected, config, monkeypatch, variable):
    monkeypatch.setenv(variable, NOBODY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert connected(kubeconfig=config(serve()[1])).list(POD).items == ()


def test_a_proxy_that_the_kubeconfig_names_is_used(serve, connected, config):
    assert connected(kubeconfig=config(**{"proxy-url": serve()[1]})).list(POD).items == ()


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({"as": "bob"}, ["impersonate-user: bob"]),
        (
            {"as": "bob", "as-uid": "7", "as-groups": ["ops", "dev"]},
            [
                "impersonate-user: bob",
                "impersonate-uid: 7",
                "impersonate-group: ops",
                "impersonate-group: dev",
            ],
        ),
        (
            {"as": "system:serviceaccount:ns:x", "as-user-extra": {"Scopes/a": ["view", "edit"]}},
            [
                "impersonate-user: system:serviceaccount:ns:x",
                "impersonate-extra-scopes%2fa: view",
                "impersonate-extra-scopes%2fa: edit",
            ],
        ),
    ],
    ids=["a user", "groups and uid", "extra"],
)
def test_who_is_to_be_impersonated_is_said_with_each_request(serve, connected, config, keys, sent):
    heads = []

    def answer(asked):
        heads.append([line for line in map(str.lower, asked.lines) if line.startswith("impersonate")])
        return asked.answer(LIST)

    api = connected(kubeconfig=config(serve(answer)[1], {"token": "secret-token", **keys}))
    api.list(POD)
    api.list(POD)
    assert heads == [sent, sent]


def test_a_certificate_that_lacks_what_rfc_5280_demands_is_taken_as_by_kubectl(
    closing, connected, config, tmp_path, monkeypatch
):
    def strict(*words, **more):
        """Make a context as urllib3 does on Python 3.13 and later."""
        context = lenient(*words, **more)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    lenient = ssl_.create_urllib3_context
    monkeypatch.setattr(ssl_, "create_urllib3_context", strict)
    tls, trusted = chain(tmp_path)
    server = closing(Scripted(lambda asked: asked.answer(LIST), tls))
    api = connected(
        kubeconfig=config(f"https://127.0.0.1:{server.port}", **{"certificate-authority": str(trusted)})
    )
    assert api.list(POD).items == ()


# --- what is refused


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"as-groups": ["ops"]}, "Impersonate-Group needs a user to impersonate, and `as` is missing"),
        ({"as": "bob\r\nX: y"}, "Impersonate-User cannot be 'bob.*y': it is no printable text"),
        ({"as": {"a": 1}}, "Impersonate-User cannot be {'a': 1}"),
        ({"as": "bob", "as-groups": [7]}, "Impersonate-Group cannot be 7"),
        ({"as": "bob", "as-user-extra": "x"}, "`as-user-extra` is no mapping"),
    ],
)
def test_an_impersonation_that_cannot_be_sent_is_refused(connected, config, keys, text):
    with pytest.raises(UsageError, match=text):
        connected(kubeconfig=config(NOBODY, {"token": "secret-token", **keys}))


@pytest.mark.parametrize(
    ("proxy", "text"),
    [
        (
            "socks5://user:secret@127.0.0.1:1080",
            "`proxy-url` names a SOCKS5 proxy; only http:// and https://",
        ),
        ("socks4a://127.0.0.1:1080", "names a SOCKS4A proxy"),
        ("127.0.0.1:1080", "names what is no URL"),
        ("gopher://proxy", "names a GOPHER proxy"),
    ],
)
@pytest.mark.parametrize("server", [NOBODY, "https://127.0.0.1:9"])
def test_a_proxy_that_is_none_of_http_is_refused_without_its_password(connected, config, proxy, text, server):
    with pytest.raises(UsageError, match=text) as error:
        connected(kubeconfig=config(server, **{"proxy-url": proxy}))
    assert "secret" not in str(error.value)


def test_a_socks_proxy_of_the_environment_is_refused_but_for_servers_that_bypass_it(
    connected, config, monkeypatch
):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "socks5h://127.0.0.1:1080")
    path = config("https://cluster.test:6443")
    with pytest.raises(UsageError, match="the environment names a SOCKS5H proxy"):
        connected(kubeconfig=path)
    monkeypatch.setenv("NO_PROXY", "cluster.test")
    assert connected(kubeconfig=path).server == "https://cluster.test:6443"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be used"),
        ("[1, 2", "cannot be used"),
        ("just text", "cannot be used"),
        ('{"contexts": 7}', "cannot be used"),
        ('{"contexts": [], "clusters": [], "users": []}', "no current context"),
        ("\x00\xff", "cannot be used"),
        (None, "there is no kubeconfig .*/damaged: set `kubeconfig`"),
    ],
)
def test_a_kubeconfig_that_is_damaged_or_missing_is_named(connected, tmp_path, content, words):
    path = tmp_path / "damaged"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=words) as error:
        connected(kubeconfig=str(path))
    assert str(path) in str(error.value)


def test_without_any_kubeconfig_the_text_says_where_one_may_be(connected, tmp_path):
    text = r"set `kubeconfig` of the partition or KUBECONFIG, or make .*/\.kube/config"
    with pytest.raises(UsageError, match=text):
        connected({"HOME": str(tmp_path)})


def test_a_misspelt_context_is_answered_with_the_nearest(connected, config):
    with pytest.raises(UsageError, match=r"no context 'mian' \(did you mean 'main'\?\); it has main"):
        connected(kubeconfig=config(), context="mian")


@pytest.mark.parametrize("clusters", [[], [{"name": "c", "cluster": {}}]], ids=["no cluster", "no server"])
def test_a_context_without_cluster_is_refused_without_its_token(connected, config, clusters):
    path = Path(config())
    path.write_text(json.dumps({**json.loads(path.read_text()), "clusters": clusters}))
    with pytest.raises(UsageError, match="names cluster 'c', which") as error:
        connected(kubeconfig=str(path))
    assert "secret-token" not in str(error.value)


@pytest.mark.parametrize(
    "user",
    [
        {"token": "secret\ntoken"},
        {"token": "secret\u00e9token"},
        {"client-certificate": "/none", "client-key": "/none", "password": "secret"},
        {"client-certificate-data": "secret!", "client-key-data": "secret!"},
        {"auth-provider": {"name": "gcp", "secret": "secret"}},
    ],
)
def test_unusable_credentials_are_refused_and_not_quoted(connected, config, user):
    with pytest.raises(UsageError, match=r"cannot be used|log in again") as error:
        connected(kubeconfig=config("https://127.0.0.1:9", user))
    assert "secret" not in str(error.value)


def test_nothing_of_a_client_certificate_stays_on_disk(connected, config, tmp_path, monkeypatch):
    certificate(tmp_path)
    files = {"client-certificate-data": "certificate.pem", "client-key-data": "key.pem"}
    user = {name: base64.b64encode((tmp_path / file).read_bytes()).decode() for name, file in files.items()}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    connected(kubeconfig=config("https://127.0.0.1:9", user))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_credentials_that_vanish_are_reported_with_the_refusal(serve, connected, config):
    path = config(serve(lambda asked: asked.refuse(401, "token expired"))[1])
    api = connected(kubeconfig=path)
    Path(path).unlink()
    with pytest.raises(Unauthorized, match="token expired; there is no kubeconfig"):
        api.list(POD)


# --- plug-ins


@pytest.fixture
def plugin(tmp_path):
    """Write a credential plug-in; return the user of a kubeconfig that it is for."""

    def write(body, **changes):
        (tmp_path / "plugin.py").write_text(f"import json, os, sys, time\n{body}\n")
        command = {"command": sys.executable, "args": [str(tmp_path / "plugin.py")], **changes}
        version = "client.authentication.k8s.io/v1"
        return {"exec": {"apiVersion": version, "env": [{"name": "X", "value": "y"}], **command}}

    return write


PRINTS = """
count = os.path.join(os.path.dirname(__file__), "count")
number = len(open(count).read()) if os.path.exists(count) else 0
open(count, "a").write("x")
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert os.environ["X"] == "y" and info["kind"] == "ExecCredential" and info["spec"]["interactive"] is False
assert sys.stdin.read() == ""
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": f"token-{number}"}}))
"""


def test_a_plugin_gives_the_token_and_is_asked_again_once_it_is_not_taken(
    serve, connected, config, plugin, tmp_path
):
    def answer(asked):
        taken = asked.headers["authorization"] == "Bearer token-1"
        asked.answer(LIST) if taken else asked.refuse(401, "Unauthorized")

    api = connected(kubeconfig=config(serve(answer)[1], plugin(PRINTS)))
    api.list(POD)
    api.list(POD)
    assert (tmp_path / "count").read_text() == "xx"


HANGS = "import subprocess; subprocess.Popen(['sleep', '600']); time.sleep(600)"


@pytest.mark.parametrize(
    ("body", "changes", "words"),
    [
        ("print('secret'); sys.exit('please log in first')", {}, "exit code 1: please log in first"),
        ("print('secret')", {}, "printed no credentials"),
        ("print(json.dumps({'status': {'secret': 1}}))", {}, "printed no credentials"),
        ("print('[' * 100000)", {}, "printed no credentials"),
        pytest.param(
            "", {"command": "no-such-plugin", "installHint": "get it from the help desk"},
            r"no-such-plugin cannot be started: .*\. get it from the help desk", id="not installed",
        ),
    ],
)  # fmt: skip
def test_a_failing_plugin_is_quoted_by_its_errors_but_not_its_output(
    connected, config, plugin, *, body, changes, words
):
    with pytest.raises(UsageError, match=words) as error:
        connected({"PATH": "/usr/bin"}, kubeconfig=config(NOBODY, plugin(body, **changes)))
    assert "secret" not in str(error.value)


def test_a_plugin_that_hangs_is_killed_with_all_that_it_started(connected, config, plugin, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.kubernetes.connect.PLUGIN_LIMIT_S", 0.5)
    with pytest.raises(UsageError, match=r"did not end within 0\.5 s"):
        connected(kubeconfig=config(NOBODY, plugin(HANGS)))  # the fixture `nothing_left` sees to the rest


# --- in a pod


@pytest.fixture
def account(tmp_path):
    folder = tmp_path / "account"
    folder.mkdir()
    files = {"token": "pod-token\n", "namespace": "theirs", "ca.crt": Path(certifi.where()).read_text()}
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


IN_POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "9", "HOME": "/nonexistent"}


def test_in_a_pod_its_account_is_used(connected, account):
    api = connected(IN_POD, account=account)
    assert (api.server, api.namespace) == ("https://127.0.0.1:9", "theirs")
    with pytest.raises(Unavailable, match="Connection refused"):
        api.version()


def test_a_context_means_nothing_in_a_pod(connected, account):
    with pytest.raises(UsageError, match="so no context 'main'"):
        connected(IN_POD, account=account, context="main")


def test_an_account_without_token_is_refused(connected, account):
    (account / "token").unlink()
    with pytest.raises(UsageError, match=f"the account of this pod in {account} cannot be used: .*token"):
        connected(IN_POD, account=account)


def test_the_official_client_is_not_imported_before_a_connection():
    parts = ("errors", "objects", "connect", "watch", "log_follower", "client")
    program = "; ".join(f"import pytest_mlhpc.provision.kubernetes.{part}" for part in parts)
    program += "; import sys; sys.exit('kubernetes' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@given(st.data())
def test_any_value_in_any_place_of_a_kubeconfig_gives_a_server_or_is_refused_in_words(tmp_path, data):
    user = {"token": "x", "as": "bob", "as-groups": ["ops"], "as-user-extra": {"scope": ["view"]}}
    path = kubeconfig(tmp_path / "config", NOBODY, user, **{"proxy-url": NOBODY})
    path.write_text(json.dumps(data.draw(changed(json.loads(path.read_text())))))
    try:
        found = connect(kubeconfig=str(path), environ={"HOME": str(tmp_path)})
    except UsageError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right
    else:
        found.close()


# --- credentials that are read again


CALL = ApiCall("list", "pods", "", "ns", "https://one.test")


def access(server="https://one.test", authority="a"):
    return Access(io.BytesIO(), server, "ns", authority)


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        pytest.param(access(), True, id="of the same server"),
        pytest.param(access("https://two.test"), False, id="of another server"),
        pytest.param(access(authority="b"), False, id="of another authority"),
    ],
)
def test_only_credentials_of_the_same_cluster_are_taken(other, taken):
    old = access()
    login = Login(iter((old, other)).__next__)
    text = r"the kubeconfig leads to another cluster, https://.*, now"
    with contextlib.nullcontext() if taken else pytest.raises(Unauthorized, match=text):
        login.renew(old, CALL, OSError("401"))
    assert login.access is (other if taken else old)
