"""The socket between ranks and batch, from both ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import HANG_S
from running_suites import wait_for

from pytest_mlhpc.batch.channel import EXIT_BATCH_GONE, ChannelError, RankChannel, rank_of, running_payload
from pytest_mlhpc.batch.server import Connection, RankServer, RemoteServer

KINDS = {"hello", "started", "progress", "report", "failed", "close", "output", "damaged"}


def test_only_the_user_may_enter_the_sockets_directory():
    with contextlib.closing(RankServer()) as server:
        assert stat.S_IMODE(Path(server.path).parent.stat().st_mode) == 0o700
        assert len(server.path) < 108


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda folder: folder.mkdir(mode=0o755), "no private folder", id="open to others"),
        pytest.param(lambda folder: folder.symlink_to(folder.parent), "no private folder", id="a link"),
        pytest.param(lambda folder: None, "No such file", id="missing"),
    ],
)
def test_a_given_directory_has_to_be_ours_alone(tmp_path, make, error):
    make(tmp_path / "sockets")
    with pytest.raises(OSError, match=error):
        RankServer(str(tmp_path / "sockets"))


def test_a_given_directory_serves_one_run_after_another_and_stays(tmp_path):
    tmp_path.chmod(0o700)
    for _ in range(2):
        RankServer(str(tmp_path)).close()
        assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_directory_is_no_problem(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = RankServer()
    made.close()
    assert not Path(made.path).parent.exists()


WAITS = """
import threading
from pytest_mlhpc.batch.channel import RankChannel
RankChannel.from_environment()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    "make", [RankServer, partial(RemoteServer, ["127.0.0.1"])], ids=["here", "on another node"]
)
def test_a_rank_without_a_batch_ends_itself_although_it_waits(make):
    with contextlib.closing(make()) as server:
        environ = {**os.environ, "MLHPC_CHANNEL": server.channel, "MLHPC_RUN": "r", "MLHPC_NONCE": "n"}
        with subprocess.Popen([sys.executable, "-c", WAITS], env=environ, stdout=subprocess.PIPE) as rank:
            assert rank.stdout.readline() == b"ready\n"
            connections = []
            wait_for(lambda: connections.extend(server.accept()) or connections)
            connections[0].close()
            assert rank.wait(HANG_S) == EXIT_BATCH_GONE


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        pytest.param({}, "MLHPC_CHANNEL, MLHPC_NONCE not set", id="started by no batch"),
        pytest.param(
            {"MLHPC_CHANNEL": "/none/s", "MLHPC_NONCE": "n"},
            "cannot reach the batch at /none/s: No such file",
            id="nobody listens",
        ),
    ],
)
def test_a_process_without_a_batch_is_told_so(environ, error):
    with pytest.raises(ChannelError, match=error):
        RankChannel.from_environment({"MLHPC_RUN": "r", **environ})


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
    greeting = {"run": "r", "nonce": "n", "rank": 3, "purpose": "output"}
    with theirs:
        theirs.sendall(json.dumps(greeting).encode() + b"\nfirst line\n\xff")
    with contextlib.closing(Connection(ours)) as connection:
        _, output = connection.read()
    assert (output.kind, output.body, connection.rank) == ("output", b"first line\n\xff", 3)
