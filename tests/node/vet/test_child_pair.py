"""Exchanges between two nodes' children: figures, and every way in which a partner fails."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from child_driver import PATIENCE_S, Child

from pytest_mlhpc.node.agents.nodes import free_port
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.vet.finding import CheckOutcome
from pytest_mlhpc.node.vet.load.arguments import Failed
from pytest_mlhpc.node.vet.load.link import STREAMS, Deadline, Link, Sockets, call
from pytest_mlhpc.node.vet.load.pair import agree, measure

MIB = 1 << 20


def orders(**args: object) -> tuple[dict[str, object], dict[str, object]]:
    """Return what the first and the second are told."""
    port = free_port()
    shared = {"address": "127.0.0.1", "port": port, "bytes": 4 * MIB, "rounds": 3, "timeout_s": 300.0, **args}
    return {**shared, "first": True}, {**shared, "first": False}


def exchange(pair: tuple[Child, Child], **args: object) -> list[CheckOutcome]:
    for child, order in zip(pair, orders(**args), strict=True):
        child.order("pair", **order)
    answers = [child.answer() for child in pair]
    assert all("outcome" in answer for answer in answers), answers
    return [from_json(CheckOutcome, answer["outcome"]) for answer in answers]


def start_long_exchange(pair: tuple[Child, Child], backend: str, timeout_s: float) -> None:
    """Have both begin an exchange of minutes; return once both compute, as who waits for its partner does not."""
    before = [child.cpu_s() for child in pair]
    commands = orders(backend=backend, timeout_s=timeout_s, bytes=64 * MIB, rounds=500)
    for child, order in zip(pair, commands, strict=True):
        child.order("pair", **order)
    for child in pair:
        assert child.next() is not None
    deadline = time.monotonic() + PATIENCE_S
    while any(child.cpu_s() < begun + 0.3 for child, begun in zip(pair, before, strict=True)):
        assert time.monotonic() < deadline, "nothing is exchanged"
        time.sleep(0.01)


@contextlib.contextmanager
def stopped(child: Child) -> Iterator[None]:
    child.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.process.send_signal(signal.SIGCONT)


@pytest.mark.servers
@pytest.mark.parametrize("backend", ["socket", "gloo"])
def test_both_sides_tell_the_same_figure(pair: tuple[Child, Child], backend: str) -> None:
    (one,), (other,) = (outcome.readings for outcome in exchange(pair, backend=backend, round=1))
    assert (one.key, one.unit, one.round) == (f"pair/{backend}/4096KiB", "B/s", 1)
    assert one.value == other.value > MIB


@pytest.mark.servers
@pytest.mark.parametrize(
    ("hanging", "why"), [(0, "dead"), (1, "absent")], ids=["the first hangs", "the second hangs"]
)
def test_a_partner_that_never_begins_is_reported_at_the_limit(
    pair: tuple[Child, Child], hanging: int, why: str
) -> None:
    """The first hears nobody come, the second is let in by the kernel or refused, and gets no answer."""
    with stopped(pair[hanging]):
        answer = pair[1 - hanging].ask("pair", **orders(timeout_s=0.5)[1 - hanging])
    assert answer["why"] == why, answer
    assert "within 0.5 s" in answer["error"]


@pytest.mark.long
@pytest.mark.servers
def test_a_partner_that_stops_in_the_middle_hangs_and_both_go_on(pair: tuple[Child, Child]) -> None:
    start_long_exchange(pair, "gloo", 90.0)
    with stopped(pair[1]):
        answer = pair[0].answer()
    assert answer["why"] == "hung", answer
    assert "error" in pair[1].answer()
    assert all(child.outcome("host_copy").readings == () for child in pair)


@pytest.mark.servers
def test_a_partner_that_is_killed_is_dead_long_before_the_limit_and_leaves_nothing(child: Child) -> None:
    with Child(environ={"GLOO_SOCKET_IFNAME": "lo"}) as second:
        second.ready()
        start_long_exchange((child, second), "gloo", 3600.0)
        second.process.kill()
        answer = child.answer()
        assert answer["why"] == "dead", answer
        assert second.next() is None  # no descendant of it holds its descriptor open
        assert second.process.wait() == -signal.SIGKILL
    assert child.outcome("host_copy").readings == ()


@pytest.mark.servers
def test_a_name_that_does_not_resolve_is_named(child: Child) -> None:
    answer = child.ask("pair", **orders(address="no-such-node.invalid")[1])
    assert answer["why"] == "name"
    assert "no-such-node.invalid does not resolve on this node" in answer["error"]


@pytest.mark.servers
def test_a_port_that_is_taken_is_named(child: Child) -> None:
    with socket.create_server(("", 0)) as taken:
        answer = child.ask("pair", **{**orders()[0], "port": taken.getsockname()[1]})
    assert answer["why"] == "port"
    assert "Address already in use" in answer["error"]


@pytest.mark.servers
def test_strangers_who_connect_change_nothing(pair: tuple[Child, Child]) -> None:
    first, second = orders(secret="ours")
    pair[0].order("pair", **first)
    assert pair[0].next() is not None
    with contextlib.ExitStack() as stack:
        connected(int(str(first["port"]))).close()
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"mlhpc": 2, "secret": "ours"}\n', b"[" * 10_000):
            stack.enter_context(connected(int(str(first["port"])))).sendall(words)
        with pytest.raises(Failed) as caught:
            call("127.0.0.1", int(str(first["port"])), b"theirs", {}, Deadline(PATIENCE_S))
        assert caught.value.why == "dead"
        pair[1].order("pair", **second)
        answers = [child.answer() for child in pair]
    assert all("outcome" in answer for answer in answers), answers


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the first does not listen"
            time.sleep(0.01)


@pytest.mark.servers
def test_sides_with_different_orders_refuse_each_other(pair: tuple[Child, Child]) -> None:
    first, second = orders()
    pair[0].order("pair", **first)
    assert pair[1].ask("pair", **{**second, "bytes": 5 * MIB})["why"] == "dead"
    answer = pair[0].answer()
    assert answer["why"] == "garbage"
    assert "both sides got different settings: size" in answer["error"]


ALIKE = {"torch": "2.9.0", "kind": "cuda", "devices": 4, "size": 1, "backend": "auto"}


@pytest.mark.parametrize(
    ("one", "other", "backend"),
    [
        ({}, {}, "nccl"),
        ({"kind": "rocm"}, {"kind": "rocm"}, "nccl"),
        ({}, {"devices": 3}, "socket"),
        ({"kind": "cpu"}, {"kind": "cpu"}, "socket"),
    ],
)
def test_devices_exchange_by_their_library_where_both_sides_are_alike(one, other, backend) -> None:
    assert agree({**ALIKE, **one}, {**ALIKE, **other}) == backend


def test_gloo_needs_the_same_torch_on_both_sides() -> None:
    gloo = {**ALIKE, "backend": "gloo"}
    with pytest.raises(Failed, match="gloo needs the same torch and devices on both nodes"):
        agree(gloo, {**gloo, "torch": "1.13.1"})


@dataclass
class Slow:
    """An exchange that takes a given time."""

    seconds: float
    count: int = 0
    size: int = 100

    def exchange(self) -> float:
        self.count += 1
        return self.seconds


@contextlib.contextmanager
def linked(timeout_s: float) -> Iterator[tuple[Link, Link, Deadline]]:
    """Give both ends of a connection, and the deadline of both."""
    deadline = Deadline(timeout_s)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield Link(one, deadline, "second"), Link(other, deadline, "first"), deadline


def measured(ways: tuple[Slow, Slow], rounds: int, timeout_s: float = 300.0) -> list[list[float]]:
    with linked(timeout_s) as (*ends, deadline), ThreadPoolExecutor(2) as both:
        sides = [
            both.submit(measure, end, way, rounds, deadline, first=number == 0)
            for number, (end, way) in enumerate(zip(ends, ways, strict=True))
        ]
        return [side.result() for side in sides]


def test_the_slower_sides_clock_counts_and_the_first_exchange_does_not() -> None:
    ways = (Slow(0.5), Slow(0.7))
    found, same = measured(ways, 3)
    assert (set(found), same) == ({0.7}, found)
    assert ways[0].count == len(found) + 1


def test_a_slow_partner_gets_as_many_rounds_as_fit() -> None:
    assert measured((Slow(200.0), Slow(200.0)), 9, timeout_s=240.0) == [[200.0], [200.0]]


def test_a_partner_that_moves_too_few_bytes_is_slow_and_not_hung() -> None:
    stop = threading.Event()

    def trickle(theirs: socket.socket) -> None:
        while not stop.wait(0.02):
            with contextlib.suppress(BlockingIOError):
                theirs.send(b"x", socket.MSG_DONTWAIT)
                theirs.recv(1024, socket.MSG_DONTWAIT)

    with linked(1.0) as (ours, theirs, deadline), ThreadPoolExecutor(1) as partner:
        trickling = partner.submit(trickle, theirs.socket)
        with pytest.raises(Failed, match=r"is too slow: .* of 128\.0 MiB within 1 s") as caught:
            Sockets([ours], 64 * MIB, deadline, "n2").exchange()
        stop.set()
        trickling.result()
    assert caught.value.why == "slow"


@pytest.mark.parametrize(("closing", "why"), [(False, "hung"), (True, "dead")])
def test_a_partner_that_moves_nothing_hangs_and_one_that_closes_is_dead(closing: bool, why: str) -> None:
    with linked(0.5) as (ours, theirs, deadline):
        if closing:
            theirs.close()
        with pytest.raises(Failed) as caught:
            Sockets([ours], 64 * MIB, deadline, "n2").exchange()
    assert caught.value.why == why


def test_nobody_at_the_other_end_is_distinguished_from_one_who_does_not_answer() -> None:
    with pytest.raises(Failed, match=r"nothing listened at 127\.0\.0\.1, port") as caught:
        call("127.0.0.1", free_port(), b"", {}, Deadline(0.3))
    assert caught.value.why == "dead"
    error = pytest.raises(Failed, match=r"did not answer within 0\.3 s")
    with socket.create_server(("127.0.0.1", 0)) as silent, error as caught:
        call("127.0.0.1", silent.getsockname()[1], b"", {}, Deadline(0.3))
    assert caught.value.why == "hung"


def test_a_line_without_end_is_given_up() -> None:
    with linked(300.0) as (one, other, _):
        other.socket.sendall(b"x" * 10_000)
        with pytest.raises(Failed, match="a line that is too long") as caught:
            one.receive()
    assert caught.value.why == "garbage"


def test_both_directions_use_several_connections() -> None:
    assert STREAMS > 1
