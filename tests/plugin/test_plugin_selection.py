"""pytest's own ways to choose and to stop: nothing is started that is not asked for, nothing is left running."""

import itertools


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
    suite.run("-o", "mlhpc_max_jobs=1").assert_outcomes(passed=3)
    spans = sorted((r["measurement"]["started_ns"], r["measurement"]["ended_ns"]) for r in suite.records())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


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
