"""The socket between ranks and batch, from both ends."""

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import HANG_S
from running_suites import wait_for

from pytest_mlhpc.node.agents.wire import Wire, greet, key_of_run
from pytest_mlhpc.node.batch.server import RankConnection, RankServer, RemoteServer
from pytest_mlhpc.node.protocol.channel import (
    EXIT_BATCH_GONE,
    ChannelError,
    RankChannel,
    rank_of,
    running_payload,
)

KEY = key_of_run("r", "n")

KINDS = {"hello", "started", "progress", "report", "failed", "close", "output", "damaged"}


def test_only_the_user_may_enter_the_sockets_directory():
    with contextlib.closing(RankServer(KEY)) as server:
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
        RankServer(KEY, str(tmp_path / "sockets"))


def test_folders_of_batches_that_were_killed_are_removed_by_the_next_one(monkeypatch):
    folder = tempfile.mkdtemp()  # a socket's path is short
    monkeypatch.setattr("tempfile.tempdir", folder)
    kept, killed, young = RankServer(KEY), RankServer(KEY), RankServer(KEY)
    empty = Path(tempfile.mkdtemp(prefix="mlhpc-"))
    for left in (empty, Path(kept.path).parent, Path(killed.path).parent):
        os.utime(left, (1, 1))
    for server in (killed, young):
        server.socket.close()
    with contextlib.closing(RankServer(KEY)):
        found = [Path(server.path).parent.exists() for server in (kept, killed, young)]
        assert not empty.exists()  # left by a batch that was killed between two of these steps
    kept.close()
    shutil.rmtree(folder)
    assert found == [True, False, True]


def test_a_given_directory_serves_one_run_after_another_and_stays(tmp_path):
    tmp_path.chmod(0o700)
    for _ in range(2):
        RankServer(KEY, str(tmp_path)).close()
        assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_directory_is_no_problem(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = RankServer(KEY)
    made.close()
    assert not Path(made.path).parent.exists()


WAITS = """
import threading
from pytest_mlhpc.node.protocol.channel import RankChannel
RankChannel.from_environment()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    "make", [RankServer, partial(RemoteServer, hosts=["127.0.0.1"])], ids=["here", "on another node"]
)
def test_a_rank_without_a_batch_ends_itself_although_it_waits(make):
    with contextlib.closing(make(KEY)) as server:
        environ = {**os.environ, "MLHPC_CHANNEL": server.channel, "MLHPC_RUN": "r", "MLHPC_SECRET": "n"}
        with subprocess.Popen([sys.executable, "-c", WAITS], env=environ, stdout=subprocess.PIPE) as rank:
            connections = []
            wait_for(lambda: connections.extend(server.accept()) or connections)
            wait_for(connections[0].read)
            assert rank.stdout.readline() == b"ready\n"
            connections[0].close()
            assert rank.wait(HANG_S) == EXIT_BATCH_GONE


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        pytest.param({}, "MLHPC_CHANNEL, MLHPC_SECRET not set", id="started by no batch"),
        pytest.param(
            {"MLHPC_CHANNEL": "/none/s", "MLHPC_SECRET": "n"},
            "cannot reach the batch from .*: /none/s: No such file",
            id="nobody listens",
        ),
    ],
)
def test_a_process_without_a_batch_is_refused_with_that_reason(environ, error):
    with pytest.raises(ChannelError, match=error):
        RankChannel.from_environment({"MLHPC_RUN": "r", **environ})


@pytest.mark.parametrize("text", ["-1", "one", "", "1.0", "\N{SUPERSCRIPT TWO}"])
def test_a_rank_that_is_no_number_is_refused(text):
    with pytest.raises(ChannelError, match="not the number of a rank"):
        rank_of({"RANK": text})


def test_a_checkout_is_no_payload():
    assert running_payload() == "source"


@contextlib.contextmanager
def greeted(purpose):
    """Give both ends of a connection on which rank 3 has proved itself."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(RankConnection(ours, KEY)) as connection, ThreadPoolExecutor(1) as rank:
        hello = json.dumps({"rank": 3, "purpose": purpose, "node": "n"})
        done = rank.submit(greet, Wire(theirs), KEY, lambda: hello, HANG_S)
        wait_for(connection.read)
        done.result()
        yield connection, theirs


@given(
    st.lists(
        st.binary(max_size=200) | st.just(b"\n") | st.just(b'{"kind":"report","body":{}}\n'), max_size=10
    )
)
def test_whatever_a_rank_sends_is_a_message_of_a_known_kind(pieces):
    messages = []
    with greeted("messages") as (connection, theirs):
        for piece in pieces:
            theirs.sendall(piece)
            messages += connection.read()
        theirs.close()
        messages += connection.read()
        assert connection.ended
    assert {message.kind for message in messages} <= KINDS


def test_output_after_the_greeting_is_raw():
    with greeted("output") as (connection, theirs):
        theirs.sendall(b"first line\n\xff")
        (output,) = connection.read()
        assert (output.kind, output.body, connection.rank) == ("output", b"first line\n\xff", 3)


@given(st.lists(st.binary(max_size=200) | st.just(b'{"kind":"hello","hello":"{}"}\n'), max_size=10))
def test_who_has_not_proved_itself_is_not_heard(pieces):
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(RankConnection(ours, KEY)) as connection:
        for piece in pieces:
            with contextlib.suppress(OSError):
                theirs.sendall(piece)
            assert connection.read() == []
        theirs.close()
        assert connection.read() == []
        assert connection.stranger
