"""Other plug-ins beside ours: pytest-benchmark gets rows, the others do no harm."""

import json
import xml.etree.ElementTree as ET

import pytest
from inner_sessions import ONE_JOB

pytestmark = pytest.mark.servers  # sessions of pytest with other plug-ins


def run_with(suite, plugin: str, *arguments: str) -> pytest.RunResult:
    return suite.run_process("-p", plugin, "--system", "local", *arguments)


def test_each_run_is_a_row_of_pytest_benchmark_next_to_its_timings(suite):
    suite.write("""
    def test_timed(benchmark): benchmark(lambda: None)
    @job()
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_it(run): pass
    """)
    run_with(suite, "benchmark", "--benchmark-json=out.json", "--benchmark-autosave").expect(
        0, "*benchmark: 1 tests*", "*benchmark 'command': 2 tests*", passed=3
    )
    found = json.loads((suite.folder / "out.json").read_text())
    assert found["machine_info"]["mlhpc"] == ["local:cpu"]
    rows = {row["name"]: row for row in found["benchmarks"]}
    assert set(rows) == {"test_timed", "test_it[local:cpu-a]", "test_it[local:cpu-b]"}
    row = rows["test_it[local:cpu-a]"]
    assert row["extra_info"]["metrics"] == {"rate": 4.0}
    assert row["stats"]["rounds"] == 1
    run_with(suite, "benchmark", "--benchmark-compare").expect(
        0, "*benchmark 'command': 4 tests*", "*test_it?local:cpu-a? (NOW)*"
    )


def test_without_an_option_of_pytest_benchmark_the_last_table_is_ours(suite):
    suite.write(ONE_JOB)
    run_with(suite, "benchmark").expect(0, "test_it*4 items/s*", absent="*benchmark 'command'*", passed=1)


def test_workers_of_xdist_leave_rows_of_pytest_benchmark_to_their_controller(suite):
    suite.write(ONE_JOB)
    run_with(suite, "benchmark", "-p", "xdist", "-n", "2", "--benchmark-json=out.json").expect(0)
    found = json.loads((suite.folder / "out.json").read_text())
    assert [row["name"] for row in found["benchmarks"]] == ["test_it[local:cpu]"]


def test_junit_properties_carry_the_metrics(suite):
    suite.write(ONE_JOB)
    suite.run("--junitxml=out.xml")
    tree = ET.parse(suite.folder / "out.xml")  # noqa: S314 - our own file
    properties = {p.get("name"): p.get("value") for p in tree.iter("property")}
    assert properties["mlhpc.metric.rate"] == "4.0 items/s"
    assert properties["mlhpc.verdict"] == "new"
    assert properties["mlhpc.benchmark"] == "test_suite.py::test_it"


def test_with_all_installed_plugins_in_random_order_nothing_changes(suite, monkeypatch):
    """Here alone our plug-in is found as users have it found: by its entry point."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.delenv("PYTEST_PLUGINS")
    suite.write("""
    @job()
    @pytest.mark.parametrize("name", list("abcdef"))
    def test_it(run): pass
    """)
    suite.run_process("--system", "local").expect(0, "Using --randomly-seed=*", "plugins: *mlhpc*", passed=6)
    assert len(suite.records()) == 6


def test_a_timeout_ends_the_wait_and_the_job(suite):
    suite.write("""
    @script("sleep 6000")
    @pytest.mark.timeout(2)
    def test_long(run): pass
    @job(name="after")
    def test_after(run): assert run["rate"].value == 4
    """)
    run_with(suite, "timeout").expect(1, "*Timeout*2.0s*", passed=1, errors=1)


def test_running_a_failed_test_again_does_not_run_its_job_again(suite):
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
    run_with(suite, "rerunfailures", "--reruns", "2").expect(1, "*1 failed, 1 passed, 3 rerun*")
    assert len(suite.records()) == 2
