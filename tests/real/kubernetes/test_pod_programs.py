"""Programs with files and artifacts in pods, which see no folder of the tests: as on this machine (tests/plugin/test_plugin_programs.py)."""

import shutil
from pathlib import Path

import pytest
from program_files import ERRORS, FAILS, TESTS, WITH_ERRORS, write_suite

PROGRAMS = Path(__file__).parents[3] / "suites" / "programs"

pytestmark = pytest.mark.servers


def test_files_artifacts_variables_and_ranks_are_the_same_as_on_this_machine(pod_suite):
    pod_suite.partition({"nodes": {"max": 2}}, kind="pods")
    write_suite(pod_suite.folder, nodes=2, ranks=1)
    pod_suite.run("test_files.py").expect(
        1, *FAILS, *ERRORS, passed=TESTS, failed=len(FAILS), error=WITH_ERRORS
    )


def test_programs_of_the_shipped_suite_run_unchanged(pod_suite):
    pod_suite.partition({"features": ["python", "fio", "dd"]})
    shutil.copytree(PROGRAMS, pod_suite.folder / "programs")
    pod_suite.run("programs", "-k", "json_lines or fio or dd").expect(0, passed=3)
