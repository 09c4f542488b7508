"""Benchmarks in jobs of a real Grid Engine: on one host, on two, programs and trainings."""

from gridengine_service import HOSTS
from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, check_started, write_suite


def test_a_program_runs_once_on_one_host_and_its_record_names_job_and_host(suite):
    suite.tests(
        """
@script("echo rate: 4; uname -n; echo job $JOB_ID")
def test_one(run):
    assert run["rate"].value == 4
    print(run.output)
"""
    )
    result = suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert record["nodes"][0] in HOSTS
    assert f"job {record['job_id']}" in result.text
    assert suite.cluster.account(record["job_id"])["exit_status"] == "0"
    suite.ended_alone()


def test_files_artifacts_variables_and_ranks_are_the_same_as_on_this_machine(suite):
    write_suite(suite.folder, nodes=2, ranks=2)
    suite.run("test_files.py", "--mlhpc-pack").expect(
        1, *FAILS, *ERRORS, passed=TESTS, failed=len(FAILS), error=WITH_ERRORS
    )
    check_started(suite.records())
    # Hosts share a folder: what runs on both need is built once, and found by later sessions.
    assert [*suite.state.glob("builds/*/.complete")]
    assert not [*suite.state.glob("runs/*/*/builds")]
