"""The channel over TCP: ranks on other nodes are heard, strangers are not."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest
from pods import HANG_S, run_plan
from running_suites import wait_for

from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.agents.wire import PROOF_S, key_of_run
from pytest_mlhpc.node.batch.output import Relay
from pytest_mlhpc.node.batch.ranks import RankBook
from pytest_mlhpc.node.batch.runs import Site, listen
from pytest_mlhpc.node.batch.server import RemoteServer
from pytest_mlhpc.node.batch.supervise import Supervisor
from pytest_mlhpc.node.processes import MOST_STRANGERS
from pytest_mlhpc.node.protocol.channel import ChannelError, addresses_of

#: Stands for a launcher: strangers knock, and then the one rank does its work.
RANK = """
import contextlib, json, os, socket, sys
from pytest_mlhpc.node.protocol import channel as theirs
from pytest_mlhpc.node.agents.wire import key_of_run, proof
theirs.GREETINGS = 1
knocking = contextlib.ExitStack()

def knock():
    return knocking.enter_context(socket.create_connection(theirs.addresses_of(os.environ["MLHPC_CHANNEL"])[-1]))

def shout(words):
    with contextlib.suppress(OSError):
        knock().sendall(words)

def claim(**changes):
    try:
        theirs.RankChannel.from_environment({**os.environ, **changes})
    except theirs.ChannelError as error:
        print("told:", error)
    else:
        print("believed")

STRANGERS
channel = theirs.RankChannel.from_environment()
channel.started({"torch": "none"})
channel.failed("loss_nan", "it was heard")
channel.close()
knocking.close()
"""

WRONG = '{"run": "run-1", "nonce": "wrong", "rank": 0, "purpose": "messages"}'

#: What comes to the port, and how many of these connections are turned away before the run ends.
STRANGERS = {
    "nobody": ("", 0),
    "a line with the wrong nonce": (f"shout(b'{WRONG}\\n')", 1),
    "a line that is longer than any greeting": ("shout(b'x' * 100_000)", 1),
    "the words of another protocol": ("shout(b'GET / HTTP/1.1\\r\\n\\r\\n'); shout(b'[' * 4000 + b'\\n')", 2),
    "a rank of an earlier attempt, which knows an older secret": ("claim(MLHPC_SECRET='older')", 1),
    "a rank of another run": ("claim(MLHPC_RUN='run-2')", 1),
    "many at once that say nothing": ("for _ in range(400): knock()", 400 - MOST_STRANGERS - 4),
    "a proof that was made for another challenge": (
        """hello = json.dumps({"rank": 0, "purpose": "messages", "node": "here"})
