"""Pods that do not begin, end to end on the real cluster: what a user reads, the exit code, the record, nothing left."""

from __future__ import annotations

import pytest
from faults import ONE, Fault, run_faults


def test_a_sound_pod_passes_and_is_recorded(pod_suite):
    pod_suite.tests(ONE)
    result = pod_suite.run()
    result.expect(0, passed=1)
    (record,) = result.records
    assert record["verdict"] == "unjudged"
    assert record["job_id"].startswith(f"{pod_suite.namespace}/jobs/mlhpc-")


#: Short limits, which are all told where they are over.
SHORT = {"unschedulable": "2s", "image": "4s", "config": "2s", "volume": "4s", "crash": "2s", "unknown": "4s"}


def manifest(container=None, **spec):
    """A Job that says something of its own about its pods."""
    own = {"name": "worker", **(container or {})}
    return {"spec": {"template": {"spec": {"containers": [own], **spec}}}}


def test_what_cannot_begin_is_told_in_the_clusters_words_after_the_patience_that_it_was_given(pod_suite):
    pod_suite.partition(patience=SHORT)
    nothing = [{"name": "nothing", "empty_dir": {}, "mount": "/nothing"}]  # in place of all that holds Python
    volumes = [{"name": "data", "claim": "nobodys", "mount": "/data"}]
    secret = {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "nobodys", "key": "k"}}}]}
    mounted = {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}
    absent = {"name": "absent", "hostPath": {"path": "/nowhere/at/all", "type": "Directory"}}
    faults = [
        Fault(
            "too_many_cpus", "never_scheduled",
            ["Unschedulable: 0/2 nodes are available", "Insufficient cpu", "given up after", "the limit is 2 s (kubernetes: patience: unschedulable)"],
            {"resources": {"limits": {"cpu": "1000"}}},
        ),
        Fault(
            "no_such_device", "never_scheduled", ["Unschedulable:", "Insufficient example.com/none"],
            {"resources": {"limits": {"example.com/none": "1"}}},
        ),
        Fault(
            "no_such_image", "image_pull",
            ["mlhpc.test/absent:1", "(kubernetes: patience: image)"],
            {"image": "mlhpc.test/absent:1"},
        ),
        Fault(
            "image_misnamed", "image_pull", ["InvalidImageName", "mlhpc.test/UPPER:1"], {"image": "mlhpc.test/UPPER:1"},
        ),
        Fault(
            "image_not_here", "image_pull", ["ErrImageNeverPull", "mlhpc.test/absent:1"],
            {"image": "mlhpc.test/absent:1", "image_pull_policy": "Never"},
        ),
        Fault(
            "no_such_secret", "container_config",
            ["CreateContainerConfigError", 'secret "nobodys" not found', "the limit is 2 s (kubernetes: patience: config)"],
            {"manifest": manifest(secret)},
        ),
        Fault(
            "no_such_interpreter", "launch_failed", ["container 'probe'", "no such file or directory"], {"volumes": nothing},
        ),
        Fault(
            "no_such_claim", "never_scheduled", ['persistentvolumeclaim "nobodys" not found'], {"volumes": volumes},
        ),
        Fault(
            "no_such_scheduler", "never_scheduled",
            ["no scheduler has looked at it yet", "the limit is 4 s (kubernetes: patience: unknown)"],
            {"manifest": manifest(schedulerName="nobodys")},
        ),
        Fault(
            "no_such_folder", "container_config", ["FailedMount", "/nowhere/at/all", "(kubernetes: patience: volume)"],
            {"manifest": manifest(mounted, volumes=[absent])},
        ),
    ]  # fmt: skip
    run_faults(pod_suite, faults).expect(75, error=len(faults))


@pytest.mark.slow
def test_a_device_that_a_node_offers_later_is_waited_for(own_kubernetes, namespace, make_pod_suite):
    suite = make_pod_suite(own_kubernetes, namespace, resources={"limits": {"nvidia.com/gpu": "1"}})
    suite.tests(ONE)
    session = suite.start()
    session.until("pod", lambda: "Insufficient nvidia.com/gpu" in str(suite.objects("pods")))
    own_kubernetes.gpus(1)
    session.end().expect(0, passed=1)
