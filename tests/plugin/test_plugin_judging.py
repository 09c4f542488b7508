"""Baselines as a user meets them: new, kept, regressed, improved, missing, accepted."""

from __future__ import annotations

import shlex

import pytest

pytestmark = pytest.mark.servers  # several sessions of pytest in each test

SUITE = """
@script(f"echo rate: {os.environ.get('RATE', '100')}")
def test_it(run, baseline):
    assert run >= baseline

@script(f"echo rate: {os.environ.get('RATE', '100')}", name="silent")
def test_body_does_not_compare():
    pass
"""


@pytest.fixture
def judged(suite, monkeypatch):
    """A suite whose two tests were run once at a rate of 100."""
    suite.write(SUITE)
    suite.run().assert_outcomes(passed=2)

    def at(rate: float, *arguments: str, **options):
        monkeypatch.setenv("RATE", str(rate))
        return suite.run(*arguments, **options)

    return at


def test_a_first_run_on_an_unknown_machine_says_that_it_set_the_baseline(suite, workers):
    suite.write(SUITE)
    result = suite.run(n=workers)
    result.assert_outcomes(passed=2, warnings=0)
    result.stdout.fnmatch_lines(
        ["first runs on this machine: provisional baselines written:", "*provisional*.yaml"]
    )


def test_in_ci_a_missing_baseline_fails(suite, workers, monkeypatch):
    monkeypatch.setenv("CI", "true")
    suite.write(SUITE)
    result = suite.run(n=workers)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["no_baseline: *"])
    assert not (suite.state / "provisional").exists()


def test_on_a_site_a_missing_baseline_fails_until_it_is_accepted(suite, workers):
    suite.write(SUITE)
    result = suite.run(system="site", n=workers)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["no_baseline: *"])
    suite.run("--update-baselines", system="site", n=workers).assert_outcomes(passed=2)
    assert "name=test_it" in (suite.pytester.path / "baselines" / "site.yaml").read_text()
    suite.run(system="site", n=workers).assert_outcomes(passed=2)


def test_re_runs_that_share_an_allocation_confirm_as_others_do(judged):
    result = judged(50, "--pack")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*re-runs confirm it*"])
    result.stdout.no_fnmatch_line("*launch_failed*")


def test_a_regression_is_confirmed_by_reruns_and_explained(suite, judged, workers):
    result = judged(50, n=workers)
    result.assert_outcomes(failed=2)
    assert result.ret == 1
    # Workers report in no fixed order, so each line is looked for by itself.
    for line in (
        "E * assert run >= baseline",
        "E * the run has regressed",
        "*- why -*",
        "  rate: 50*baseline 100*",
        "  to accept the new value: mlhpc baseline accept*",
        "regressed: the run has regressed",
        "test_it?local:cpu?*50 items/s*100*-50.0 %*regressed",
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*truncated*")
    attempts = [record["attempt"] for record in suite.records() if "test_it[" in record["node_id"]]
    assert len(attempts) > 3  # the first night, tonight, and at least two re-runs


@pytest.mark.parametrize("way_out", ["pytest.skip('later')", "pytest.xfail('known')", "return"])
def test_a_body_that_bows_out_does_not_hide_a_regression(suite, monkeypatch, way_out):
    suite.write(f"""
    @script(f"echo rate: {{os.environ['RATE']}}")
    def test_it(run): {way_out}
    """)
    monkeypatch.setenv("RATE", "100")
    assert suite.run().ret == 0
    monkeypatch.setenv("RATE", "50")
    result = suite.run("--no-rerun")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["regressed: the run has regressed"])


def test_no_rerun_judges_by_the_first_attempt(suite, judged):
    judged(50, "--no-rerun")
    assert {record["attempt"] for record in suite.records()} == {0}


def test_reruns_of_a_session_are_limited(suite, judged):
    judged(50, "--max-reruns", "4")
    assert sum(record["attempt"] > 0 for record in suite.records()) <= 4


def test_update_baselines_accepts_a_slower_value(suite, judged, workers):
    judged(50, "--update-baselines", n=workers).assert_outcomes(passed=2)
    assert "value: 50" in (suite.pytester.path / "baselines" / "local.yaml").read_text()
    judged(50, n=workers).assert_outcomes(passed=2)


def test_an_improvement_passes_with_a_warning_even_where_warnings_are_errors(judged, workers):
    result = judged(200, "-W", "error", n=workers)
    result.assert_outcomes(passed=2, warnings=2)
    result.stdout.fnmatch_lines(["*ImprovedWarning: the run has improved", "*mlhpc baseline accept*"])


def test_a_run_that_is_not_judged_has_nothing_to_compare_with(suite):
    suite.write("""
    @job(judge=False)
    def test_it(run, baseline):
        assert run["rate"].value == 4
    @job(judge=False, name="compared")
    def test_compared(run, baseline):
        assert run >= baseline
    """)
    result = suite.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*no_baseline: this run is not judged*", "test_it*4 items/s*unjudged"])


def test_unused_baselines_are_told_by_a_whole_run_only(suite, judged):
    suite.write(SUITE.replace('name="silent"', 'name="renamed"'))
    result = suite.run()
    result.stdout.fnmatch_lines(["baseline entries that no test uses:", "*name=silent*"])
    suite.run("-k", "test_it").stdout.no_fnmatch_line("baseline entries that no test uses:")


STALE = "baseline entries that no test uses:"


def test_a_test_whose_run_broke_still_uses_its_baselines(suite, judged, workers):
    suite.write(SUITE.replace("echo rate:", "exit 3; echo rate:", 1))
    result = judged(100, n=workers)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.no_fnmatch_line(STALE)


@pytest.mark.parametrize(
    "arguments",
    [("-n", "2", "-k", "test_it"), ("-n", "2", "--deselect", "test_suite.py::test_body_does_not_compare")],
)
def test_workers_that_leave_tests_out_make_no_baseline_unused(suite, judged, arguments):
    result = judged(100, *arguments)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line(STALE)


def test_a_skipped_test_makes_no_baseline_unused(suite, judged):
    suite.write(SUITE.replace("@script", "@pytest.mark.skip\n@script", 1))
    result = judged(100)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.no_fnmatch_line(STALE)


def test_a_session_that_stops_early_makes_no_baseline_unused(suite, judged):
    suite.write("def test_first():\n    pass\n" + SUITE.replace("assert run >= baseline", "assert 0"))
    result = judged(100, "-x")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.no_fnmatch_line(STALE)


def test_commands_to_repeat_and_to_accept_name_folders_that_are_not_the_default(suite, tmp_path, workers):
    suite.write(SUITE.replace("os.environ.get('RATE', '100')", "pathlib.Path('rate').read_text()"))
    rate = suite.pytester.path / "rate"
    folders = (f"--state-dir={tmp_path / 'a state'}", f"--baselines-dir={tmp_path / 'accepted'}")
    rate.write_text("100")
    suite.run(*folders, "--update-baselines").assert_outcomes(passed=2)
    rate.write_text("50")
    result = suite.run(*folders, "--no-rerun", n=workers)
    result.assert_outcomes(failed=2)
    tail = shlex.join(folders)
    output = result.stdout.str()
    assert f"--system local:cpu {tail}" in output
    assert f"--reason TEXT {tail}" in output
