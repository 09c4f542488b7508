import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from login_worlds import connections, write_ssh
from polling import ended, poll

from pytest_mlhpc.node import login_node
from pytest_mlhpc.provision import ssh
from pytest_mlhpc.provision.ssh import (
    RemoteHost,
    RemoteRefused,
    RemoteUnavailable,
    RemoteUnusable,
    connection_error,
)


@pytest.fixture
def connect(tmp_path):
    """Return a function that makes a login node whose ssh does what *words* say, by a clock that stands still."""
    made = []

    def make(*words, clock=lambda: 0.0):
        made.append(RemoteHost("me@login", write_ssh(tmp_path / "bin", *words), clock))
        return made[-1]

    yield make
    for host in made:
        host.close()


def test_it_says_whose_login_it_is(connect):
    found = connect().login()
    assert (found.uid, found.python.count(".")) == (os.geteuid(), 2)


def test_all_requests_go_over_one_connection(connect, tmp_path):
    host = connect()
    (tmp_path / "file").write_bytes(b"content")
    for _ in range(3):
        answer, body = host.ask("read", root=str(tmp_path), files=[["file", 0]], most=100)
        assert (answer["found"][0][0], body) == (7, b"content")
    assert connections(tmp_path / "bin") == 1


def test_large_bodies_go_both_ways(connect, tmp_path):
    host, body = connect(), os.urandom(1) * (login_node.BODY_BYTES // 2)
    host.ask("put", body, root=str(tmp_path), path="runs/file", at=0, last=True, mode=0o600)
    _, found = host.ask("read", root=str(tmp_path), files=[["runs/file", 0]], most=len(body))
    assert found == body


def test_what_login_scripts_print_is_passed_over(connect):
    assert connect('echo Welcome; printf "no newline"; exec sh -c "$last"').login().uid == os.geteuid()


def test_login_scripts_that_print_for_ever_are_named(connect):
    with pytest.raises(RemoteUnusable, match="its login scripts print more than 65536 bytes"):
        connect("exec cat /dev/zero").login()


def test_an_error_there_is_an_error_of_the_request_and_not_of_the_connection(connect, tmp_path):
    host = connect()
    with pytest.raises(RemoteRefused, match=f"me@login: {tmp_path}/none/runs: No such file") as caught:
        host.ask("put", b"", root=f"{tmp_path}/none", path="runs/file", at=0, last=True, mode=0o600)
    assert (caught.value.os_error.errno, caught.value.os_error.filename) == (2, f"{tmp_path}/none/runs")
    host.login()
    assert connections(tmp_path / "bin") == 1


def test_a_broken_connection_is_made_again(connect, tmp_path):
    host = connect()
    pid = int(host.ask("run", argv=["sh", "-c", "echo $PPID"], directory="", keep=[], drop=["-"], set={})[1])
    os.kill(pid, 9)
    with pytest.raises(RemoteUnavailable, match="me@login: ssh ended with exit code"):
        host.ask("make", root=str(tmp_path), paths=[])
    host.ask("make", root=str(tmp_path), paths=[])
    assert connections(tmp_path / "bin") == 2


def test_a_connection_that_cannot_be_made_is_tried_again_after_longer_and_longer_pauses(connect, tmp_path):
    clock = [0.0]
    host = connect("echo no route >&2; exit 255", clock=lambda: clock[0])
    tried = []
    for clock[0] in range(40):
        with pytest.raises(RemoteUnavailable, match="no route"):
            host.login()
        tried.append(connections(tmp_path / "bin"))
    assert [second for second in range(1, 40) if tried[second] > tried[second - 1]] == [2, 6, 14, 30]


def answering(tmp_path, content):
    """Return words of shell that answer the first request, after its mark, by *content*."""
    program = tmp_path / "hostile.py"
    program.write_text(
        "import json, sys\n"
        "source = sys.stdin.buffer; source.read(int(source.readline()))\n"
        "request = json.loads(source.readline())\n"
        f"sys.stdout.buffer.write(request['mark'].encode() + {content!r}); sys.stdout.buffer.flush(); source.read()\n"
    )
    return f"exec {shutil.which('python3')} {program}"


def test_a_login_node_that_falls_silent_is_given_up(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "MARGIN_S", 0.0)
    host = connect(answering(tmp_path, line(uid=1, user="a", host="b", python="3.9")))
    assert host.login().uid == 1
    with pytest.raises(RemoteUnavailable, match=r"no answer from me@login within 0\.2 s"):
        host.ask("make", limit_s=0.2, root="/", paths=[])
    assert host.login().uid == 1
    assert connections(tmp_path / "bin") == 2


def line(**fields):
    whole = {"id": 1, "size": 0, "sha256": hashlib.sha256().hexdigest(), **fields}
    return json.dumps(whole).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"garbage\n", "me@login sent what is no answer: 'garbage'"),
        (b"\xff\x1b[2J\n", "me@login sent what is no answer"),
        (b"[]\n", "sent what is no answer"),
        (b"[" * 100_000 + b"\n", "sent what is no answer"),
        (b"x" * (ssh.LINE_BYTES + (1 << 19)), "me@login sent a line of more than"),
        (line(id=7), "sent what is no answer"),
        (line(size=login_node.BODY_BYTES + 1), "sent what is no answer"),
        (line(size=-1), "sent what is no answer"),
        (line(size="many"), "sent what is no answer"),
        (line(size=3) + b"abc", "me@login: an answer came damaged"),
        (line(), "me@login does not say whose login it is"),
        (line(uid="0", user="a", host="b", python="c"), "does not say whose login it is"),
        (line(error="no\x1b[2Jtruth", errno="x", path=3), "me@login: "),
    ],
)
def test_what_a_hostile_login_node_answers_is_an_error(connect, tmp_path, content, text):
    with pytest.raises(ssh.RemoteError) as caught:
        connect(answering(tmp_path, content)).login()
    assert text in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("code", "messages", "kind", "text"),
    [
        (255, "No ED25519 host key is known\r\nHost key verification failed.", RemoteUnusable,
         "its host key is not known, so nothing was sent: compare it with what the site publishes, and accept it once by `ssh me@login true`"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", RemoteUnusable,
         "if it was replaced, run `ssh-keygen -R login` and `ssh me@login true`"),
        (255, "me@login: Permission denied (publickey).", RemoteUnusable, "add the key to the agent (ssh-add)"),
        (255, "ssh: Could not resolve hostname login: Name or service not known", RemoteUnusable, "there is no host of this name"),
        (255, "Bad owner or permissions on /home/me/.ssh/config", RemoteUnusable, "chmod 600 ~/.ssh/config"),
        (255, "ssh: connect to host login port 22: Connection refused", RemoteUnavailable, "ssh ended with exit code 255"),
        (127, "bash: line 1: exec: python3: not found", RemoteUnusable, "has no python3 on the PATH of a shell that is not interactive"),
        (0, "", RemoteUnavailable, "the connection was closed"),
        (1, "a" * 5000 + "\x1b[2J", RemoteUnavailable, "ssh ended with exit code 1"),
    ],
)  # fmt: skip
def test_why_there_is_no_connection_is_said_with_what_to_do(code, messages, kind, text):
    error = connection_error("me@login", code, messages)
    assert type(error) is kind
    assert text in str(error)
    assert str(error).startswith("me@login")
    assert str(error).isprintable()
    assert len(str(error)) < 1000


