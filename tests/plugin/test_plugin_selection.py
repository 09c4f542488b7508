"""pytest's own ways to choose and to stop: nothing is started that is not asked for, nothing is left running."""

from __future__ import annotations

import itertools

import pytest
from inner_sessions import ONE_JOB


@pytest.mark.parametrize(
    ("option", "tests", "code"),
    [
        ("--collect-only", "", 0),
        ("--setup-plan", "", 0),
        ("--setup-only", "", 0),
        ("-v", "import no_such_module\n", 2),
    ],
    ids=["--collect-only", "--setup-plan", "--setup-only", "a module that cannot be collected"],
)
def test_nothing_is_started(suite, option, tests, code):
    suite.write(ONE_JOB)
    suite.write(tests, name="test_other.py")
    assert suite.run(option).ret == code
    assert suite.nothing_was_written()


def test_the_target_comes_first_in_the_node_id(suite):
    suite.file("conftest.py", "def pytest_generate_tests(metafunc): metafunc.parametrize('other', ['o'])")
    (suite.folder / "systems.yaml").unlink()
    suite.write("""
    @job()
    @pytest.mark.parametrize("steps", [3])
    def test_it(run, other): pass
    """)
    suite.run("--collect-only", "-q").stdout.fnmatch_lines(["*::test_it?local:cpu-o-3?"])


def test_deselected_and_skipped_tests_are_not_started(suite):
    suite.write("""
    @script("echo rate: 1; : chosen")
    def test_chosen(run): pass
    @script("echo rate: 1; : other", name="other")
    def test_other(run): pass
    @pytest.mark.skip
    @script("echo rate: 1; : skip", name="skip")
    def test_chosen_skip(run): pass
    @pytest.mark.skipif("sys.version_info > (3,)", reason="new")
    @script("echo rate: 1; : skipif", name="skipif")
    def test_chosen_skipif(run): pass
    @pytest.mark.xfail(run=False, reason="hangs")
    @script("echo rate: 1; : xfail", name="xfail")
    def test_chosen_xfail(run): pass
    """)
    suite.run("-k", "chosen").expect(0, passed=1, skipped=2, xfailed=1, deselected=1)
    assert suite.started() == ["echo rate: 1; : chosen"]


def test_results_come_in_test_order_though_jobs_run_side_by_side(suite):
    """Each job waits until all have begun, so that they end only if they run at once."""
    suite.write("""
    @pytest.mark.parametrize("name", ["a", "b", "c", "d"])
    @script("touch begun-$$; until [ $(ls begun-* | wc -l) = 4 ]; do sleep 0.05; done; echo rate: 4",
            cwd=str(pathlib.Path.cwd()))
    def test_it(run): pass
    """)
    result = suite.run("-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"*::test_it?local:cpu-{name}? PASSED*" for name in "abcd"])


def test_max_jobs_limits_what_runs_at_once(suite):
    suite.write("""
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    @script("echo rate: 4")
    def test_it(run): pass
    """)
    suite.run("--max-jobs", "1").assert_outcomes(passed=3)
    spans = sorted((r["measurement"]["started_ns"], r["measurement"]["ended_ns"]) for r in suite.records())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


STOPPING = """
@job()
def test_first(run): assert False
@script("sleep 6000", name="long")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_long(run): pass
"""


@pytest.mark.parametrize("stop", ["-x", "--maxfail=1"])
def test_stopping_at_a_failure_cancels_the_rest(suite, stop):
    suite.write(STOPPING)
    suite.run(stop).expect(1, failed=1)


@pytest.mark.servers
def test_stopping_at_a_failure_frees_workers_that_wait(suite):
    suite.write(STOPPING)
    suite.run_workers("-x").expect(2, "*1 failed*")


def test_a_job_whose_test_ended_without_it_is_cancelled(suite):
    """One job runs at a time, so that the last one passes only when those before it are gone."""
    suite.write("""
    @pytest.fixture
    def broken(): raise RuntimeError("before the run is asked for")
    @script("sleep 6000")
    def test_broken(broken, run): pass
    @pytest.fixture
    def skipping(): pytest.skip("decided late")
    @script("sleep 6000", name="skipped")
    def test_skipping(skipping, run): pass
    @script("echo rate: 4", name="last")
    def test_last(run): pass
    """)
    suite.run("--max-jobs", "1").assert_outcomes(passed=1, errors=1, skipped=1)


def test_last_failed_runs_only_that(suite):
    suite.write("""
    @script("echo rate: 4; : good")
    def test_good(run): pass
    @script("echo nothing; : bad")
    def test_bad(run): pass
    """)
    suite.run().assert_outcomes(passed=1, failed=1)
    before = len(suite.started())
    suite.run("--lf").assert_outcomes(failed=1)
    assert suite.started()[before:] == ["echo nothing; : bad"]


def test_one_partition_of_a_system_and_several_systems(suite):
    suite.write(ONE_JOB.replace("()", "(judge=False)", 1))
    suite.run("--system", "site:part", "-v").expect(
        0, "*::test_it?local:cpu? PASSED*", "*::test_it?site:part? PASSED*", passed=2
    )


def test_runxfail_runs_what_is_marked_not_to_run(suite):
    suite.write(f"@pytest.mark.xfail(run=False, reason='hangs')\n{ONE_JOB}")
    suite.run("--runxfail").expect(0, passed=1)


#: Skipped when it is collected, and no longer when it is to run.
LATE = """
calls = []
@job()
@pytest.mark.skipif("calls.append(1) or len(calls) == 1", reason="at first")
def test_it(run): pass
"""


def test_a_test_that_was_to_be_skipped_and_runs_all_the_same_is_an_error_that_says_so(suite):
    suite.write(LATE)
    suite.run().expect(1, "*test_it?local:cpu?: nothing was submitted for this test*", errors=1)


@pytest.mark.servers
@pytest.mark.parametrize("distribution", ["loadgroup", "each"])
def test_however_xdist_distributes_each_job_runs_once(suite, distribution):
    suite.write("""
    @job()
    @pytest.mark.xdist_group("g")
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_it(run): assert run["rate"].value == 4
    """)
    suite.run_workers("--dist", distribution).expect(0)
    assert len(suite.records()) == 3
