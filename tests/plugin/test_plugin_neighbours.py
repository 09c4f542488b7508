"""Other plug-ins beside ours: pytest-benchmark gets rows, the others do no harm."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

pytestmark = pytest.mark.servers  # several sessions of pytest in each test


def with_benchmark(suite, *arguments: str, n: int = 0):
    workers = ["-n", str(n)] if n else []
    command = ("-p", "no:randomly", "--system", "local", *workers, *arguments)
    return suite.pytester.runpytest_subprocess(*command, timeout=60)


def test_each_run_is_a_row_of_pytest_benchmark(suite, workers):
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_it(run): pass
    """)
    result = with_benchmark(suite, "--benchmark-json=out.json", "--benchmark-autosave", n=workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*benchmark 'command': 2 tests*"])
    found = json.loads((suite.pytester.path / "out.json").read_text())
    assert found["machine_info"]["mlhpc"] == ["local:cpu"]
    rows = {row["name"]: row for row in found["benchmarks"]}
    assert set(rows) == {"test_it[local:cpu-a]", "test_it[local:cpu-b]"}
    row = rows["test_it[local:cpu-a]"]
    assert row["extra_info"]["metrics"] == {"rate": 4.0}
    assert row["stats"]["rounds"] == 1
    compared = with_benchmark(suite, "--benchmark-compare", n=workers)
    assert compared.ret == 0
    compared.stdout.fnmatch_lines(["*benchmark 'command': 4 tests*", "*test_it?local:cpu-a? (NOW)*"])


def test_own_timings_of_pytest_benchmark_stay_as_they_are(suite):
    suite.write("""
    def test_timed(benchmark): benchmark(lambda: None)
    @job()
    def test_it(run): pass
    """)
    result = with_benchmark(suite)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*benchmark: 1 tests*", "*benchmark 'command': 1 tests*"])


def test_junit_properties_carry_the_metrics(suite, workers):
    suite.write("""
    @job()
    def test_it(run): pass
    """)
    suite.run("--junitxml=out.xml", n=workers)
    tree = ET.parse(suite.pytester.path / "out.xml")  # noqa: S314 - our own file
    properties = {p.get("name"): p.get("value") for p in tree.iter("property")}
    assert properties["mlhpc.metric.rate"] == "4.0 items/s"
    assert properties["mlhpc.verdict"] == "new"
    assert properties["mlhpc.benchmark"].startswith("command[] ")


def test_random_order_changes_nothing(suite, workers):
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", list("abcdef"))
    def test_it(run): pass
    """)
    arguments = ["-p", "no:benchmark", "--system", "local"]
    workers_ = ["-n", str(workers)] if workers else []
    result = suite.pytester.runpytest_subprocess(*arguments, *workers_, timeout=60)
    result.assert_outcomes(passed=6)
    assert len(suite.records()) == 6


def test_a_timeout_ends_the_wait_and_the_job(suite, workers):
    suite.write("""
    @script("sleep 300")
    @pytest.mark.timeout(2)
    def test_long(run): pass
    @job(name="after")
    def test_after(run): assert run["rate"].value == 4
    """)
    result = suite.run(n=workers)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*Timeout*2.0s*"])


def test_running_a_failed_test_again_does_not_run_its_job_again(suite, workers):
    suite.write("""
    @job()
    def test_flaky(run):
        marker = pathlib.Path("second")
        if not marker.exists():
            marker.touch()
            assert False
    @script("echo nothing", name="broken")
    def test_broken(run): pass
    """)
    result = suite.run("--reruns", "2", n=workers)
    assert "1 failed, 1 passed" in result.stdout.str()
    assert "3 rerun" in result.stdout.str()
    assert len(suite.records()) == 2
