"""What becomes of a test: passed, failed, error; and of the session: its exit code. Nothing passes in silence."""

from __future__ import annotations

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
    "command_not_found": "pytest.mark.job('command', argv=['/no/such/program'], metrics=RATE)",
}

LOOKING = "@script('echo nothing')\ndef test_looking(run): raise SystemError('the body must not run')\n"

SKIPPED_IN_BODY = """
@job()
def test_it(): pytest.skip("in the body, after it is counted")
@job(name="x")
@pytest.mark.skipif(True, reason="no")
def test_x(run): pass
"""

#: Two nodes of this machine cannot be had.
INFRASTRUCTURE = "@job(nodes=2, devices=2)\ndef test_infrastructure(run): pass\n"


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
def test_a_broken_run_fails_its_test_though_the_body_never_looks(broken, shared_suite, outcome):
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


def test_infrastructure_trouble_is_a_setup_error_with_its_own_exit_code(suite):
    suite.write(INFRASTRUCTURE)
    suite.run("--infra-exit-code", "75", system="site").expect(
        75, "rejected: 2 nodes are wanted, this machine is one", errors=1, absent="*Traceback*"
    )


@pytest.mark.parametrize(
    ("beside", "outcomes"),
    [
        ("@job()\ndef test_bad(run): assert run['rate'].value == 5\n", {"errors": 1, "failed": 1}),
        ("import no_such_module\n", {"errors": 2}),
    ],
    ids=["a test that fails", "a module that does not import"],
)
def test_a_failure_beside_infrastructure_trouble_is_a_failure(suite, beside, outcomes):
    suite.write(INFRASTRUCTURE)
    suite.write(beside, name="test_beside.py")
    arguments = ["--continue-on-collection-errors", "--infra-exit-code", "75"]
    suite.run(*arguments, system="site").expect(1, **outcomes)


@pytest.mark.parametrize(
    ("body", "arguments", "code"),
    [
        ("def test_plain(): pass", (), 5),
        (f"@pytest.mark.skip\n{ONE_JOB}", (), 5),
        (ONE_JOB, ("-k", "nothing_like_it"), 5),
        ("@job(devices=64)\ndef test_it(run): pass", (), 5),
        (SKIPPED_IN_BODY, (), 0),
    ],
    ids=["nothing marked", "all skipped", "no test selected", "lacking devices", "skipped in its body"],
)
def test_a_session_that_measured_nothing_is_no_success(suite, body, arguments, code):
    suite.write(body)
    assert suite.run(*arguments).ret == code


def test_what_the_target_lacks_is_reported(suite):
    suite.write("""
    @job()
    @pytest.mark.parametrize("devices", [1, 64])
    def test_it(run): pass
    """)
    suite.run().expect(
        0, "*test_it?local:cpu-64?: a node of local:cpu has 1 cores, 64 ranks asked", passed=1, deselected=1
    )


def test_a_missing_metric_is_named_with_the_nearest(suite):
    suite.write("@job()\ndef test_it(run): run['rates']\n")
    suite.run().stdout.fnmatch_lines(
        ["*KeyError: *no metric 'rates' (did you mean 'rate'?); there are: rate*"]
    )


def test_other_comparisons_are_refused_with_a_sentence(suite):
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", ["gt", "lt", "le", "eq", "number"])
    def test_it(run, baseline, name):
        compare = {"gt": lambda: run > baseline, "lt": lambda: run < baseline, "le": lambda: run <= baseline,
                   "eq": lambda: run == baseline, "number": lambda: run >= 3}
        with pytest.raises(TypeError, match="write `run >= baseline`"):
            compare[name]()
    """)
    suite.run().assert_outcomes(passed=5)


def test_fixtures_name_the_tests_that_they_are_for(suite):
    suite.write("""
    def test_run(run): pass
    def test_allocation(allocation): pass
    @job()
    def test_vetting(vetting): pass
    """)
    suite.run().expect(
        1,
        "*this test declares no run: mark it train or job*",
        '*mark this one @pytest.mark.job("nodes", nodes=2, time_limit=600)*',
        '*`vetting` is for tests whose nodes are vetted: @pytest.mark.job("vet", nodes=4)',
        errors=3,
    )


def test_below_a_folder_that_a_group_shares_the_others_can_write_beside_us(suite):
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


@pytest.mark.servers
def test_workers_fail_broken_runs_and_one_that_dies_takes_only_its_test_along(suite):
    suite.write(f"""
@job()
def test_dies(run): os._exit(7)
{LOOKING}
@job(name="other")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_other(run): assert run["rate"].value == 4
""")
    suite.run_workers().expect(1, "*2 failed, 3 passed*", "metric_missing: *", absent="*SystemError*")
    assert len(suite.records()) == 5  # the worker that took its place submitted nothing again


@pytest.mark.servers
def test_workers_have_infrastructure_trouble_as_errors_with_its_exit_code(suite):
    suite.write(f"{INFRASTRUCTURE}@job(devices=64)\ndef test_lacking(run): pass\n")
    suite.run_workers("--infra-exit-code", "75", system="site").expect(
        75,
        "rejected: 2 nodes are wanted, this machine is one",
        "*test_lacking?site:part?: a node of site:part has 4 cores, 64 ranks asked",
        errors=1,
    )