def test_the_key_of_another_port_is_forgotten_by_its_own_name():
    error = connection_error("ssh://me@login:2222", 255, "REMOTE HOST IDENTIFICATION HAS CHANGED")
    assert "`ssh-keygen -R '[login]:2222'`" in str(error)


def test_a_machine_without_ssh_is_named(tmp_path):
    with pytest.raises(RemoteUnusable, match="ssh cannot be started: the command 'ssh' is not on PATH"):
        RemoteHost("login", {"PATH": str(tmp_path)}).login()


def test_what_ssh_is_asked_for(tmp_path):
    environ = write_ssh(tmp_path / "bin", f'printf "%s\\n" "$@" > {tmp_path}/words; exec sh -c "$last"')
    host = RemoteHost("me@login", {**environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": "/nonexistent"})
    host.login()
    host.close()
    words = (tmp_path / "words").read_text().splitlines()
    assert words[-3:] == ["--", "me@login", ssh.COMMAND]
    assert {"BatchMode=yes", "ControlMaster=auto", "ControlPersist=20", "-T", "-a", "-x"} <= set(words)


def test_sockets_lie_in_a_folder_that_nobody_else_enters(tmp_path):
    environ = {**write_ssh(tmp_path / "bin"), "XDG_RUNTIME_DIR": str(tmp_path)}
    folder = Path(
        next(word for word in ssh._sharing(environ, "login") if word.startswith("ControlPath=")).partition(
            "="
        )[2]
    ).parent
    if len(str(tmp_path)) < 30:
        assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_connection_that_the_users_own_configuration_shares_is_used(tmp_path):
    environ = write_ssh(tmp_path / "bin")
    script = tmp_path / "bin" / "ssh"
    script.write_text("#!/bin/sh\necho 'controlmaster auto'\necho 'controlpath /home/me/.ssh/%C'\n")
    assert list(ssh._sharing(environ, "login")) == []
    script.write_text("#!/bin/sh\necho 'controlmaster false'\n")
    assert len(list(ssh._sharing(environ, "login"))) == 6


def test_the_connection_of_a_process_is_one(tmp_path):
    environ = write_ssh(tmp_path / "bin")
    assert ssh.host_of("login", environ) is ssh.host_of("login", {**environ, "PYTEST_CURRENT_TEST": "x"})
    assert ssh.host_of("login", environ) is not ssh.host_of("other", environ)


def test_the_shell_of_a_login_node_reads_one_constant_line(tmp_path):
    """Whatever is asked for: the words of requests are data on standard input."""
    environ = write_ssh(tmp_path / "bin", f'echo "$last" >> {tmp_path}/lines; exec sh -c "$last"')
    for destination in ("one", "two"):
        host = RemoteHost(destination, environ)
        host.ask(
            "run", argv=["echo", "$(touch x)"], directory="", keep=[], drop=["-"], set={"A": "'; exit 1"}
        )
        host.close()
    assert set((tmp_path / "lines").read_text().splitlines()) == {ssh.COMMAND}


def test_ssh_ends_with_the_connection(connect, tmp_path):
    host = connect()
    pid = int(host.ask("run", argv=["sh", "-c", "echo $PPID"], directory="", keep=[], drop=["-"], set={})[1])
    host.close()
    poll(lambda: ended(pid))
