"""What becomes of a test: passed, failed, error; and of the session: its exit code. Nothing passes in silence."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers  # each test is a pytest of its own


def test_a_good_run_passes_and_is_recorded(suite, workers):
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_it(system, run, baseline, name):
        assert system.id == "local:cpu"
        assert run["rate"].value == 4.0
        assert run >= baseline
        assert "rate" in run and list(run) == ["rate"]
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "mlhpc: running on local:cpu*",
            "*benchmark*metric*value*baseline*change*verdict",
            "test_it?local:cpu-a?*new",
        ]
    )
    assert sorted(record["node_id"] for record in suite.records()) == [
        "test_suite.py::test_it[local:cpu-a]",
        "test_suite.py::test_it[local:cpu-b]",
    ]
    again = suite.run(n=workers)
    again.assert_outcomes(passed=2)
    again.stdout.fnmatch_lines(["test_it?local:cpu-a?*4 items/s*4*+0.0 %*passed"])


BROKEN = {
    "metric_missing": "script('echo nothing')",
    "metric_invalid": "script('echo rate: nan')",
    "worker_exit": "script('echo rate: 4; exit 3')",
    "worker_killed": "script('echo rate: 4; kill -9 $$')",
    "time_limit": "script('echo rate: 4; sleep 60', time_limit=0.5)",
    "command_not_found": "pytest.mark.job('command', argv=['/no/such/program'], metrics=RATE)",
}


@pytest.mark.parametrize("outcome", BROKEN)
def test_a_broken_run_fails_its_test_though_the_body_never_looks(suite, outcome):
    suite.write(f"""
    @{BROKEN[outcome]}
    def test_it(): pass
    """)
    result = suite.run()
    result.assert_outcomes(failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [f"{outcome}: *", "to repeat just this test: pytest *test_it?local:cpu?* --system local:cpu"]
    )
    result.stdout.no_fnmatch_line("*plugin.py*")
    assert [record["verdict"] for record in suite.records()] == [outcome]


def test_a_broken_run_fails_in_the_call_phase_under_xdist_too(suite, workers):
    suite.write("""
    @script("echo nothing")
    def test_it(run): raise SystemError("the body must not run")
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["metric_missing: *"])
    result.stdout.no_fnmatch_line("*SystemError*")


def test_infrastructure_trouble_is_a_setup_error_with_its_own_exit_code(suite, workers):
    suite.write("""
    @job(nodes=2, devices=2)
    def test_it(run): pass
    """)
    result = suite.run("--infra-exit-code", "75", system="site", n=workers)
    result.assert_outcomes(errors=1)
    assert result.ret == 75
    result.stdout.fnmatch_lines(["rejected: 2 nodes are wanted, this machine is one"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_failure_beside_infrastructure_trouble_is_a_failure(suite, workers):
    suite.write("""
    @job(nodes=2, devices=2)
    def test_infra(run): pass
    @job()
    def test_bad(run): assert run["rate"].value == 5
    """)
    assert suite.run("--infra-exit-code", "75", system="site", n=workers).ret == 1


def test_a_module_that_does_not_import_beside_infrastructure_trouble_is_a_failure(suite, workers):
    suite.write("""
    @job(nodes=2, devices=2)
    def test_infra(run): pass
    """)
    suite.write("import no_such_module", name="test_broken.py")
    arguments = ["--continue-on-collection-errors", "--infra-exit-code", "75"]
    result = suite.run(*arguments, system="site", n=workers)
    result.assert_outcomes(errors=2)
    assert result.ret == 1


@pytest.mark.parametrize(
    "body",
    [
        "def test_plain(): pass",
        "@job()\n    @pytest.mark.skip\n    def test_it(run): pass",
        "@job()\n    def test_it(): pytest.skip('in the body, before it is counted')\n    @job(name='x')\n    @pytest.mark.skipif(True, reason='no')\n    def test_x(run): pass",
        "@job(devices=64)\n    def test_it(run): pass",
    ],
    ids=["nothing-marked", "all-skipped", "skipped-in-body", "lacking-devices"],
)
def test_a_session_that_measured_nothing_is_no_success(suite, workers, body):
    suite.write(f"\n    {body}\n")
    expected = 0 if "in the body" in body else 5
    assert suite.run(n=workers).ret == expected


def test_no_test_selected_is_no_success(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    assert suite.run("-k", "nothing_like_it", n=workers).ret == 5


def test_what_the_target_lacks_is_told(suite, workers):
    suite.write("""
    @job()
    @pytest.mark.parametrize("devices", [1, 64])
    def test_it(run): pass
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(passed=1, deselected=0 if workers else 1)
    result.stdout.fnmatch_lines(["*test_it?local:cpu-64?: a node of local:cpu has 1 cores, 64 ranks asked"])


def test_a_missing_metric_is_named_with_the_nearest(suite):
    suite.write("""
    @job()
    def test_it(run): run["rates"]
    """)
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


def test_a_test_that_is_not_marked_cannot_have_a_run(suite):
    suite.write("""
    def test_it(run): pass
    """)
    result = suite.run()
    result.stdout.fnmatch_lines(["*this test declares no run: mark it train or job*"])
    result.assert_outcomes(errors=1)


def test_below_a_folder_that_a_group_shares_the_others_can_write_beside_us(suite):
    suite.state.mkdir()
    suite.state.chmod(0o2775)
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    assert suite.run().ret == 0
    made = {path.name: oct(path.stat().st_mode & 0o7777) for path in suite.state.iterdir() if path.is_dir()}
    assert made == dict.fromkeys(("ledger", "provisional", "records", "runs"), "0o2775")
