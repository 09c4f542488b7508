"""What a test itself says under ``kubernetes``, on the real cluster."""

import pytest

pytestmark = pytest.mark.servers

SUITE = """
def answer(number):
    worker = {"name": "worker", "env": [{"name": "ANSWER", "value": str(number)}]}
    return {"manifest": {"spec": {"template": {"spec": {"containers": [worker]}}}}, "labels": {"answer": str(number)}}

@script("while [ ! -e {folder}/go ]; do sleep 0.2; done; echo rate: $ANSWER", kubernetes=answer(42))
def test_its_own_manifest(run):
    assert run["rate"].value == 42
"""


def test_a_manifest_and_labels_of_a_test_reach_its_pod(pod_suite):
    pod_suite.tests(SUITE.replace("{folder}", str(pod_suite.folder)))
    session = pod_suite.start()
    pod = pod_suite.pod()
    assert pod["metadata"]["labels"]["answer"] == "42"
    pod_suite.go()
    session.end().expect(0, passed=1)
