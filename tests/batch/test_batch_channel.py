"""The socket between ranks and batch, from both ends."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import HANG_S
from running_suites import wait_for

from pytest_mlhpc.batch.channel import EXIT_BATCH_GONE, ChannelError, RankChannel, rank_of, running_payload
from pytest_mlhpc.batch.server import Connection, RankServer

KINDS = {"hello", "started", "progress", "report", "failed", "close", "output", "damaged"}


@pytest.fixture
def server():
    made = RankServer()
    yield made
    made.close()


def test_only_the_user_may_enter_the_sockets_directory(server):
    folder = Path(server.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(server.path) < 108


@pytest.mark.parametrize("wrong", ["open", "link", "missing"])
def test_a_given_directory_has_to_be_ours_alone(tmp_path, wrong):
    folder = tmp_path / "sockets"
    if wrong == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif wrong == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"no private folder|No such file"):
        RankServer(str(folder))


def test_a_given_directory_serves_one_run_after_another_and_stays(tmp_path):
    tmp_path.chmod(0o700)
    for _ in range(2):
        made = RankServer(str(tmp_path))
        made.close()
        assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_directory_is_no_problem(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = RankServer()
    made.close()
    assert not Path(made.path).parent.exists()


def test_a_rank_without_a_batch_ends_itself_although_it_waits(server, tmp_path):
    code = (
        "import threading; from pytest_mlhpc.batch.channel import RankChannel\n"
        "RankChannel.from_environment(); print('ready', flush=True); threading.Event().wait()"
    )
    environment = {**os.environ, "MLHPC_CHANNEL": server.path, "MLHPC_RUN": "r", "MLHPC_NONCE": "n"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        connections: list[Connection] = []
        wait_for(lambda: connections.extend(server.accept()) or connections)
        connections[0].close()
        assert process.wait(HANG_S) == EXIT_BATCH_GONE


def test_a_process_that_no_batch_started_is_told_so():
    with pytest.raises(ChannelError, match="MLHPC_CHANNEL, MLHPC_NONCE not set"):
        RankChannel.from_environment({"MLHPC_RUN": "r"})


def test_a_socket_where_nobody_listens_is_named(tmp_path):
    environment = {"MLHPC_CHANNEL": str(tmp_path / "s"), "MLHPC_RUN": "r", "MLHPC_NONCE": "n"}
    with pytest.raises(ChannelError, match=r"cannot reach the batch at .*/s: No such file"):
        RankChannel.from_environment(environment)


@pytest.mark.parametrize("text", ["-1", "one", "", "1.0", "\N{SUPERSCRIPT TWO}"])
def test_a_rank_that_is_no_number_is_refused(text):
    with pytest.raises(ChannelError, match="not the number of a rank"):
        rank_of({"RANK": text})


def test_a_checkout_is_no_payload():
    assert running_payload() == "source"


@given(
    st.lists(
        st.binary(max_size=200) | st.just(b"\n") | st.just(b'{"kind":"report","body":{}}\n'), max_size=10
    )
)
def test_whatever_a_process_sends_is_a_message_of_a_known_kind(pieces):
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(ours)
        messages = []
        for piece in pieces:
            theirs.sendall(piece)
            messages += connection.read()
    messages += connection.read()
    connection.close()
    assert connection.ended
    assert {message.kind for message in messages} <= KINDS


def test_output_after_the_greeting_is_raw():
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    greeting = {"run": "r", "nonce": "n", "rank": 3, "purpose": "output"}
    theirs.sendall(json.dumps(greeting).encode() + b"\nfirst line\n\xff")
    theirs.close()
    kinds = [(message.kind, message.body) for message in connection.read()]
    connection.close()
    assert kinds[1] == ("output", b"first line\n\xff")
    assert connection.rank == 3
