"""A test that cannot run is one error, with its place and what to do; all others go on."""

import pytest
from inner_sessions import ONE_JOB, cases, output

WRONG = cases("wrong_tests.yaml")


def assert_named(result, texts):
    printed = output(result)
    assert result.ret == 1, printed
    assert [text for text in texts if text not in printed] == [], printed
    assert "Traceback" not in printed


def write(suite, case):
    suite.write(case["tests"])
    for file, text in case.get("files", {}).items():
        suite.file(file, text)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_run_is_an_error_of_its_own(suite, name):
    case = WRONG[name]
    write(suite, case)
    if good := case.get("good", 0):
        suite.write(ONE_JOB, "test_good.py")
    result = suite.run(*case.get("options", "").split(), system=case.get("system", "local"))
    assert_named(result, case["printed"])
    result.assert_outcomes(errors=case["errors"], passed=good)
    assert len(suite.started()) == good


def test_collecting_lists_all_mistakes_and_fails(suite):
    case = WRONG["all mistakes of all tests"]
    write(suite, case)
    result = suite.run("--collect-only", "-q")
    assert_named(result, case["printed"])
    assert [output(result).count(text) for text in case["printed"]] == [1] * len(case["printed"])
    assert suite.nothing_was_written()


def test_collecting_without_a_system_lists_what_is_wrong_on_each(suite):
    suite.write("""
        @train("cosmoflow", kernal_size=3)
        def test_field(run): pass
        @nodes(count=0)
        def test_count(allocation): pass
        @program("./bench 'x", Metric("rate", unit="parsec"))
        def test_program(run): pass
        @train
        def test_bare(run): pass
        @workload("nbdy")
        def test_workload(run): pass
        @train("cosmoflow", data="a set of some system")
        @pytest.mark.parametrize("devices_per_node", [1, 0])
        def test_good(run): pass
    """)
    result = suite.run("--collect-only", "-q", system="")
    assert_named(
        result,
        [
            "ERROR test_suite.py:10: kernal_size: cosmoflow has no such field (did you mean 'kernel_size'?)",
            "ERROR test_suite.py:12: count: 0 is less than 1",
            "ERROR test_suite.py:14: command: no closing quotation in",
            "ERROR test_suite.py:14: metrics: rate: unit 'parsec' is unknown",
            "ERROR test_suite.py:16: @train is written without brackets",
            "ERROR test_suite.py:18: unknown workload 'nbdy'; there are",
            "ERROR test_suite.py:20: devices_per_node: 0 is less than 1",
        ],
    )
    assert output(result).count("ERROR ") == 7


@pytest.mark.servers
def test_workers_have_the_same_errors(suite):
    suite.write("""
        @train("cosmoflow", kernal_size=3)
        def test_field(run): pass
        @job(name="twin")
        @pytest.mark.parametrize("other", ["a", "b"])
        def test_twin(run, other): pass
        @job()
        def test_good(run): assert run["rate"].value == 4
    """)
    result = suite.run_workers()
    assert_named(
        result, ["did you mean 'kernel_size'?", "the test has the same identity as test_suite.py::test_twin"]
    )
    result.assert_outcomes(errors=3, passed=1)


def test_what_keeps_one_test_from_running_leaves_no_baseline_unused(suite):
    suite.write(ONE_JOB)
    suite.run("--mlhpc-baseline=update").expect(0, passed=1)
    suite.write("@job(nmae='x')\ndef test_it(run): pass\n")
    assert "no test uses" not in output(suite.run())
