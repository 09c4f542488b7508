"""pytest's own ways to choose and to stop: nothing is started that is not asked for, nothing is left running."""

from __future__ import annotations

import itertools

import pytest

pytestmark = pytest.mark.servers  # each test is a pytest of its own


def test_collect_only_starts_nothing(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    result = suite.run("--collect-only", "-q", n=workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["test_suite.py::test_it?local:cpu?"])
    assert suite.nothing_was_written()


@pytest.mark.parametrize("option", ["--setup-plan", "--setup-only"])
def test_plans_of_fixtures_start_nothing(suite, option):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    suite.run(option)
    assert suite.nothing_was_written()


def test_the_target_comes_first_in_the_node_id(suite):
    suite.pytester.makeconftest("def pytest_generate_tests(metafunc): metafunc.parametrize('other', ['o'])")
    suite.pytester.path.joinpath("systems.yaml").unlink()
    suite.write("""
    @job()
    @pytest.mark.parametrize("steps", [3])
    def test_it(run, other): pass
    """)
    suite.run("--collect-only", "-q").stdout.fnmatch_lines(["*::test_it?local:cpu-o-3?"])


def test_deselected_and_skipped_tests_are_not_started(suite, workers):
    suite.write("""
    @script("echo rate: 1; : wanted")
    def test_wanted(run): pass
    @script("echo rate: 1; : other", name="other")
    def test_other(run): pass
    @pytest.mark.skip
    @script("echo rate: 1; : skip", name="skip")
    def test_wanted_skip(run): pass
    @pytest.mark.skipif("sys.version_info > (3,)", reason="new")
    @script("echo rate: 1; : skipif", name="skipif")
    def test_wanted_skipif(run): pass
    @pytest.mark.xfail(run=False, reason="hangs")
    @script("echo rate: 1; : xfail", name="xfail")
    def test_wanted_xfail(run): pass
    """)
    result = suite.run("-k", "wanted", n=workers)
    result.assert_outcomes(passed=1, skipped=2, xfailed=1, deselected=0 if workers else 1)
    assert suite.started() == ["echo rate: 1; : wanted"]


def test_results_come_in_test_order_though_jobs_run_side_by_side(suite):
    suite.write("""
    @pytest.mark.parametrize("name", ["a", "b", "c", "d"])
    @script("sleep 1; echo rate: 4")
    def test_it(run): pass
    """)
    result = suite.run("-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"*::test_it?local:cpu-{name}? PASSED*" for name in "abcd"])
    began = [record["measurement"]["started_ns"] for record in suite.records()]
    assert max(began) - min(began) < 1e9  # all began before the first had ended


def test_max_jobs_limits_what_runs_at_once(suite):
    suite.write("""
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    @script("echo rate: 4")
    def test_it(run): pass
    """)
    suite.run("--max-jobs", "1").assert_outcomes(passed=3)
    spans = sorted((r["measurement"]["started_ns"], r["measurement"]["ended_ns"]) for r in suite.records())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("stop", [["-x"], ["--maxfail=1"]])
def test_stopping_at_a_failure_cancels_the_rest(suite, workers, stop):
    suite.write("""
    @job()
    def test_first(run): assert False
    @script("sleep 60", name="long")
    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_long(run): pass
    """)
    result = suite.run(*stop, n=workers)
    assert result.ret == (2 if workers else 1)  # xdist calls it an interruption
    assert "1 failed" in result.stdout.str()
    assert result.duration < 30


def test_a_job_whose_test_ended_without_it_is_cancelled(suite, workers):
    suite.write("""
    @pytest.fixture
    def broken(): raise RuntimeError("before the run is asked for")
    @script("sleep 60")
    def test_broken(broken, run): pass
    @pytest.fixture
    def skipping(): pytest.skip("decided late")
    @script("sleep 60", name="skipped")
    def test_skipping(skipping, run): pass
    @script("echo rate: 4", name="last")
    def test_last(run): pass
    """)
    result = suite.run(n=workers, system="local")
    result.assert_outcomes(passed=1, errors=1, skipped=1)
    assert result.duration < 30


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


def test_errors_of_collection_start_nothing(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    suite.write("import no_such_module", name="test_broken.py")
    assert suite.run(n=workers).ret == (1 if workers else 2)
    assert suite.nothing_was_written()


def test_one_partition_of_a_system_and_several_systems(suite):
    suite.write("""
    @job(judge=False)
    def test_it(run): pass
    """)
    result = suite.run("--system", "site:part", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_it?local:cpu? PASSED*", "*::test_it?site:part? PASSED*"])


def test_without_xdist_everything_still_works(suite):
    suite.write("""
    @job()
    def test_it(run, baseline): assert run >= baseline
    """)
    suite.run("-p", "no:xdist").assert_outcomes(passed=1)


def test_runxfail_runs_what_is_marked_not_to_run(suite, workers):
    suite.write("""
    @job()
    @pytest.mark.xfail(run=False, reason="hangs")
    def test_it(run): assert run["rate"].value == 4
    """)
    result = suite.run("--runxfail", n=workers)
    result.assert_outcomes(passed=1)
    assert result.ret == 0


def test_a_test_that_was_to_be_skipped_and_runs_all_the_same_is_an_error_that_says_so(suite, workers):
    suite.write("""
    calls = []
    @job()
    @pytest.mark.skipif("calls.append(1) or len(calls) == 1", reason="at first")
    def test_it(run): pass
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(errors=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*test_it?local:cpu?: nothing was submitted for this test*"])
