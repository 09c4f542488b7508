"""The fixture `allocation` on this machine: a test holds nodes and runs its own programs on them."""

import os

import pytest
from inner_sessions import data

from pytest_mlhpc.jobs.job import GrantedNodes
from pytest_mlhpc.session.allocation import Allocation

pytestmark = pytest.mark.servers  # held nodes are batches in processes of their own


@pytest.fixture(scope="module")
def session(shared_suite):
    """A session of tests that hold nodes one after the other."""
    shared_suite.write(data("suites/holding.py.txt"))
    return shared_suite.run()


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("programs[local:cpu]", id="runs its own programs"),
        pytest.param("afterwards", id="cannot use the nodes after it"),
        pytest.param("timeout[local:cpu]", id="keeps its nodes when a program takes too long"),
        pytest.param("left_running[local:cpu]", id="leaves nothing that a program left running"),
    ],
)
def test_a_test_that_holds_nodes(session, test):
    assert f"PASSED test_suite.py::test_{test}" in session.stdout.lines


def test_a_program_that_does_not_exist_is_named(session):
    assert session.ret == 1
    session.stdout.fnmatch_lines(
        ["*worker_exit: 'no-such-program' ended with exit code 127*", "*cannot start*"]
    )


def test_more_nodes_than_this_machine_are_not_run(session):
    session.stdout.fnmatch_lines(["*test_two_nodes*gives at most 1 node*, 2 asked*"])


def test_each_test_with_an_allocation_has_a_record_of_its_nodes(session, shared_suite):
    records = shared_suite.records()
    assert len(records) == 4
    for record in records:
        assert record["verdict"] == "unjudged"
        assert record["nodes"] == [os.uname().nodename]
        assert record["node_hours"] > 0
        assert record["failure"] == ""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ('"echo hi"', "give program and arguments as a list"),
        ("[]", "give program and arguments as a list"),
        ('["echo", None]', "None is neither text nor a number or a path"),
        ('["a\\0b"]', "holds a NUL character"),
        ('["true"], nodes=2', "nodes=2: .* has 1"),
        ('["true"], nodes=["other"]', r"nodes=\['other'\]: name one or more nodes"),
        ('["true"], ranks_per_node=0', "ranks_per_node=0: expected a whole number"),
        ('["true"], ranks_per_node=2, cores_per_rank=1', "2 ranks of 1 cores on a node; one of cpu has 1"),
        ('["true"], timeout=0', "timeout=0: expected seconds"),
        ('["true"], timeout=10**400', "0: expected seconds"),
        ('["true"], env={"A": 1}', "values are text"),
    ],
)
def test_a_wrong_call_names_what_is_wrong(tmp_path, call, text):
    allocation = Allocation(GrantedNodes("7", ("node1",), "cpu", 1, str(tmp_path)), lambda: None)
    with pytest.raises((TypeError, ValueError), match=text):
        eval(f"allocation.run({call})", {"allocation": allocation})  # noqa: S307 - the texts above
    assert list(tmp_path.iterdir()) == []


def test_the_next_test_does_not_wait_for_the_time_limit(suite):
    """Both want the whole machine, and `-o mlhpc_max_jobs=1` lets one job out at a time."""
    suite.write("""
        @nodes(time_limit=6000)
        def test_first(allocation): allocation.run(["true"]).check()
        @nodes(time_limit=6000)
        def test_unused(allocation): pass
        @nodes(time_limit=6000)
        def test_broken(allocation): assert False
        @script("echo rate: 4", exclusive=True, judge=False)
        def test_last(run): pass
    """)
    suite.run("-o", "mlhpc_max_jobs=1", "--mlhpc-pack").assert_outcomes(passed=3, failed=1)
    assert suite.verdicts() == ["unjudged"] * 4


def test_nodes_are_not_allocated_while_an_earlier_run_may_be_repeated(suite):
    """The first test's run is slower than its baseline: its re-runs need the machine that the second would hold."""
    suite.write("""
        @script("echo rate: $(cat rate)", exclusive=True, cwd=str(pathlib.Path.cwd()))
        def test_first(run, baseline): assert run >= baseline
        @nodes(time_limit=6000)
        def test_second(allocation): allocation.run(["true"]).check()
    """)
    suite.file("rate", "100")
    suite.run("--mlhpc-baseline=update").assert_outcomes(passed=2)
    suite.file("rate", "50")
    suite.run().expect(1, "*regressed*", passed=1, failed=1)


def test_a_test_is_failed_by_the_end_of_its_time_limit(suite):
    suite.write("""
        @nodes(time_limit=5)
        def test_it(allocation): allocation.run(["sleep", "6000"], timeout=6000)
    """)
    suite.run().expect(
        1, "*time_limit: <allocation *> ended before or while 'sleep' ran: the nodes were held*5 s*", failed=1
    )
    assert suite.verdicts() == ["time_limit"]
