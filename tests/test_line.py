"""A line: whoever keeps the time ends an exchange at once, in whatever state its connection is."""

from __future__ import annotations

import socket
import threading

import pytest

from pytest_mlhpc.line import Line, LineCut


def test_who_waits_for_an_answer_is_woken_when_the_line_is_cut() -> None:
    ours, theirs = socket.socketpair()
    line = Line()
    line.hold(ours)
    read: list[bytes] = []
    waiting = threading.Thread(target=lambda: read.append(ours.recv(1)), daemon=True)
    waiting.start()
    line.cut("too slow")
    waiting.join(60)
    assert read == [b""]
    assert line.why == "too slow"
    line.release()
    ours.close()
    theirs.close()


def test_a_connection_that_comes_after_the_cut_is_refused_with_its_first_reason() -> None:
    line = Line()
    line.cut("too slow")
    line.cut("closed")
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(LineCut, match=r"^too slow$"):
        line.hold(ours)


def test_the_descriptor_is_our_own_so_that_the_socket_may_be_closed_or_wrapped() -> None:
    ours, theirs = socket.socketpair()
    line = Line()
    line.hold(ours)
    ours.close()
    line.cut("too slow")
    with theirs:
        theirs.settimeout(60)
        assert theirs.recv(1) == b""
    line.release()
    line.release()


def test_a_connection_that_was_let_go_is_not_cut() -> None:
    ours, theirs = socket.socketpair()
    line = Line()
    line.hold(ours)
    line.release()
    line.cut("too slow")
    with ours, theirs:
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
