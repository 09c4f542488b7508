"""Baselines as a user meets them: new, kept, regressed, improved, missing, accepted; and history beside them."""

from __future__ import annotations

import shlex
import time
from types import SimpleNamespace

import pytest
from inner_sessions import output

from pytest_mlhpc.history.events import add, new_event
from pytest_mlhpc.unused import unused_baselines

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
    """Return how to run a suite at a rate, after its two tests were run once at a rate of 100."""
    suite.write(SUITE)
    written = "first runs on this machine: provisional baselines written:"
    suite.run().expect(0, written, "*provisional*.yaml", passed=2, warnings=0)

    def run_at(rate: float, *arguments: str, run=suite.run, **options):
        monkeypatch.setenv("RATE", str(rate))
        return run(*arguments, **options)

    return run_at


def test_in_ci_a_missing_baseline_fails(suite, monkeypatch):
    monkeypatch.setenv("CI", "true")
    suite.write(SUITE)
    suite.run().expect(1, "no_baseline: *", failed=2)
    assert not (suite.state / "provisional").exists()


def test_on_a_site_a_missing_baseline_fails_until_it_is_accepted(suite):
    suite.write(SUITE)
    suite.run(system="site").expect(1, "no_baseline: *", failed=2)
    suite.run("--update-baselines", system="site").assert_outcomes(passed=2)
    assert "name=test_it" in (suite.folder / "baselines" / "site.yaml").read_text()
    suite.run(system="site").assert_outcomes(passed=2)


def test_re_runs_that_share_an_allocation_confirm_as_others_do(judged):
    judged(50, "--pack").expect(1, "*re-runs confirm it*", failed=2, absent="*launch_failed*")


@pytest.mark.parametrize(
    "run", [pytest.param("run", id="alone"), pytest.param("run_workers", marks=pytest.mark.servers)]
)
def test_a_regression_is_confirmed_by_reruns_and_explained(suite, judged, run):
    lines = (
        "E * assert run >= baseline",
        "E * the run has regressed",
        "*- why -*",
        "  rate: 50*baseline 100*",
        "  to accept the new value: mlhpc baseline accept*",
        "regressed: the run has regressed",
        "test_it?local:cpu?*50 items/s*100*-50.0 %*regressed",
    )
    judged(50, run=getattr(suite, run)).expect(1, *lines, absent="*truncated*", failed=2)
    attempts = [record["attempt"] for record in suite.records() if "test_it[" in record["node_id"]]
    assert len(attempts) > 3  # the first night, tonight, and at least two re-runs


def test_a_body_that_bows_out_does_not_hide_a_regression(suite, monkeypatch):
    suite.write("""
    @script(f"echo rate: {os.environ['RATE']}")
    @pytest.mark.parametrize("name", ["skip", "xfail", "return"])
    def test_it(run, name):
        if name != "return": getattr(pytest, name)("no reason")
    """)
    monkeypatch.setenv("RATE", "100")
    assert suite.run().ret == 0
    monkeypatch.setenv("RATE", "50")
    result = suite.run("--no-rerun")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["regressed: the run has regressed"] * 3)
    assert {record["attempt"] for record in suite.records()} == {0}


def test_reruns_of_a_session_are_limited(suite, judged):
    judged(50, "--max-reruns", "4")
    assert sum(record["attempt"] > 0 for record in suite.records()) <= 4


def test_update_baselines_accepts_a_slower_value(suite, judged):
    judged(50, "--update-baselines").assert_outcomes(passed=2)
    assert "value: 50" in (suite.folder / "baselines" / "local.yaml").read_text()
    judged(50).assert_outcomes(passed=2)


def test_an_improvement_passes_with_a_warning_even_where_warnings_are_errors(judged):
    judged(200, "-W", "error").expect(
        0, "*ImprovedWarning: the run has improved", "*mlhpc baseline accept*", passed=2, warnings=2
    )


UNUSED = "baseline entries that no test uses:"


def test_unused_baselines_are_listed_by_a_whole_run_only(suite, judged):
    suite.write(SUITE.replace('name="silent"', 'name="renamed"'))
    suite.run().stdout.fnmatch_lines([UNUSED, "*name=silent*"])
    suite.run("-k", "test_it").stdout.no_fnmatch_line(UNUSED)


@pytest.mark.parametrize(
    ("tests", "arguments", "outcomes"),
    [
        (SUITE.replace("echo rate:", "exit 3; echo rate:", 1), (), {"passed": 1, "failed": 1}),
        (SUITE.replace("@script", "@pytest.mark.skip\n@script", 1), (), {"passed": 1, "skipped": 1}),
        (
            f"def test_first():\n    pass\n{SUITE.replace('assert run >= baseline', 'assert 0')}",
            ("-x",),
            {"passed": 1, "failed": 1},
        ),
    ],
    ids=["whose run broke", "that is skipped", "after which the session stops"],
)
def test_no_baseline_is_unused_because_of_a_test(suite, judged, tests, arguments, outcomes):
    suite.write(tests)
    judged(100, *arguments).expect(int("failed" in outcomes), absent=UNUSED, **outcomes)


@pytest.mark.parametrize(
    "option", ["keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob"]
)
def test_workers_that_leave_tests_out_make_no_baseline_unused(option):
    """They count what they leave out by themselves, so that the options alone tell their controller."""
    reporter = SimpleNamespace(stats={})
    session = SimpleNamespace(deselected=[], jobs={}, unused_baselines=lambda: ("a: rate",))
    for options, unused in ({option: None}, ["a: rate"]), ({option: "given"}, []):
        config = SimpleNamespace(args=[], option=SimpleNamespace(**options))
        assert unused_baselines(reporter, session, config) == unused


def test_commands_to_repeat_and_to_accept_name_folders_that_are_not_the_default(suite, judged, tmp_path):
    folders = (f"--state-dir={tmp_path / 'a state'}", f"--baselines-dir={tmp_path / 'accepted'}")
    judged(100, *folders, "--update-baselines").assert_outcomes(passed=2)
    result = judged(50, *folders, "--no-rerun").expect(1, failed=2)
    tail = shlex.join(folders)
    assert f"--system local:cpu {tail}" in result.stdout.str()
    assert f"--reason TEXT {tail}" in result.stdout.str()


def test_a_regression_names_the_event_that_was_noted_since_the_last_good_run(suite, judged):
    now_ns = time.time_ns()
    add(suite.state, new_event("local", "", "driver 570 to 580", at_ns=now_ns, by="me", now_ns=now_ns))
    judged(50, "--no-rerun").expect(1, "*noted on *: driver 570 to 580 (event *)*", failed=2)


def test_an_influx_that_does_not_answer_is_reported_once_and_fails_nothing(judged, monkeypatch):
    monkeypatch.setenv("MLHPC_INFLUX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MLHPC_INFLUX_PUSH", "no")
    printed = output(judged(100, "--history", "influx", "--infra-exit-code", "75").expect(75, passed=2))
    assert printed.count("history is read from the local store, as InfluxDB failed: ") == 1
