"""Programs with files and artifacts in pods, which see no folder of the tests: as on this machine (tests/plugin/test_plugin_programs.py)."""

import pytest
from program_files import TESTS, write_suite

pytestmark = pytest.mark.servers


def test_files_artifacts_variables_and_ranks_are_the_same_as_on_this_machine(pod_suite):
    pod_suite.partition({"nodes": {"max": 2}}, kind="pods")
    write_suite(pod_suite.folder, nodes=2, ranks=1)
    pod_suite.run("test_files.py").expect(0, passed=TESTS)
