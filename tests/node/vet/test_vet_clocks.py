"""Clocks of nodes: who is far from the others is named, of two both are, and what was measured too coarsely is not judged."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from judge_worlds import POLICY

from pytest_mlhpc.node.agents.hub import greeting
from pytest_mlhpc.node.agents.wire import Wire, listen
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.judge import ClockOffset, compare_clocks
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.place import Search, VetPlace
from pytest_mlhpc.node.vet.vetting_run import VettingRun

KEY = b"of this test"


def said(*ahead_s, error_s=0.001):
    clocks = [ClockOffset(f"n{i}", ahead, error_s if i else 0.0) for i, ahead in enumerate(ahead_s)]
    return [finding for _, finding in compare_clocks(clocks, POLICY)]


@pytest.mark.parametrize(
    ("ahead_s", "error_s", "severities"),
    [
        ((0.0, 0.002, -0.003, 0.4), 0.001, "PASS PASS PASS PASS"),
        ((0.0,), 0.001, ""),
        ((0.0, 0.001, 12.34), 0.001, "PASS PASS WARNING"),
        ((0.0, 0.001, -400.0), 0.001, "PASS PASS CRITICAL"),
        ((0.0, 400.0, 400.001, 400.002), 0.001, "CRITICAL PASS PASS PASS"),
        ((0.0, 0.0, 900.0, 900.0), 0.001, "WARNING WARNING WARNING WARNING"),
        ((0.0, 0.0, 2.0), 3.0, "INFO INFO INFO"),
    ],
    ids=["they agree", "a node alone", "one is seconds off", "credentials of one would be refused",
         "the first is off", "half are off", "measured too coarsely"],
)  # fmt: skip
def test_a_clock_is_judged_by_the_others(ahead_s, error_s, severities):
    found = [finding.severity.value for finding in said(*ahead_s, error_s=error_s)]
    assert found == severities.split()


def test_a_clock_that_is_off_is_reported_with_by_how_much_and_what_follows():
    off = said(0.0, 0.001, 12.34)[2].reason
    assert off.startswith("its clock is 12.3 s ahead of the median of 3 nodes; ")
    refused = said(0.0, 0.001, -400.0)[2].reason
    assert "400.0 s behind the median of 3 nodes: credentials for jobs are refused" in refused


@pytest.mark.parametrize("apart", [1.5, 5000.0])
def test_of_two_that_differ_both_are_warned_of_and_name_each_other(apart):
    first, second = said(0.0, apart)
    assert first.severity is second.severity is Severity.WARNING
    assert f"{apart:.1f} s behind n1's, and which one is right is not known" in first.reason
    assert f"{apart:.1f} s ahead of n0's" in second.reason


def seated(hello_time):
    """Return what the leader knows of a second node's clock that greets with this time, or why it was refused."""
    place = VetPlace(0, 2, "n0", ("n0", "n1"), ("127.0.0.1",))
    hello = greeting(1, "n1", time=hello_time)
    (first, first_end), (second, second_end) = socket.socketpair(), socket.socketpair()
    leader = Leader(place, KEY, Wire(first), None)
    with first_end, second_end, contextlib.closing(leader), contextlib.closing(Wire(second)) as wire:
        _, refused = leader._hub._admit(wire, hello)
        return refused, leader.states[1].clock


@pytest.mark.parametrize(
    ("time_told", "refused"),
    [
        *[(none, "") for none in ("nan", "inf", "1e400")],
        *[
            (other, "its greeting cannot be read")
            for other in ([1], {}, "noon", None, 10**400, float("nan"), float("inf"))
        ],
    ],
)
def test_a_time_that_is_none_is_no_clock_and_what_is_no_number_refuses_the_greeting(time_told, refused):
    assert seated(time_told) == (refused, None)


def test_a_node_says_its_time_and_the_leader_compares_it():
    listening = listen([0])
    leaders = (f"127.0.0.1:{listening.getsockname()[1]}",)
    places = [VetPlace(rank, 3, f"n{rank}", ("n0", "n1", "n2"), leaders) for rank in range(3)]
    ours, first = socket.socketpair()
    leader = Leader(places[0], KEY, Wire(ours), listening)

    def agent(place, ahead_s):
        wire = Search(place, KEY, "", lambda: time.time() + ahead_s).meet(300.0, lambda: False)
        wire.send({"kind": "checks_done"})
        return wire

    begun = time.monotonic()
    course = VettingRun(leader, VetSettings(no_load=True), POLICY, begun=begun, deadline=begun + 300.0)
    with ThreadPoolExecutor(2) as threads:
        agents = threads.map(agent, places[1:], (0.0, 500.0))
        wires = [Wire(first)]
        wires[0].send({"kind": "checks_done"})
        course._gather()
        course._compare_clocks()
        wires += agents
    nodes = course.report().nodes
    for each in (*wires, leader):
        each.close()
    found = [[one.severity for outcome in node.outcomes for one in outcome.findings] for node in nodes]
    assert found == [[], [], [Severity.CRITICAL]]
