"""Connections that can be cut: whoever keeps the time ends an exchange at once, in whatever state its connection is."""

import socket
import threading
from collections.abc import Iterator

import pytest

from pytest_mlhpc.config.http import CancellableConnection, LineCut


@pytest.fixture
def held() -> Iterator[tuple[CancellableConnection, socket.socket, socket.socket]]:
    """A line that holds a connection, and the sockets of both sides."""
    ours, theirs = socket.socketpair()
    line = CancellableConnection()
    line.hold(ours)
    with ours, theirs:
        yield line, ours, theirs
    line.release()


def test_who_waits_for_an_answer_is_woken_when_the_line_is_cut(held) -> None:
    line, ours, _ = held
    read: list[bytes] = []
    waiting = threading.Thread(target=lambda: read.append(ours.recv(1)), daemon=True)
    waiting.start()
    line.cut("too slow")
    waiting.join(120)
    assert read == [b""]
    assert line.why == "too slow"


def test_a_connection_that_comes_after_the_cut_is_refused_with_its_first_reason() -> None:
    line = CancellableConnection()
    line.cut("too slow")
    line.cut("closed")
    with socket.socket() as ours, pytest.raises(LineCut, match=r"^too slow$"):
        line.hold(ours)


def test_the_descriptor_is_our_own_so_that_the_socket_may_be_closed_or_wrapped(held) -> None:
    line, ours, theirs = held
    ours.close()
    line.cut("too slow")
    theirs.settimeout(120)
    assert theirs.recv(1) == b""


def test_a_connection_that_was_let_go_is_not_cut(held) -> None:
    line, ours, theirs = held
    line.release()
    line.cut("too slow")
    theirs.send(b"x")
    assert ours.recv(1) == b"x"
