"""From a kubeconfig or a pod's account to a server: what is found, what is refused, and that no secret is told."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes_wire import Scripted, kubeconfig

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes import exec_plugin
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.errors import Unauthorized, Unavailable
from pytest_mlhpc.provision.kubernetes.resources import POD

LIST = {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}


@pytest.fixture
def server():
    found = Scripted(lambda asked: asked.answer(LIST))
    yield found
    found.close()


@pytest.fixture
def reach():
    made = []

    def go(environ=None, **wanted):
        api = connect(environ=environ or {}, **wanted)
        made.append(api)
        return api

    yield go
    for api in made:
        api.close()


def url(server):
    return f"http://127.0.0.1:{server.port}"


def test_the_kubeconfig_that_is_named_wins_over_the_variable(server, reach, tmp_path):
    named = kubeconfig(tmp_path / "named", url(server))
    other = kubeconfig(tmp_path / "other", "http://127.0.0.1:9")
    assert reach({"KUBECONFIG": str(other)}, kubeconfig=str(named)).server == url(server)
    assert reach({"KUBECONFIG": str(other)}).server == "http://127.0.0.1:9"


def test_the_home_directory_is_the_last_place(server, reach, tmp_path):
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube/config", url(server))
    assert reach({"HOME": str(tmp_path)}).server == url(server)
    assert reach({"HOME": str(tmp_path)}, kubeconfig="~/.kube/config").namespace == "mine"


def test_several_files_are_one_configuration(reach, tmp_path):
    config = json.loads(kubeconfig(tmp_path / "whole", "http://127.0.0.1:9").read_text())
    (tmp_path / "a").write_text(json.dumps({**config, "users": [], "clusters": []}))
    (tmp_path / "b").write_text(json.dumps({**config, "contexts": []}))
    assert reach({"KUBECONFIG": f"{tmp_path}/a:{tmp_path}/none:{tmp_path}/b"}).server == "http://127.0.0.1:9"


def test_the_namespace_is_the_one_asked_for_else_that_of_the_context(reach, tmp_path):
    path = str(kubeconfig(tmp_path / "k", "http://127.0.0.1:9"))
    assert reach(kubeconfig=path, namespace="theirs").namespace == "theirs"
    assert reach(kubeconfig=path).namespace == "mine"


def test_the_token_is_sent_and_never_logged(server, reach, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    reach(kubeconfig=str(kubeconfig(tmp_path / "k", url(server)))).list(POD)
    assert server.asked[0].headers["authorization"] == "Bearer secret-token"
    assert server.asked[0].headers["user-agent"].startswith("pytest-mlhpc/")
    assert "secret-token" not in caplog.text + "".join(capfd.readouterr())


def test_a_token_file_may_end_with_a_newline(server, reach, tmp_path):
    (tmp_path / "token").write_text("from-file\n")
    reach(kubeconfig=str(kubeconfig(tmp_path / "k", url(server), {"tokenFile": "token"}))).list(POD)
    assert server.asked[0].headers["authorization"] == "Bearer from-file"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_no_proxy_of_the_environment_is_asked_for_loopback(server, reach, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert reach(kubeconfig=str(kubeconfig(tmp_path / "k", url(server)))).list(POD).items == ()


def test_a_proxy_that_the_kubeconfig_names_is_used(server, reach, tmp_path):
    path = kubeconfig(tmp_path / "k", "http://127.0.0.1:9", **{"proxy-url": url(server)})
    assert reach(kubeconfig=str(path)).list(POD).items == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be used"),
        ("[1, 2", "cannot be used"),
        ("just text", "cannot be used"),
        ('{"contexts": 7}', "cannot be used"),
        ('{"contexts": [], "clusters": [], "users": []}', "no current context"),
        ("\x00\xff", "cannot be used"),
    ],
)
def test_a_damaged_kubeconfig_is_named(reach, tmp_path, content, words):
    path = tmp_path / "damaged"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=words) as error:
        reach(kubeconfig=str(path))
    assert str(path) in str(error.value)


def test_a_kubeconfig_that_is_not_there_is_named(reach, tmp_path):
    with pytest.raises(UsageError, match=f"there is no kubeconfig {tmp_path}/none: set `kubeconfig`"):
        reach(kubeconfig=str(tmp_path / "none"))


def test_without_any_kubeconfig_the_text_says_where_one_may_be(reach, tmp_path):
    with pytest.raises(
        UsageError, match=r"set `kubeconfig` of the partition or KUBECONFIG, or make .*/\.kube/config"
    ):
        reach({"HOME": str(tmp_path)})


def test_a_misspelt_context_is_answered_with_the_nearest(reach, tmp_path):
    path = kubeconfig(tmp_path / "k", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"no context 'mian' \(did you mean 'main'\?\); it has main"):
        reach(kubeconfig=str(path), context="mian")


@pytest.mark.parametrize("missing", ["clusters", "server"])
def test_a_context_without_cluster_is_refused_without_its_token(reach, tmp_path, missing):
    config = json.loads(kubeconfig(tmp_path / "k", "http://127.0.0.1:9").read_text())
    if missing == "clusters":
        config["clusters"] = []
    else:
        del config["clusters"][0]["cluster"]["server"]
    (tmp_path / "k").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="names cluster 'c', which") as error:
        reach(kubeconfig=str(tmp_path / "k"))
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
def test_credentials_that_cannot_be_used_are_refused_and_not_told(reach, tmp_path, user):
    path = kubeconfig(tmp_path / "k", "https://127.0.0.1:9", user)
    with pytest.raises(UsageError, match=r"cannot be used|log in again") as error:
        reach(kubeconfig=str(path))
    assert "secret" not in str(error.value)


def test_nothing_of_a_client_certificate_stays_on_disk(reach, tmp_path, monkeypatch, certificate):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = kubeconfig(tmp_path / "k", "https://127.0.0.1:9", certificate)
    reach(kubeconfig=str(path))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture
def certificate(tmp_path):
    """A self-made client certificate as a kubeconfig holds it."""
    key, crt = tmp_path / "key.pem", tmp_path / "crt.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=me",
         "-keyout", str(key), "-out", str(crt)], check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    found = {"client-certificate-data": crt, "client-key-data": key}
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in found.items()}


# Plug-ins.


def plugin(tmp_path: Path, body: str) -> dict:
    path = tmp_path / "plugin.py"
    path.write_text(f"import json, os, sys, time\n{body}\n")
    version = "client.authentication.k8s.io/v1"
    return {
        "exec": {
            "apiVersion": version,
            "command": sys.executable,
            "args": [str(path)],
            "env": [{"name": "X", "value": "y"}],
        }
    }


PRINTS = """
count = os.path.join(os.path.dirname(__file__), "count")
number = len(open(count).read()) if os.path.exists(count) else 0
open(count, "a").write("x")
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert os.environ["X"] == "y" and info["kind"] == "ExecCredential" and info["spec"]["interactive"] is False
assert sys.stdin.read() == ""
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": f"token-{number}"}}))
"""


def test_a_plugin_gives_the_token_and_is_asked_again_once_it_is_not_taken(reach, tmp_path):
    def answer(asked):
        if asked.headers["authorization"] == "Bearer token-1":
            asked.answer(LIST)
        else:
            asked.refuse(401, "Unauthorized")

    server = Scripted(answer)
    try:
        api = reach(kubeconfig=str(kubeconfig(tmp_path / "k", url(server), plugin(tmp_path, PRINTS))))
        api.list(POD)
        api.list(POD)
    finally:
        server.close()
    assert (tmp_path / "count").read_text() == "xx"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('secret'); sys.exit('please log in first')", "exit code 1: please log in first"),
        ("print('secret')", "printed no credentials"),
        ("print(json.dumps({'status': {'secret': 1}}))", "printed no credentials"),
        ("print('[' * 100000)", "printed no credentials"),
    ],
)
def test_a_failing_plugin_is_told_in_its_own_words_but_not_what_it_printed(reach, tmp_path, body, words):
    path = kubeconfig(tmp_path / "k", "http://127.0.0.1:9", plugin(tmp_path, body))
    with pytest.raises(UsageError, match=words) as error:
        reach(kubeconfig=str(path))
    assert "secret" not in str(error.value)


def test_a_plugin_that_is_not_installed_is_told_with_its_hint(reach, tmp_path):
    user = {
        "exec": {"apiVersion": "v1", "command": "no-such-plugin", "installHint": "get it from the help desk"}
    }
    with pytest.raises(UsageError, match=r"no-such-plugin cannot be started: .*\. get it from the help desk"):
        reach({"PATH": "/usr/bin"}, kubeconfig=str(kubeconfig(tmp_path / "k", "http://127.0.0.1:9", user)))


def test_a_plugin_that_hangs_is_killed_with_all_that_it_started(reach, tmp_path, monkeypatch):
    monkeypatch.setattr(exec_plugin, "PLUGIN_LIMIT_S", 0.5)
    body = "import subprocess; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    path = kubeconfig(tmp_path / "k", "http://127.0.0.1:9", plugin(tmp_path, body))
    with pytest.raises(UsageError, match=r"did not end within 0\.5 s"):
        reach(kubeconfig=str(path))  # the fixture `nothing_left` sees to the rest


# In a pod.


@pytest.fixture
def account(tmp_path):
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("pod-token\n")
    (folder / "namespace").write_text("theirs")
    (folder / "ca.crt").write_text(Path(__import__("certifi").where()).read_text())
    return folder


IN_POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "9", "HOME": "/nonexistent"}


def test_in_a_pod_its_account_is_used(reach, account):
    api = reach(IN_POD, account=account)
    assert (api.server, api.namespace) == ("https://127.0.0.1:9", "theirs")
    with pytest.raises(Unavailable, match="Connection refused"):
        api.version()


def test_a_context_means_nothing_in_a_pod(reach, account):
    with pytest.raises(UsageError, match="so no context 'main'"):
        reach(IN_POD, account=account, context="main")


def test_an_account_without_token_is_refused(reach, account):
    (account / "token").unlink()
    with pytest.raises(UsageError, match=f"the account of this pod in {account} cannot be used: .*token"):
        reach(IN_POD, account=account)


def test_credentials_that_vanish_in_the_middle_are_told_with_the_refusal(reach, tmp_path):
    server = Scripted(lambda asked: asked.refuse(401, "token expired"))
    try:
        path = kubeconfig(tmp_path / "k", url(server))
        api = reach(kubeconfig=str(path))
        path.unlink()
        with pytest.raises(Unauthorized, match="token expired; there is no kubeconfig"):
            api.list(POD)
    finally:
        server.close()


def test_the_client_is_not_imported_before_somebody_connects():
    parts = ("api", "errors", "resources", "connect", "watch", "logs", "rest", "transport")
    program = "; ".join(f"import pytest_mlhpc.provision.kubernetes.{part}" for part in parts)
    program += "; import sys; sys.exit('kubernetes' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