mac = proof(key_of_run("run-1", "nonce"), "agent", "another", "x", hello)
shout(json.dumps({"kind": "hello", "hello": hello, "challenge": "x", "mac": mac}).encode() + b"\\n")""",
        1,
    ),
}


def remote_run():
    """Return a run of two ranks on two nodes."""
    return run_plan("run-1", workload="tiny", argv=(), nodes=2, ranks=2, launcher="srun", time_limit_s=600.0)


@pytest.fixture
def server():
    made = RemoteServer(key_of_run("run-1", "nonce"), ("127.0.0.1",))
    yield made
    made.close()


def environment(server, **changes):
    ids = {"MLHPC_RUN": "run-1", "MLHPC_SECRET": "nonce", "MLHPC_CHANNEL": server.channel}
    return {**os.environ, **ids, **changes}


def supervise(folder, server, script, **changes):
    reading, writing = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    book = RankBook(remote_run(), ("here", "there"))
    supervisor = Supervisor(book, folder, Relay(null), reading, lambda: False, lifeline=False)
    supervisor.execute([sys.executable, "-c", script], environment(server, **changes), server, behind=True)
    for fd in (reading, writing, null):
        os.close(fd)
    return book


@pytest.mark.parametrize(("strangers", "turned_away"), STRANGERS.values(), ids=STRANGERS)
def test_whoever_does_not_prove_to_be_of_the_run_is_counted_and_changes_nothing(
    tmp_path, server, strangers, turned_away
):
    book = supervise(
        tmp_path, server, RANK.replace("STRANGERS", strangers), RANK="1", SLURMD_NODENAME="there"
    )
    assert (book.trouble.outcome, book.trouble.text[-12:]) == ("loss_nan", "it was heard")
    assert "believed" not in (tmp_path / "launcher.log").read_text()
    assert book.strangers >= turned_away


@pytest.mark.parametrize(
    ("environ", "outcome", "text"),
    [
        ({"RANK": "7"}, "foreign_result", "rank 7 connected, but the run has 2 ranks"),
        ({"SLURMD_NODENAME": "here"}, "launch_failed", "rank 1 was started on here, but belongs on there"),
    ],
    ids=["of a number that the run has not it is foreign", "on another node than its own it is refused"],
)
def test_a_rank_that_has_proved_itself_and_contradicts_the_plan_ends_the_run(
    tmp_path, server, environ, outcome, text
):
    book = supervise(tmp_path, server, RANK.replace("STRANGERS", ""), **{"RANK": "1", **environ})
    assert (book.trouble.outcome, book.trouble.text[: len(text)]) == (outcome, text)


def test_the_secret_goes_over_no_socket(server):
    code = "from pytest_mlhpc.node.protocol.channel import RankChannel; RankChannel.from_environment()"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        channel = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        environ = environment(server, MLHPC_CHANNEL=channel, MLHPC_SECRET="confidential")
        with subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE) as rank:
            listening.settimeout(HANG_S)
            rank_end, _ = listening.accept()
            with rank_end, rank_end.makefile("rb") as lines:
                rank_end.sendall(b'{"kind":"challenge","challenge":"x"}\n')
                reported = lines.readline()
            rank.kill()
    assert b'"mac"' in reported
    assert b"confidential" not in reported


def accept_one(server):
    """Wait for a connection and return it."""
    found = []
    wait_for(lambda: found.extend(server.accept()) or found)
    return found[0]


def test_who_does_not_greet_in_time_is_a_stranger(server, monkeypatch):
    with socket.create_connection(addresses_of(server.channel)[0]):
        ours = accept_one(server)
        assert not ours.stranger
        later = time.monotonic() + PROOF_S + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert ours.stranger
        ours.close()


def test_addresses_are_tried_in_turn(server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        dead = other.getsockname()[1]
    channel = f"tcp://127.0.0.1:{dead},no-such-node.invalid:1,{server.channel[len('tcp://') :]}"
    code = (
        "from pytest_mlhpc.node.protocol.channel import RankChannel; RankChannel.from_environment().close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment(server, MLHPC_CHANNEL=channel)
    ) as rank:
        ours = accept_one(server)
        wait_for(ours.read)
        assert rank.wait(HANG_S) == 0
        ours.close()


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


@pytest.mark.parametrize(
    ("site", "run", "direct"),
    [
        (Site(("node1",), "node1"), {}, True),
        (Site(("node1",), "node1"), {"nodes": 2, "ranks": 2, "launcher": "torchrun"}, False),
        (Site(("node1", "node2"), "node1", slurm=True), {}, True),
        (Site(("node1", "node2"), "node2", slurm=True), {}, False),
        (Site(("node1", "node2"), "node1", slurm=True), {"nodes": 2, "ranks": 2, "launcher": "torchrun"}, False),
        (Site(("node1", "node2"), "node1", slurm=True), {"nodes": 2, "ranks": 2}, True),
        (Site(("node1", "node2"), "node1", slurm=True), {"launcher": "srun"}, False),
        (Site(("node1", "node2"), "node1", slurm=True), {"launcher": "torchrun", "launcher_options": ("--mpi=pmix",)}, False),
    ],
    ids=[
        "one node without Slurm", "several without Slurm", "one of Slurm's", "one of Slurm's, not ours", "several of Slurm's",
        "started once", "by srun", "what the site says of srun",
    ],
)  # fmt: skip
def test_a_batch_starts_itself_what_runs_on_its_own_node_alone(site, run, direct):
    assert site.direct(run_plan(**run)) is direct


@pytest.mark.parametrize("first", ["here", "there"])
def test_a_port_where_ranks_meet_is_no_ephemeral_one(first):
    low, high = nodes.ephemeral_ports()
    port = nodes.master_port(first, "here")
    assert port in nodes.DRAWN_PORTS
    assert not low <= port <= high


def test_consequences_of_a_lost_rank_are_not_what_is_named():
    book = RankBook(remote_run(), ("here", "there"))
    for number in range(2):
        assert book.greet({"rank": number, "purpose": "messages"}, 0)
    book.lost(1, None)
    book.say(0, "failed", {"outcome": "worker_exit", "text": "connection closed by peer"}, 0.0)
    assert book.trouble is None
    book.launcher_ended(1, "", is_rank=False)
    assert book.trouble.text == "rank 1 on there ended without a message"
