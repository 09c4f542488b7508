"""The channel over TCP: ranks on other nodes are heard, strangers are not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from pods import run_plan
from running_suites import wait_for

from pytest_mlhpc.batch import nodes
from pytest_mlhpc.batch.channel import ChannelError, addresses_of
from pytest_mlhpc.batch.ranks import RankBook
from pytest_mlhpc.batch.relay import Relay
from pytest_mlhpc.batch.runs import Site, listen
from pytest_mlhpc.batch.server import HELLO_LIMIT_S, MAX_HELLO, RemoteServer
from pytest_mlhpc.batch.supervise import Supervisor

#: Stands for a launcher: a stranger knocks, and then the one rank does its work.
RANK = """
import os, socket, sys
from pytest_mlhpc.batch.channel import RankChannel, addresses_of
for words in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", b"x" * 100_000, b'{"run": 1}\\n'):
    stranger = socket.create_connection(addresses_of(os.environ["MLHPC_CHANNEL"])[-1])
    try:
        stranger.sendall(words)
    except OSError:
        pass
    if words != b"":
        stranger.close()
channel = RankChannel.from_environment()
channel.started({"torch": "none"})
channel.failed("loss_nan", "it was heard")
channel.close()
"""


def remote_run():
    """Return a run of two ranks on two nodes."""
    return run_plan("run-1", workload="tiny", argv=(), nodes=2, ranks=2, launcher="srun", time_limit_s=600.0)


@pytest.fixture
def server():
    made = RemoteServer(("127.0.0.1",))
    yield made
    made.close()


def environment(server, **changes):
    ids = {"MLHPC_RUN": "run-1", "MLHPC_NONCE": "nonce", "MLHPC_CHANNEL": server.channel}
    return {**os.environ, **ids, **changes}


def supervise(folder, server, script, **changes):
    reading, writing = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    book = RankBook(remote_run(), ("here", "there"))
    supervisor = Supervisor(book, folder, Relay(null), reading, lambda: False, lifeline=False)
    supervisor.execute([sys.executable, "-c", script], environment(server, **changes), server, behind=True)
    for fd in (reading, writing, null):
        os.close(fd)
    return book.trouble


@pytest.mark.parametrize(
    ("environ", "outcome", "text"),
    [
        ({"SLURMD_NODENAME": "there"}, "loss_nan", "rank 1 on there: it was heard"),
        ({"MLHPC_NONCE": "other"}, "foreign_result", ""),
        ({"SLURMD_NODENAME": "here"}, "launch_failed", "rank 1 was started on here, but belongs on there"),
    ],
    ids=["it is heard", "of another run it is foreign", "on another node than its own it is refused"],
)
def test_strangers_do_not_hurt_a_run_and_of_its_rank(tmp_path, server, environ, outcome, text):
    trouble = supervise(tmp_path, server, RANK, RANK="1", **environ)
    assert (trouble.outcome, trouble.text[: len(text)]) == (outcome, text)


def accept_one(server):
    """Wait for a connection and return it."""
    found = []
    wait_for(lambda: found.extend(server.accept()) or found)
    return found[0]


def test_who_does_not_greet_in_time_or_says_too_much_is_a_stranger(server):
    with socket.create_connection(addresses_of(server.channel)[0]) as theirs:
        ours = accept_one(server)
        assert not ours.stranger
        ours.since -= HELLO_LIMIT_S + 1
        assert ours.stranger
        ours.since = time.monotonic() + 1000.0
        theirs.sendall(b"x" * (MAX_HELLO + 1))
        wait_for(lambda: ours.read() == [] and ours.stranger)
        ours.close()


def test_a_greeting_makes_a_rank_of_a_stranger(server):
    hello = {"run": "run-1", "nonce": "nonce", "rank": 1, "purpose": "messages", "node": "there"}
    with socket.create_connection(addresses_of(server.channel)[0]) as theirs:
        theirs.sendall(json.dumps(hello).encode() + b"\n")
        ours = accept_one(server)
        wait_for(lambda: ours.read() is None or ours.rank is not None)
        assert (ours.rank, ours.purpose) == (1, "messages")
        ours.since -= HELLO_LIMIT_S + 1
        assert not ours.stranger
        ours.close()


def test_addresses_are_tried_in_turn(server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        dead = other.getsockname()[1]
    channel = f"tcp://127.0.0.1:{dead},no-such-node.invalid:1,{server.channel[len('tcp://') :]}"
    code = "from pytest_mlhpc.batch.channel import RankChannel; RankChannel.from_environment().close()"
    environ = environment(server, MLHPC_CHANNEL=channel)
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0


@pytest.mark.parametrize(
    "channel", ["tcp://", "tcp://host", "tcp://host:port", "tcp://host:99999", "tcp://:5"]
)
def test_what_is_no_address_is_refused(channel):
    with pytest.raises(ChannelError, match="names no address"):
        addresses_of(channel)


def test_an_address_of_version_6_is_understood():
    assert addresses_of("tcp://[::1]:5,node1:6") == [("::1", 5), ("node1", 6)]


@pytest.mark.parametrize("theirs", ["", "127.0.0.1"], ids=["unknown to Slurm too", "known to Slurm"])
def test_the_address_of_a_node_that_does_not_resolve_is_slurms_or_an_error(monkeypatch, theirs):
    monkeypatch.setattr(nodes, "slurm_address", lambda node: theirs)
    error = pytest.raises(nodes.NodesUnknown, match=r"'no-such-node\.invalid' does not resolve")
    with contextlib.nullcontext() if theirs else error:
        assert nodes.master_address(("no-such-node.invalid", "other")) == theirs


def test_slurm_is_asked_once_for_the_address_that_all_runs_use(monkeypatch):
    asked = []
    monkeypatch.setattr(nodes, "reachable_as", lambda node: asked.append(node) or ("127.0.0.1",))
    site = Site(("node1", "node2"), "node1", slurm=True)
    for _ in range(2):
        listen(remote_run(), site).close()
    assert asked == ["node1"]


@pytest.mark.parametrize("first", ["here", "there"])
def test_a_port_where_ranks_meet_is_no_ephemeral_one(first):
    low, high = nodes.ephemeral_ports()
    port = nodes.master_port(first, "here")
    assert port in nodes.DRAWN_PORTS
    assert not low <= port <= high


def test_consequences_of_a_lost_rank_are_not_what_is_named():
    book = RankBook(remote_run(), ("here", "there"))
    for number in range(2):
        assert book.greet({"run": "run-1", "nonce": "nonce", "rank": number, "purpose": "messages"}, 0)
    book.lost(1, None)
    book.say(0, "failed", {"outcome": "worker_exit", "text": "connection closed by peer"}, 0.0)
    assert book.trouble is None
    book.launcher_ended(1, "", is_rank=False)
    assert book.trouble.text == "rank 1 on there ended without a word"
