"""Pods that do not begin, end to end on the real cluster: what a user reads, the exit code, the record, nothing left."""

import pytest
from faults import ONE, read_faults, run_faults


def test_a_sound_pod_passes_and_is_recorded(pod_suite):
    pod_suite.tests(ONE)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert record["verdict"] == "unjudged"
    assert record["job_id"].startswith(f"{pod_suite.namespace}/jobs/mlhpc-")


def test_what_cannot_begin_fails_with_the_clusters_message_after_its_patience(pod_suite):
    run_faults(pod_suite, read_faults(__file__, "starting"))


@pytest.mark.slow
def test_a_device_that_a_node_offers_later_is_waited_for(own_kubernetes, namespace, make_pod_suite):
    suite = make_pod_suite(own_kubernetes, namespace, resources={"limits": {"nvidia.com/gpu": "1"}})
    suite.tests(ONE)
    session = suite.start()
    session.until("pod", lambda: "Insufficient nvidia.com/gpu" in str(suite.objects("pods")))
    own_kubernetes.gpus(1)
    session.end().expect(0, passed=1)
