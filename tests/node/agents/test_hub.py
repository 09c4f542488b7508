"""The hub of an allocation: who may come, what strangers can do (nothing), and how a peer that dies in any state is told of."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pytest_mlhpc.node.agents import hub as hubs
from pytest_mlhpc.node.agents.hub import (
    MOST_STRANGERS,
    FirstNodeNotReached,
    FirstNodeRefuses,
    Hub,
    find_hub,
    greeting,
)
from pytest_mlhpc.node.agents.wire import MAX_HANDSHAKE, PROOF_S, Wire, address_of, greet, listen, proof

KEY, OTHER_KEY = b"of this allocation", b"of another one"

#: A guard against hangs, in seconds.
HANG_S = 120.0

PEERS = 2


class Owner:
    """Notes what a hub says. ``refusal`` is what it answers to who wants to come."""

    def __init__(self) -> None:
        self.refusal = ""
        self.admitted: list[tuple[int, str]] = []
        self.messages: list[tuple[int, str]] = []
        self.gone: list[tuple[int, str, bool]] = []

    def name_of(self, rank: int) -> str:
        return f"node {rank}"

    def admit(self, rank: int, name: str, hello: Mapping[str, Any], _wire: Wire, /) -> str:
        if not self.refusal:
            self.admitted.append((rank, str(hello.get("nick", name))))
        return self.refusal

    def receive(self, rank: int, message: Mapping[str, Any]) -> None:
        self.messages.append((rank, message["kind"]))

    def lost(self, rank: int, why: str, left: bool, /) -> None:
        self.gone.append((rank, why, left))


class Served:
    """A hub that a thread serves until the end."""

    def __init__(self, silence_s: float = HANG_S) -> None:
        self.owner, listening = Owner(), listen([0], "127.0.0.1")
        self.port = int(listening.getsockname()[1])
        self.hub = Hub(self.owner, KEY, PEERS + 1, listening, silence_s)
        self._opened: list[Wire] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.hub.until(self._stop.is_set, time.monotonic() + HANG_S)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(HANG_S)

    def close(self) -> None:
        self.end()
        self.hub.close({"kind": "over"}, 0.0)
        for wire in self._opened:
            wire.close()

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, (self.owner.messages, self.owner.gone)
            time.sleep(0.01)

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), HANG_S)

    def peer(self, rank: int, key: bytes = KEY, text: str = "") -> Wire:
        wire = Wire(self.call())
        self._opened.append(wire)
        greet(wire, key, lambda: text or greeting(rank, f"n{rank}"), HANG_S)
        return wire

    def spoken_to(self, rank: int) -> Wire:
        """Return a peer that the hub has admitted."""
        wire = self.peer(rank)
        wire.send({"kind": "hello"})
        self.wait(lambda: (rank, "hello") in self.owner.messages)
        return wire


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


def closed(stranger: socket.socket) -> bool:
    """Return whether the hub has closed the connection, once it has: it sends a challenge and nothing else."""
    with contextlib.suppress(ConnectionError):
        return all(b"challenge" in line for line in stranger.makefile("rb"))
    return True


GARBAGE = {
    "half a line": b'{"kind":"hel',
    "a megabyte without a newline": b"x" * (1 << 20),
    "binary": b"\xff\x00" * 100_000,
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no object": b"[1]\n",
    "nested": b"[" * 4000 + b"\n",
    "no kind": b'{"hello":"{}"}\n',
    "a kind that is none": b'{"kind":7}\n',
    "no proof": b'{"kind":"hello","hello":"{}"}\n',
    "a proof that is no text": b'{"kind":"hello","hello":"{}","mac":{"a":1},"challenge":[]}\n',
    "an order": b'{"kind":"over","exit":0}\n{"kind":"leaving","text":"x"}\n',
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_a_stranger_changes_nothing_and_a_peer_connects_at_the_same_time(served: Served, data: bytes) -> None:
    with served.call() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        served.spoken_to(1)
    assert (served.owner.admitted, served.owner.gone) == ([(1, "n1")], [])


@pytest.mark.parametrize("name", [name for name in GARBAGE if name != "half a line"])
def test_who_says_what_is_no_proof_is_cut_off_at_once(served: Served, name: str) -> None:
    with served.call() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(GARBAGE[name])
        assert closed(stranger)


def test_who_holds_another_key_is_not_let_in_and_learns_nothing(served: Served) -> None:
    with pytest.raises(OSError, match="no welcome from there"):
        served.peer(1, OTHER_KEY)
    assert served.owner.admitted == []


def test_a_greeting_that_was_heard_on_another_connection_is_of_no_use(served: Served) -> None:
    with served.call() as first, served.call() as second:
        challenges = [json.loads(one.makefile("rb").readline())["challenge"] for one in (first, second)]
        text = greeting(1, "n1")
        mac = proof(KEY, "agent", challenges[0], "ours", text)
        replayed = (
            json.dumps({"kind": "hello", "hello": text, "challenge": "ours", "mac": mac}).encode() + b"\n"
        )
        second.sendall(replayed)
        assert closed(second)
        first.sendall(replayed)
        assert json.loads(first.makefile("rb").readline())["kind"] == "welcome"


def test_a_proof_of_the_hub_is_none_of_a_peer(served: Served) -> None:
    with served.call() as stranger:
        challenge = json.loads(stranger.makefile("rb").readline())["challenge"]
        mac = proof(KEY, "hub", challenge, "ours", greeting(1, "n1"))
        stranger.sendall(
            json.dumps({"kind": "hello", "hello": greeting(1, "n1"), "mac": mac}).encode() + b"\n"
        )
        assert closed(stranger)


def test_a_thousand_connections_that_say_nothing_keep_no_peer_away(served: Served) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(1000):
            crowd.enter_context(served.call())
        served.spoken_to(1)
        served.wait(lambda: len(served.hub._strangers) <= MOST_STRANGERS + PEERS + 1)
    assert served.owner.admitted == [(1, "n1")]


def test_who_has_not_proved_itself_in_time_is_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "PROOF_S", 0.2)
    with served.call() as stranger:
        stranger.sendall(b'{"kind":"hel')
        assert closed(stranger)
    assert MAX_HANDSHAKE <= 4096
    assert PROOF_S <= 30.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "its greeting cannot be read"),
        ("[1]", "its greeting cannot be read"),
        ('{"rank":NaN,"name":"x"}', "its greeting cannot be read"),
        ('{"rank":"one","name":"x"}', "its greeting cannot be read"),
        ('{"rank":1}', "its greeting cannot be read"),
        (greeting(0, "n0"), "it is number 0, but there are 3"),
        (greeting(PEERS + 1, "n9"), "it is number 3, but there are 3"),
        (greeting(10**30, "n9"), "but there are 3"),
        (greeting(-1, "n9"), "it is number -1"),
    ],
    ids=[
        "nothing",
        "no object",
        "no number",
        "a word",
        "no name",
        "the first",
        "beyond the last",
        "huge",
        "below",
    ],
)
def test_a_peer_with_the_key_and_without_a_place_is_refused_with_the_reason(
    served: Served, text: str, why: str
) -> None:
    with pytest.raises(ConnectionError, match=why):
        served.peer(1, text=text or " ")
    assert served.owner.admitted == []


def test_a_peer_that_the_owner_refuses_gets_the_reason_and_may_connect_again(served: Served) -> None:
    served.owner.refusal = "it is too early"
    with pytest.raises(ConnectionError, match="it is too early"):
        served.peer(1)
    served.owner.refusal = ""
    served.spoken_to(1)


def test_a_second_process_of_one_rank_is_refused_and_the_first_stays(served: Served) -> None:
    first = served.spoken_to(1)
    with pytest.raises(ConnectionError, match="node 1 has come before"):
        served.peer(1)
    first.send({"kind": "more"})
    served.wait(lambda: (1, "more") in served.owner.messages)


def test_who_went_before_it_said_anything_may_come_again(served: Served) -> None:
    served.peer(1).close()
    served.wait(lambda: served.owner.gone)
    served.spoken_to(1)
    assert [rank for rank, _ in served.owner.admitted] == [1, 1]


@pytest.mark.parametrize("farewell", [True, False], ids=["it says so", "it is killed"])
def test_a_peer_that_goes_is_lost_once_and_cannot_come_again(served: Served, farewell: bool) -> None:
    wire = served.spoken_to(1)
    if farewell:
        wire.send({"kind": "leaving", "text": "its pod is being ended"})
    wire.close()
    served.wait(lambda: served.owner.gone)
    why = "its pod is being ended" if farewell else "it closed the connection"
    assert served.owner.gone == [(1, why, farewell)]
    with pytest.raises(ConnectionError, match="has come before"):
        served.peer(1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"kind":"half', "it closed the connection"),
        (b"garbage\n", "it sent something that is no message"),
        (b'{"kind":"done"}\ngarbage\n', "it sent something that is no message"),
    ],
)
def test_a_peer_that_dies_in_a_line_or_babbles_is_lost(served: Served, data: bytes, why: str) -> None:
    wire = served.spoken_to(1)
    wire.socket.setblocking(True)
    wire.socket.sendall(data)
    if not data.endswith(b"\n"):
        wire.close()
    served.wait(lambda: served.owner.gone)
    assert served.owner.gone == [(1, why, False)]
    served.spoken_to(2)


def test_a_peer_that_gives_no_sign_of_life_is_lost_and_one_that_does_is_not() -> None:
    served = Served(silence_s=3.0)
    try:
        alive, dead = served.spoken_to(1), served.spoken_to(2)
        while not served.owner.gone:
            alive.tend(3.0)
            alive.read()
            time.sleep(0.05)
        assert served.owner.gone == [(2, "no sign of life for 3 s", False)]
        assert not alive.ended
        dead.read()
        assert dead.ended
    finally:
        served.close()


def test_a_peer_that_was_not_read_for_long_is_not_silent(served: Served) -> None:
    wire = served.spoken_to(1)
    served.end()
    wire.send({"kind": "late"})
    served.hub._silence_s = 0.0
    served.hub.peers[1].heard = 0.0
    served.hub._tend_all(time.monotonic())
    assert served.owner.gone == []


def test_a_paused_hub_reads_no_peer_and_goes_on_after(served: Served) -> None:
    wire = served.spoken_to(1)
    served.end()
    served.hub.paused = True
    wire.send({"kind": "late"})
    served.hub.until(lambda: False, time.monotonic() + 0.3)
    before = list(served.owner.messages)
    served.hub.paused = False
    served.hub.until(lambda: (1, "late") in served.owner.messages, time.monotonic() + HANG_S)
    assert (before, served.owner.messages) == ([(1, "hello")], [(1, "hello"), (1, "late")])


def test_all_peers_hear_that_it_is_over_before_their_connections_end(served: Served) -> None:
    wires = [served.spoken_to(rank) for rank in (1, 2)]
    served.end()
    closing = threading.Thread(target=served.hub.close, args=({"kind": "over", "exit": 3}, HANG_S))
    closing.start()
    said: list[list[Mapping[str, Any]]] = [[], []]
    for number, wire in enumerate(wires):
        served.wait(lambda number=number, wire=wire: said[number].extend(wire.read()) or said[number])
        wire.close()
    closing.join(HANG_S)
    assert said == [[{"kind": "over", "exit": 3}]] * 2
    assert served.owner.gone == []


def find(places: list[tuple[str, int]] | Callable[[], Any], rounds: int = 1, key: bytes = KEY) -> Wire:
    left = [None] * (rounds - 1)
    return find_hub(
        places if callable(places) else lambda: places,
        key,
        lambda: greeting(1, "n1"),
        limit_s=HANG_S,
        each_s=HANG_S,
        pause=lambda: bool(left) and left.pop() is None,
    )


def test_the_first_node_is_found_behind_an_address_at_which_nothing_listens(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        dead = nobody.getsockname()[1]
    with contextlib.closing(find([("127.0.0.1", dead), ("127.0.0.1", served.port)])) as wire:
        assert wire.trusted


def test_an_address_that_is_announced_later_is_found(served: Served) -> None:
    reported: list[list[tuple[str, int]]] = [[("127.0.0.1", served.port)]]

    def places() -> list[tuple[str, int]]:
        if len(reported) == 1:
            reported.append([])
            raise ValueError("its address is missing")
        return reported[0]

    with contextlib.closing(find(places, rounds=2)) as wire:
        assert wire.trusted


def test_who_finds_no_first_node_says_what_was_tried(served: Served) -> None:
    with pytest.raises(FirstNodeNotReached, match=f"port {served.port}: no welcome from there"):
        find([("127.0.0.1", served.port)], key=OTHER_KEY)


def test_who_is_refused_does_not_try_again(served: Served) -> None:
    served.owner.refusal = "there are enough"
    with pytest.raises(FirstNodeRefuses, match="there are enough"):
        find([("127.0.0.1", served.port)], rounds=1000)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host", ("host", 0)),
        ("host:77", ("host", 77)),
        ("10.0.0.1:77", ("10.0.0.1", 77)),
        ("fe80::1", ("fe80::1", 0)),
        ("[fe80::1]:77", ("fe80::1", 77)),
        ("[fe80::1]", ("fe80::1", 0)),
    ],
)
def test_an_address_is_read_with_its_port(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text", ["", ":77", "host:x", "host:0", "host:65536", "host:-1", "[]:7", "host:\u0667"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none"):
        address_of(text)
