"""What becomes of a test: passed, failed, error; and of the session: its exit code. Nothing passes in silence."""

import pytest
from inner_sessions import ONE_JOB

GOOD = """
@job()
@pytest.mark.parametrize("name", ["a", "b"])
def test_it(system, run, baseline, name):
    assert system.id == "local:cpu"
    assert run["rate"].value == 4.0
    assert run >= baseline
    assert "rate" in run and list(run) == ["rate"]
"""

BROKEN = {
    "metric_missing": "script('echo nothing')",
    "metric_invalid": "script('echo rate: nan')",
    "worker_exit": "script('echo rate: 4; exit 3')",
    "worker_killed": "script('echo rate: 4; kill -9 $$')",
    "time_limit": "script('echo rate: 4; sleep 600', time_limit=0.5)",
    "command_not_found": "program('/no/such/program', RATE)",
}

LOOKING = "@script('echo nothing')\ndef test_looking(run): raise SystemError('the body must not run')\n"


def test_a_good_run_passes_and_is_recorded(suite):
    suite.write(GOOD)
    suite.run().expect(
        0,
        "mlhpc: running on local:cpu*",
        "*benchmark*metric*value*baseline*change*verdict",
        "test_it?local:cpu-a?*new",
        passed=2,
    )
    assert sorted(record["node_id"] for record in suite.records()) == [
        "test_suite.py::test_it[local:cpu-a]",
        "test_suite.py::test_it[local:cpu-b]",
    ]
    suite.run().expect(0, "test_it?local:cpu-a?*4 items/s*4*+0.0 %*passed", passed=2)


@pytest.fixture(scope="module")
def broken(shared_suite):
    """A session whose runs break, each in a way of its own."""
    tests = [f"@{mark}\ndef test_{outcome}(): pass\n" for outcome, mark in BROKEN.items()]
    shared_suite.write("".join([*tests, LOOKING]))
    return shared_suite.run()


@pytest.mark.parametrize("outcome", BROKEN)
def test_a_broken_run_fails_its_test_whose_body_never_reads_it(broken, shared_suite, outcome):
    test = f"test_{outcome}[local:cpu]"
    broken.stdout.fnmatch_lines(
        [f"*_ {test.replace('[', '?').replace(']', '?')} _*", f"{outcome}: *",
         f"to repeat just this test: pytest *test_{outcome}?local:cpu?* --system local:cpu"],
    )  # fmt: skip
    verdicts = {record["node_id"].partition("::")[2]: record["verdict"] for record in shared_suite.records()}
    assert verdicts[test] == outcome


def test_a_session_of_broken_runs_shows_nothing_of_the_plugin(broken):
    broken.assert_outcomes(failed=len(BROKEN) + 1)
    assert broken.ret == 1
    broken.stdout.no_fnmatch_line("*plugin.py*")
    assert "\x1b" not in broken.stdout.str()  # progress is drawn on terminals only


def test_a_body_that_asks_for_a_broken_run_is_not_run(broken):
    broken.stdout.fnmatch_lines(["*_ test_looking?local:cpu? _*", "metric_missing: *"])
    broken.stdout.no_fnmatch_line("*SystemError*")


def test_in_a_folder_that_a_group_shares_its_other_users_can_write(suite):
    suite.state.mkdir()
    suite.state.chmod(0o2775)
    suite.write(ONE_JOB)
    assert suite.run().ret == 0
    made = {path.name: oct(path.stat().st_mode & 0o7777) for path in suite.state.iterdir() if path.is_dir()}
    assert made == dict.fromkeys(("ledger", "provisional", "records", "runs"), "0o2775")


@pytest.mark.servers
def test_workers_pass_runs_and_record_them(suite):
    suite.write(GOOD)
    suite.run_workers("--junitxml=out.xml").expect(
        0, "mlhpc: running on local:cpu*", "test_it?local:cpu-a?*new", passed=2
    )
    assert suite.verdicts() == ["new", "new"]
    assert 'name="mlhpc.metric.rate" value="4.0 items/s"' in (suite.folder / "out.xml").read_text()
