"""The fixture `allocation` on the real Slurm: nodes held by a job, programs of the test as its steps."""

import signal

import pytest
from faults import XDIST
from running_suites import text_of

#: A test that has two nodes and lets a program run on them until it is ended.
ENDLESS = """\
@nodes(count=2, time_limit=600)
def test_it(allocation):
    allocation.run(["sh", "-c", "touch {folder}/begun-one; exec sleep 600"], timeout=900)
"""


def states(suite) -> list[str]:
    """Return the states of the suite's jobs."""
    return [job.state for job in suite.jobs()]


def test_programs_run_on_the_nodes_of_the_job(suite):
    suite.tests(text_of(__file__, "held_nodes.py.txt"))
    result = suite.run(*XDIST)
    result.expect(0, passed=1)
    assert states(suite) == ["COMPLETED"]
    (record,) = result.records
    assert (record["verdict"], len(record["nodes"])) == ("unjudged", 2)
    assert record["node_hours"] > 0
    assert record["job_id"] == suite.jobs()[0].id


#: SIGTERM detaches jobs under Slurm, and nobody could go on with this one.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_session_leaves_no_allocated_nodes(suite, number):
    suite.tests(ENDLESS.format(folder=suite.folder) + """
@nodes(count=2, time_limit=600)
def test_next(allocation):
    pass
""")  # fmt: skip
    session = suite.begin("one")
    session.signal(number)
    result = session.end()
    result.expect(2)
    assert set(states(suite)) == {"CANCELLED"}
    record = next(record for record in result.records if "test_it" in record["node_id"])
    assert record["verdict"] == "cancelled"
    assert record["node_hours"] > 0


def test_a_job_that_somebody_cancels_is_reported_to_the_test(suite):
    suite.tests(ENDLESS.format(folder=suite.folder))
    session = suite.begin("one", options=["-o", "mlhpc_infra_exit_code=75"])
    suite.slurm.run("scancel", *(job.id for job in suite.jobs()))
    result = session.end()
    result.expect(75, "cancelled_outside: <allocation", "ended before or while 'sh' ran")
    assert result.verdicts() == ["cancelled_outside"]


def test_a_killed_session_leaves_its_nodes_to_the_next_that_gives_them_back(suite):
    suite.tests(ENDLESS.format(folder=suite.folder))
    session = suite.begin("one")
    session.kill()
    suite.tests("@nodes(count=2, time_limit=600)\ndef test_it(allocation): pass\n")
    suite.run().expect(0, "reaped", passed=1)
    assert states(suite) == ["CANCELLED", "COMPLETED"]


@pytest.mark.slow
def test_a_node_that_dies_is_named(own_slurm, make_suite):
    suite = make_suite(own_slurm)
    suite.tests(ENDLESS.format(folder=suite.folder))
    session = suite.begin("one", options=["-o", "mlhpc_infra_exit_code=75"])
    own_slurm.kill_node("node2")
    result = session.end()
    result.expect(75)
    assert "node2" in result.text.partition("node_failure: ")[2].splitlines()[0]
    assert result.verdicts() == ["node_failure"]
    own_slurm.start_node("node2")


def test_a_detached_session_asks_for_no_nodes_that_nobody_would_use(suite):
    suite.tests("@nodes(count=2, time_limit=600)\ndef test_it(allocation): pass\n")
    suite.run("--mlhpc-wait=0").expect(5, "no later session can go on with nodes that a test holds")
    assert set(states(suite)) <= {"CANCELLED"}
