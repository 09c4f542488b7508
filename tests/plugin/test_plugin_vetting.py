"""Nodes are vetted before anything is measured on them: here on this machine, whose processors are what they are."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

SYSTEMS = """\
schema: 1
systems:
  local:
    partitions:
      cpu:
        scheduler: local
        accelerator: cpu
        preset: smoke
        max_jobs: 4
        vet: VET
"""


def described(suite, vet: str) -> None:
    suite.pytester.path.joinpath("systems.yaml").write_text(SYSTEMS.replace("VET", vet))


MEASURED = """
@pytest.mark.job("nbody", bodies=64, devices=1, steps=2, warmup=1, time_limit=120)
def test_it(run): assert run["step_time"].value > 0
"""


def test_a_run_on_a_fit_node_has_in_its_record_what_was_found(suite):
    described(suite, "{level: quick, unknown: warn}")
    suite.write(MEASURED)
    result = suite.run()
    result.assert_outcomes(passed=1)
    (record,) = suite.records()
    assert record["vetting"]["level"] == "quick"
    assert record["vetting"]["fit"] == record["nodes"]
    assert record["vetting"]["unfit"] == {}


def test_nothing_is_measured_on_a_node_that_is_not_what_it_should_be(suite):
    described(suite, '{level: quick, unknown: warn, expect: {numa: "77"}}')
    suite.write(MEASURED)
    result = suite.run()
    result.assert_outcomes(errors=1)
    assert result.ret == 1
    result.stdout.re_match_lines(
        [r"unfit_nodes: 0 of 1 nodes are fit, 1 are needed; \S+: \[node_problem\] .*77.*"]
    )
    (record,) = suite.records()
    assert record["verdict"] == "unfit_nodes"
    assert list(record["vetting"]["unfit"]) == record["nodes"]
    assert "measurement" not in record


def test_checks_are_tests_of_one_vetting(suite):
    described(suite, '{level: "off", expect: {numa: "77"}}')
    suite.write("""
    @pytest.mark.job("vet", unknown="warn")
    @pytest.mark.parametrize("check", ["edac", "inventory"])
    def test_node(vetting, check): assert vetting.trouble(check) == []
    """)
    result = suite.run()
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED test_suite.py::test_node?local:cpu-inventory? - *"])
    result.stdout.fnmatch_lines(["*test_node?local:cpu-inventory?*nodes*0/1 fit, without *unjudged"])
    assert len(list(suite.state.glob("runs/*/*/*-vet/verdict.json"))) == 1


def test_vettings_that_differ_in_what_they_ask_are_not_shared(suite):
    described(suite, '{level: "off"}')
    suite.write("""
    @pytest.mark.job("vet", unknown="warn")
    def test_mild(vetting): assert vetting.good
    @pytest.mark.job("vet", unknown="fail")
    def test_strict(vetting): assert not vetting.good
    """)
    result = suite.run()
    result.assert_outcomes(passed=2)
    assert len(list(suite.state.glob("runs/*/*/*-vet/verdict.json"))) == 2


def computing(cookie: str) -> bool:
    """Whether the process by which vetting loads this machine runs, of the test whose environment has *cookie*."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            here = cookie.encode() in (folder / "environ").read_bytes()
            if here and b"pytest_mlhpc.vet.child.main" in (folder / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def test_a_session_killed_while_it_vets_leaves_no_process_and_nothing_that_the_next_one_minds(
    suite, monkeypatch
):
    monkeypatch.setenv("MLHPC_TEST_VETTING", cookie := f"killed-{suite.pytester.path}")
    described(suite, "{level: quick, unknown: warn}")
    suite.write(MEASURED)
    argv = [sys.executable, "-m", "pytest", "--system", "local", "-p", "no:cacheprovider"]
    with subprocess.Popen(argv, cwd=suite.pytester.path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60.0
        while not computing(cookie) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    suite.run().assert_outcomes(passed=1)
    assert not list((suite.state / "ledger").glob("*.jsonl"))
    (record,) = suite.records()
    assert record["vetting"]["fit"] == record["nodes"]


def test_the_fixture_says_which_tests_it_is_for(suite):
    suite.write("""
    @job()
    def test_it(vetting): pass
    """)
    result = suite.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ['*`vetting` is for tests whose nodes are vetted: @pytest.mark.job("vet", nodes=4)']
    )
