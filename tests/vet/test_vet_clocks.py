"""Clocks of nodes: who is far from the others is named, of two both are, and what was measured too coarsely is not judged."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from judge_worlds import POLICY

from pytest_mlhpc.batch.wire import Wire
from pytest_mlhpc.vet.clocks import Clock, compare_clocks
from pytest_mlhpc.vet.course import Course
from pytest_mlhpc.vet.finding import Severity
from pytest_mlhpc.vet.leader import Leader
from pytest_mlhpc.vet.place import Place
from pytest_mlhpc.vet.rendezvous import Search, listen, version
from pytest_mlhpc.vet.settings import Settings

KEY = b"of this test"


def said(*ahead_s, error_s=0.001):
    clocks = [Clock(f"n{i}", ahead, error_s if i else 0.0) for i, ahead in enumerate(ahead_s)]
    return [finding for _, finding in compare_clocks(clocks, POLICY)]


def severities(*ahead_s, error_s=0.001):
    return [finding.severity.value for finding in said(*ahead_s, error_s=error_s)]


def test_clocks_that_agree_pass():
    assert severities(0.0, 0.002, -0.003, 0.4) == ["PASS"] * 4


def test_a_node_alone_is_compared_with_nobody():
    assert severities(0.0) == []


def test_one_that_is_seconds_off_is_warned_of_alone():
    assert severities(0.0, 0.001, 12.34) == ["PASS", "PASS", "WARNING"]
    assert said(0.0, 0.001, 12.34)[2].reason.startswith(
        "its clock is 12.3 s ahead of the median of 3 nodes; "
    )


def test_one_whose_credentials_would_be_refused_is_unfit():
    findings = said(0.0, 0.001, -400.0)
    assert [finding.severity.value for finding in findings] == ["PASS", "PASS", "CRITICAL"]
    assert "400.0 s behind the median of 3 nodes: credentials for jobs are refused" in findings[2].reason


def test_a_first_node_that_is_off_is_named_itself_and_not_the_others():
    assert severities(0.0, 400.0, 400.001, 400.002) == ["CRITICAL", "PASS", "PASS", "PASS"]


@pytest.mark.parametrize("apart", [1.5, 5000.0])
def test_of_two_that_differ_both_are_warned_of_and_name_each_other(apart):
    first, second = said(0.0, apart)
    assert (first.severity, second.severity) == (Severity.WARNING, Severity.WARNING)
    assert f"{apart:.1f} s behind n1's, and nobody can tell which is right" in first.reason
    assert f"{apart:.1f} s ahead of n0's" in second.reason


def test_where_half_are_off_nobody_is_unfit():
    assert severities(0.0, 0.0, 900.0, 900.0) == ["WARNING"] * 4


def test_what_was_measured_too_coarsely_is_not_judged():
    assert severities(0.0, 0.0, 2.0, error_s=3.0)[2] == "INFO"


def seated(hello_time):
    """Return what the leader knows of a second node's clock that greets with this time, or why it was refused."""
    place = Place(0, 2, "n0", ("n0", "n1"), ("127.0.0.1",))
    hello = {"rank": 1, "host": "n1", "of": version(), "time": hello_time}
    first, second = socket.socketpair(), socket.socketpair()
    leader, wire = Leader(place, KEY, Wire(first[0]), None), Wire(second[0])
    try:
        return leader._welcome(wire, json.dumps(hello)), leader.seats[1].clock
    finally:
        for one in (first[1], second[1]):
            one.close()
        wire.close()
        leader.close()


@pytest.mark.parametrize("time_told", [float("nan"), float("inf"), 1e308 * 10])
def test_a_time_that_is_none_is_no_clock(time_told):
    assert seated(time_told) == ("", None)


@pytest.mark.parametrize("time_told", [[1], {}, "noon", None, 10**400])
def test_a_time_that_is_no_number_refuses_the_greeting(time_told):
    assert seated(time_told) == ("its greeting cannot be read", None)


def test_a_node_says_its_time_and_the_leader_compares_it():
    listening = listen([0])
    port = listening.getsockname()[1]
    places = [Place(rank, 3, f"n{rank}", ("n0", "n1", "n2"), (f"127.0.0.1:{port}",)) for rank in range(3)]
    ours, first = socket.socketpair()
    leader = Leader(places[0], KEY, Wire(ours), listening)

    def agent(place, ahead_s):
        wire = Search(place, KEY, "", lambda: time.time() + ahead_s).meet(10.0, lambda: False)
        wire.send({"kind": "checks_done"})
        wires.append(wire)

    wires = [Wire(first)]
    wires[0].send({"kind": "checks_done"})
    threads = [
        threading.Thread(target=agent, args=(places[rank], off)) for rank, off in ((1, 0.0), (2, 500.0))
    ]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    course = Course(leader, Settings(no_load=True), POLICY, begun=begun, deadline=begun + 10.0)
    course._gather()
    course._compare_clocks()
    for thread in threads:
        thread.join()
    nodes = course.report().nodes
    for wire in wires:
        wire.close()
    leader.close()
    assert [[one.severity for outcome in node.outcomes for one in outcome.findings] for node in nodes] == [
        [], [], [Severity.CRITICAL],
    ]  # fmt: skip
