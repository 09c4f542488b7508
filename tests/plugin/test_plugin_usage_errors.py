"""What cannot be run is refused as a whole: all problems at once, exit code 4, no traceback, nothing started."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers  # each test is a pytest of its own


def refused(suite, workers, *texts: str, **options) -> None:
    result = suite.run(*options.pop("arguments", ()), n=workers, **options)
    output = result.stdout.str() + result.stderr.str()
    assert result.ret == 4, output
    for text in texts:
        assert output.count(text) == 1, output
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output
    assert suite.nothing_was_written()


def test_all_mistakes_of_all_tests_are_told_at_once(suite, workers):
    suite.write("""
    @pytest.mark.train("cosmoflw")
    def test_workload(run): pass

    @pytest.mark.train("cosmoflow", kernal_size=3)
    def test_field(run): pass

    @pytest.mark.train("cosmoflow")
    @pytest.mark.parametrize("devicez", [1, 2])
    def test_parameter(run): pass

    @pytest.mark.train("cosmoflow", devices=0)
    def test_value(run): pass

    @pytest.mark.train("cosmoflow", 4)
    def test_positional(run): pass

    @pytest.mark.train
    def test_bare(run): pass

    @pytest.mark.train("cosmoflow")
    @pytest.mark.job("command")
    def test_both(run): pass

    @job()
    def test_good(run): pass
    """)
    refused(
        suite,
        workers,
        "test_workload[local:cpu]: unknown workload 'cosmoflw'",
        "(did you mean 'kernel_size'?)",
        "test_parameter: devicez: neither an argument of the test nor a field of cosmoflow (did you mean 'devices'?)",
        "test_value[local:cpu]: devices: 0 is less than 1",
        "test_positional[local:cpu]: train takes the workload's name and then fields",
        "test_bare[local:cpu]: train takes the workload's name and then fields",
        "test_both[local:cpu]: is marked both train and job",
    )


def test_two_tests_with_one_key_are_both_named(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    suite.write("@job()\ndef test_it(run): pass\n", name="test_twin.py")
    refused(
        suite,
        workers,
        "test_twin.py::test_it[local:cpu]: name: has the same key as test_suite.py::test_it[local:cpu]",
    )


def test_a_method_of_a_testcase_cannot_be_marked(suite, workers):
    suite.write("""
    import unittest
    class TestIt(unittest.TestCase):
        @job()
        def test_it(self): pass
    """)
    refused(suite, workers, "TestIt::test_it: only test functions and methods of plain classes can be marked")


def test_an_unknown_system_is_named_with_the_nearest(suite, workers):
    suite.write("def test_plain(): pass")
    refused(suite, workers, "did you mean 'local'", system="locl")


def test_a_broken_systems_file_is_named_with_line(suite, workers):
    suite.write("def test_plain(): pass")
    suite.pytester.path.joinpath("systems.yaml").write_text(
        "schema: 1\nsystems:\n  local: {partitions: {cpu: {shceduler: local}}}\n"
    )
    refused(
        suite,
        workers,
        "systems.yaml:3: systems.local.partitions.cpu.shceduler: unknown key",
        "did you mean 'scheduler'",
    )


def test_a_scheduler_that_nobody_serves_is_told_before_anything_starts(suite, workers):
    suite.pytester.makeconftest(
        "from pytest_mlhpc.hookspecs import hookimpl\n"
        "@hookimpl\ndef mlhpc_schedulers(): return {'elsewhere': None}\n"
    )
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    text = "site:part: nobody serves scheduler 'elsewhere'"
    refused(suite, workers, text, arguments=["--system", "site"])


def test_a_preset_that_a_workload_lacks_is_refused(suite, workers):
    suite.write("""
    @pytest.mark.train("cosmoflow")
    def test_it(run): pass
    """)
    refused(suite, workers, "cosmoflow has no preset 'smokey'", arguments=["--preset", "smokey"])


def test_a_damaged_baseline_file_is_named_and_left_as_it_is(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    damaged = suite.pytester.mkdir("baselines") / "local.yaml"
    damaged.write_text("schema: 1\nsystem: local\nentries: [\n")
    refused(suite, workers, "local.yaml:")
    assert damaged.read_text() == "schema: 1\nsystem: local\nentries: [\n"


@pytest.mark.parametrize("name", ["a\\nb", "x" * 300, ""])
def test_names_that_cannot_be_shown_are_refused(suite, name):
    suite.write(f"""
    @job(name="{name}")
    def test_it(run): pass
    """)
    if name:
        refused(suite, 0, "is empty, too long or holds control characters")
    else:
        suite.run().assert_outcomes(passed=1)  # an empty name is the function's


@pytest.mark.parametrize("name", ["../../x", "$(touch pwned)", "a;b", "'\\\"", "ünïcode"])
def test_odd_names_do_no_harm(suite, name):
    suite.write(f"""
    @job(name="{name}")
    def test_it(run, baseline): assert run >= baseline
    """)
    suite.run().assert_outcomes(passed=1)
    suite.run().assert_outcomes(passed=1)
    assert not list(suite.pytester.path.rglob("pwned"))
    assert not (suite.state.parent / "x").exists()


def test_options_for_queues_are_refused_where_they_mean_nothing(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    for option in ("--detach", "--wait=50m"):
        refused(
            suite,
            workers,
            f"{option.partition('=')[0]}: nothing outlives pytest on local:cpu",
            arguments=[option],
        )


def test_a_path_that_resume_would_take_for_a_session_is_told_where_it_belongs(suite):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    refused(
        suite, 0, "put paths first: pytest test_suite.py --resume", arguments=["--resume", "test_suite.py"]
    )


def test_durations_and_budgets_that_are_none_are_named(suite):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    refused(suite, 0, "argument --wait: 'soon' is not", arguments=["--wait", "soon"])
    refused(suite, 0, "argument --budget: 'much' is not", arguments=["--budget", "much"])
