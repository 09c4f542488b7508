"""What is kept for a look after its end, on the real cluster, and who deletes it."""

import json
import time

import pytest
from faults import ONE
from running_suites import wait_for

from pytest_mlhpc.provision.kubernetes.objects import KEEP_UNTIL

BAD = """\
@script("echo no rate; exit 3")
def test_bad(run): pass
"""


def one_is_kept(suite):
    """Return whether a Job with its Secret and its pod is all that is left; pods of a deleted Job go a while after it."""
    found = [
        one for one in suite.objects("jobs", "secrets", "pods") if "deletionTimestamp" not in one["metadata"]
    ]
    what = sorted(
        (
            one["kind"],
            one.get("status", {}).get("phase", ""),
            KEEP_UNTIL in one["metadata"].get("annotations", {}),
        )
        for one in found
    )
    return what == [("Job", "", True), ("Pod", "Succeeded", False), ("Secret", "", False)]


def make_old(suite):
    """Let what is kept be over."""
    for path in suite.state.glob("kept/*.json"):
        note = json.loads(path.read_text())
        assert note["until"] > time.time()
        path.write_text(json.dumps({**note, "until": 1}))


def test_what_failed_stays_until_its_age_is_over_and_a_later_session_deletes_it(pod_suite):
    pod_suite.partition(keep="on-failure", keep_for="1h", grace="5m")  # within it a pod ends by itself
    pod_suite.tests(ONE + BAD)
    pod_suite.run().expect(1, passed=1, error=0, failed=1)
    wait_for(lambda: one_is_kept(pod_suite))
    (pod,) = [one for one in pod_suite.objects("pods") if "deletionTimestamp" not in one["metadata"]]
    assert "no rate" in pod_suite.kubectl("logs", pod["metadata"]["name"], "--container", "worker")
    assert "nothing" not in pod_suite.reap(code=None)
    assert one_is_kept(pod_suite)  # its time is not over
    make_old(pod_suite)
    pod_suite.tests(ONE)
    pod_suite.partition()
    result = pod_suite.run()
    result.expect(0, "kept allocation", "deleted jobs.batch", "it was kept until 1970-01-01", passed=1)


@pytest.mark.slow
def test_reap_deletes_what_is_old_enough(pod_suite):
    pod_suite.partition(keep="always", keep_for="1h", grace="5m")
    pod_suite.tests(ONE)
    pod_suite.run().expect(0, passed=1)
    wait_for(lambda: one_is_kept(pod_suite))
    make_old(pod_suite)
    said = pod_suite.reap()
    assert "kept allocation" in said
    assert "deleted jobs.batch" in said
    assert list(pod_suite.state.glob("kept/*.json")) == []


@pytest.mark.parametrize("kind", ["job", pytest.param("pods", marks=pytest.mark.slow)])
def test_what_never_began_stays_without_pods_that_could_begin(pod_suite, kind):
    pod_suite.partition(
        keep="on-failure", kind=kind, image="mlhpc.test/absent:1", patience={"image": "1s"}, keep_for="1h"
    )
    pod_suite.tests(ONE)
    pod_suite.run().expect(1, "image_pull:", error=1)
    pods = [one for one in pod_suite.objects("pods") if "deletionTimestamp" not in one["metadata"]]
    assert pods == []
    if kind == "job":
        (job,) = pod_suite.objects("jobs")
        assert job["spec"]["parallelism"] == 0
    make_old(pod_suite)
    pod_suite.reap()
