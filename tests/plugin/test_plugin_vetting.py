"""Nodes are vetted before anything is measured on them: here on this machine, whose processors are what they are."""

import signal
import sys

import pytest
from inner_sessions import data
from running_suites import wait_for

pytestmark = pytest.mark.servers  # vetting loads this machine


#: What vetting loads this machine by.
LOADS = "pytest_mlhpc.node.vet.load.main"

BARE = f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n'

MEASURED = """
@workload("nbody", bodies=64, devices_per_node=1, steps=2, warmup=1, time_limit=6000)
def test_it(run): assert run["step_time"].value > 0
"""


def describe(suite) -> None:
    suite.file("systems.yaml", data("suites/vetted.yaml"))
    suite.file("bare", BARE).chmod(0o755)


@pytest.fixture(scope="module")
def session(shared_suite):
    """A session that measures on a fit node and on one that is not what it should be."""
    describe(shared_suite)
    shared_suite.write(MEASURED)
    return shared_suite.run("--system", "local:unfit", system="local:fit")


def test_a_run_on_a_fit_node_has_in_its_record_what_was_found(session, shared_suite):
    fit = shared_suite.record("[local:fit]")
    assert fit["vetting"]["level"] == "quick"
    assert fit["vetting"]["fit"] == fit["nodes"]
    assert fit["vetting"]["unfit"] == {}


def test_nothing_is_measured_on_a_node_that_is_not_what_it_should_be(session, shared_suite):
    session.assert_outcomes(passed=1, errors=1)
    assert session.ret == 1
    session.stdout.re_match_lines(
        [r"unfit_nodes: 0 of 1 nodes are fit, 1 are needed; \S+: \[node_problem\] .*77.*"]
    )
    unfit = shared_suite.record("[local:unfit]")
    assert unfit["verdict"] == "unfit_nodes"
    assert list(unfit["vetting"]["unfit"]) == unfit["nodes"]
    assert "measurement" not in unfit


def vettings(suite) -> int:
    return len(list(suite.state.glob("runs/*/*/*-vet/verdict.json")))


def test_checks_are_tests_of_one_vetting(suite):
    describe(suite)
    suite.write("""
    @nodes(vet="quick", unknown="warn")
    @pytest.mark.parametrize("check", ["edac", "inventory"])
    def test_node(vetting, check): assert vetting.trouble(check) == []
    """)
    suite.run(system="local:unvetted_unfit").expect(
        1,
        "FAILED test_suite.py::test_node?local:unvetted_unfit-inventory? - *",
        "*test_node?local:unvetted_unfit-inventory?*nodes*0/1 fit, without *unjudged",
        passed=1,
        failed=1,
    )
    assert vettings(suite) == 1


def test_vettings_that_differ_in_what_they_ask_are_not_shared(suite):
    describe(suite)
    suite.write("""
    @nodes(vet="quick", unknown="warn")
    def test_mild(vetting): assert vetting.good
    @nodes(vet="quick", unknown="fail")
    def test_strict(vetting): assert not vetting.good
    """)
    suite.run(system="local:unvetted").assert_outcomes(passed=2)
    assert vettings(suite) == 2


def test_a_session_killed_while_it_vets_leaves_no_process_and_nothing_that_the_next_one_minds(suite):
    describe(suite)
    suite.write(MEASURED)
    with suite.start(system="local:fit") as process:
        wait_for(lambda: suite.processes(program=LOADS) or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    suite.run(system="local:fit").assert_outcomes(passed=1)
    assert not list((suite.state / "ledger").glob("*.jsonl"))
    (record,) = suite.records()
    assert record["vetting"]["fit"] == record["nodes"]
