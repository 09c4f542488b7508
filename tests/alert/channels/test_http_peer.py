"""One request to a server that fails in every way: a clear error in time, and nothing secret in it."""

import contextlib
import socket
import threading

import pytest
from certificates import certificate
from http_sink import DRIP, GARBAGE, HANG, RESET, HttpSink, Reply
from refusals import refusal

from pytest_mlhpc.alert.channels.base import Peer, check_limits, check_url, send_json

pytestmark = pytest.mark.servers


def get(url, **more):
    send_json(Peer("chat", url, **{"limit_s": 300.0, **more}), "POST", url, {"a": 1})


def post(sink, **more):
    get(f"{sink.url}/hook/T0K3N-4711", **more)


def redirect(location, status=301):
    return Reply(status, headers={"Location": location})


LOGIN = "https://u:p@elsewhere.example.org/login?x=T0K3N-4711"


@pytest.mark.parametrize(
    ("reply", "why", "retry"),
    [
        *((Reply(status, b"try later"), f"answered {status}: try later$", True) for status in (408, 425, 429, 500, 502, 503, 504)),
        *((Reply(status, b"no"), f"answered {status}: no$", True) for status in (401, 403, 404, 405, 410)),
        *((Reply(status, b"no"), f"answered {status}: no$", False) for status in (400, 413, 422)),
        (redirect(LOGIN, 302), r"302, a redirect to https://elsewhere\.example\.org; url must", True),
        *((redirect(location), "301, a redirect to elsewhere", True) for location in ("", "/login", "https://[broken")),
        (Reply(fault=RESET), "no answer: ", True),
        (Reply(fault=GARBAGE), "no answer: ", True),
        (Reply(400, b"bad hook /hook/T0K3N-4711"), r"answered 400: bad \*\*\*", False),
        (Reply(500, b"x" * 3_000_000), "answered 500: xxx", True),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_success_is_said_without_secrets_and_followed_nowhere(sink, reply, why, retry):
    sink.then(reply)
    error = refusal(post, sink, match=f"^chat: {sink.url}: .*{why}")
    assert (error.retry, len(sink.requests)) == (retry, 1)
    assert "T0K3N" not in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize("fault", [HANG, DRIP])
def test_waits_no_longer_than_its_limit_for_a_server_that_hangs_or_dribbles(fault, sink):
    sink.then(Reply(fault=fault))
    assert refusal(post, sink, limit_s=0.5, match=r"no answer within 0.5 s$").retry


def test_a_server_that_is_not_there_may_come_back():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        place = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert refusal(get, f"{place}/secret-path", match=rf"^chat: {place}: no answer: .*refused").retry


def test_a_host_without_address_may_get_one():
    url = "http://nowhere.invalid/secret-path"
    assert refusal(get, url, match=r"^chat: http://nowhere.invalid: no answer").retry


def test_sends_user_and_password_of_an_address_as_a_header(sink):
    url = sink.url.replace("://", "://me:p%40ss@") + "/hook?x=1"

    get(url)

    (request,) = sink.requests
    assert (request.path, request.headers["authorization"]) == ("/hook?x=1", "Basic bWU6cEBzcw==")
    assert Peer("chat", url).place == sink.url


def test_trusts_a_certificate_only_if_it_is_told_to(tmp_path):
    server, trusted = certificate(tmp_path)
    with HttpSink(tls=server) as sink:
        assert refusal(post, sink, match=r"certificate is not trusted: .*ca_file").retry
        post(sink, ca_file=str(trusted))

    assert len(sink.requests) == 1


def test_a_server_that_never_ends_its_handshake_costs_no_more_than_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/"
        assert refusal(get, url, limit_s=0.5, match=r"no answer within 0.5 s").retry


def test_goes_through_the_proxy_of_the_environment(sink, monkeypatch):
    monkeypatch.setenv("http_proxy", sink.url.replace("://", "://me:pw@"))

    get("http://user:word@chat.example.org/hook?a=b")

    (request,) = sink.requests
    assert (request.path, request.headers["host"]) == ("http://chat.example.org/hook?a=b", "chat.example.org")
    given = [request.headers[name] for name in ("proxy-authorization", "authorization")]
    assert given == ["Basic bWU6cHc=", "Basic dXNlcjp3b3Jk"]


@pytest.fixture
def proxy(monkeypatch):
    with HttpSink() as server:
        monkeypatch.setenv("http_proxy", server.url)
        yield server


def test_asks_no_proxy_for_hosts_that_no_proxy_names(proxy, monkeypatch):
    monkeypatch.setenv("no_proxy", ".invalid")
    refusal(get, "http://nowhere.invalid/", match="no answer")
    assert proxy.requests == []


def test_asks_no_proxy_for_this_machine(proxy, sink):
    post(sink)
    assert (len(proxy.requests), len(sink.requests)) == (0, 1)


@pytest.mark.parametrize("named", ["http://me:s3cr3t@proxy:port", "http://", "http://[::1"])
def test_says_that_the_proxy_of_the_environment_is_none(named, monkeypatch):
    monkeypatch.setenv("http_proxy", named)

    why = r"the variable http_proxy is not the address of a proxy$"
    assert refusal(get, "http://chat.invalid/", match=why).retry


def test_asks_a_proxy_for_a_tunnel_to_a_server_with_tls(monkeypatch, tmp_path):
    server, trusted = certificate(tmp_path)
    asked = []
    with HttpSink(tls=server) as sink, tunnel_to(sink.port, asked) as port:
        monkeypatch.setenv("https_proxy", f"http://me:pw@127.0.0.1:{port}")
        monkeypatch.setattr("pytest_mlhpc.config.http.is_loopback", lambda _host: False)
        post(sink, ca_file=str(trusted))

    assert asked == [f"CONNECT 127.0.0.1:{sink.port}", "proxy-authorization: Basic bWU6cHc="]
    assert "proxy-authorization" not in sink.requests[0].headers


@pytest.mark.parametrize(
    "url",
    [
        "", "hook", "ftp://a.b/c", "http://", "https:///path", "http://a b/", "http://a/\nb", "http://a:99999/", "http://[::1/",
    ],
)  # fmt: skip
def test_refuses_what_is_no_address_without_showing_it(url):
    with pytest.raises(ValueError, match=r"^url must be http://HOST... or https://HOST...$"):
        check_url(url)


def test_takes_an_address_with_a_line_break_behind_it():
    assert check_url("https://[::1]:8443/x\n") == "https://[::1]:8443/x"


@pytest.mark.parametrize(
    ("limit_s", "ca_file", "why"),
    [*((limit_s, "", "limit_s") for limit_s in (0, -1, 1e9, float("nan"))), (1, "/no/ca", "ca_file")],
)
def test_refuses_limits_and_files_of_certificates_that_are_none(limit_s, ca_file, why):
    with pytest.raises(ValueError, match=why):
        check_limits(limit_s, ca_file)


@contextlib.contextmanager
def tunnel_to(port, asked):
    """A proxy that makes one tunnel to a port of this machine, and notes what it was asked; yields its own port."""

    def serve():
        client, _address = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            first, *others = head.decode().split("\r\n")
            asked.append(first.rpartition(" ")[0])
            asked.extend(line for line in others if line.lower().startswith("proxy-"))
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def _pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
