"""Who may write where: from the environment or a closed file, and never shown."""

import os

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.influx.credentials import InfluxServer, is_configured, pushes, server_of

URL = {"MLHPC_INFLUX_URL": "http://localhost:8086"}
SECRET = "s3cret-Token=="  # noqa: S105 - of nobody


def token_file(tmp_path, content, mode=0o600):
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    return {**URL, "MLHPC_INFLUX_TOKEN_FILE": str(path)}


def test_the_environment_names_the_server():
    more = {"MLHPC_INFLUX_TOKEN": SECRET, "MLHPC_INFLUX_BUCKET": "b", "MLHPC_INFLUX_ORG": "o"}
    server = server_of({**URL, **more})
    assert [server.url, server.bucket, server.org, server.token] == [*URL.values(), "b", "o", SECRET]
    assert SECRET not in repr(server)


@pytest.mark.parametrize("environ", [{}, {"MLHPC_INFLUX_URL": " "}])
def test_nothing_is_configured_by_default(environ):
    assert not is_configured(environ)
    with pytest.raises(UsageError, match="set MLHPC_INFLUX_URL"):
        server_of(environ)


@pytest.mark.parametrize("word", ["no", "NO", "0", "off", "false"])
def test_a_session_can_be_started_without_sending(word):
    assert not pushes({"MLHPC_INFLUX_PUSH": word})
    assert pushes({})


def test_a_line_end_behind_a_token_is_not_part_of_it(tmp_path):
    assert server_of({**URL, "MLHPC_INFLUX_TOKEN": f"{SECRET}\r\n"}).token == SECRET
    assert server_of(token_file(tmp_path, f"{SECRET}\n")).token == SECRET


@pytest.mark.parametrize("more", ["\nX-Injected: 1", "\rx", "\0", "é", " x"])
def test_a_token_that_would_become_another_header_is_refused_and_not_shown(tmp_path, more):
    token = SECRET + more
    for environ in ({**URL, "MLHPC_INFLUX_TOKEN": token}, token_file(tmp_path, token)):
        with pytest.raises(UsageError, match="MLHPC_INFLUX_TOKEN") as refused:
            server_of(environ)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    with pytest.raises(UsageError, match="chmod 600"):
        server_of(token_file(tmp_path, SECRET, mode))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "cannot be read"),
        ("pipe", "not a regular file"),
        (".", "cannot be read|not a regular"),
        ("token", "contains no token"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, name, why):
    os.mkfifo(tmp_path / "pipe", 0o600)
    token_file(tmp_path, "\n")
    with pytest.raises(UsageError, match=why):
        server_of({**URL, "MLHPC_INFLUX_TOKEN_FILE": str(tmp_path / name)})


def test_a_token_and_a_file_are_one_too_many(tmp_path):
    with pytest.raises(UsageError, match="both set"):
        server_of({**token_file(tmp_path, SECRET), "MLHPC_INFLUX_TOKEN": SECRET})


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8086", "ftp://localhost", "http://", "http://localhost:99999", "http://localhost:0", "http://[::1",
        "http://user:s3cret-Token==@localhost", "http://localhost/?token=s3cret-Token==", "http://local\nhost",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_is_refused_without_showing_a_password(url):
    with pytest.raises(UsageError, match="MLHPC_INFLUX_URL") as refused:
        server_of({"MLHPC_INFLUX_URL": url})
    assert SECRET not in str(refused.value)


def test_what_a_server_says_is_reported_without_the_token():
    for token in (SECRET, f"user:{SECRET}"):
        server = InfluxServer("http://localhost", token=token)
        shown = server.hide(f"invalid header {server.authorization!r} for {token}, password {SECRET}")
        assert not [secret for secret in (SECRET, server.authorization.partition(" ")[2]) if secret in shown]


@pytest.mark.parametrize(
    ("token", "text", "shown"),
    [
        *((token, "the server is there", "the server is there") for token in ("e", "a:e", "is:her")),
        ("mlhpc:abc", "no user mlhpc:abc", "no user (token)"),
        ("mlhpc:abc", f"no {InfluxServer('', token='mlhpc:abc').authorization}", "no Basic (token)"),
    ],
)
def test_of_a_short_token_the_whole_is_hidden_and_no_letters_are_blotted_out(token, text, shown):
    assert InfluxServer("http://localhost", token=token).hide(text) == shown
