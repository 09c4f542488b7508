"""Containers that others added to a pod, such as a proxy: they decide nothing, and appear in the text of a cause."""

import pytest
from pod_worlds import pod_of, source

from pytest_mlhpc.provision.kubernetes.causes import Stage, pod_view
from pytest_mlhpc.provision.kubernetes.objects import POD
from pytest_mlhpc.provision.kubernetes.watch import ObjectChanged

RUNNING = {"running": {}}
STARTING = {"waiting": {"reason": "PodInitializing"}}
CRASHES = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
NO_IMAGE = {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}


def ended(code, reason="Error"):
    return {"terminated": {"exitCode": code, "reason": reason}}


def pod(*, proxy, probe=None, worker=None, beside=None, phase="Running"):
    """Return a pod with a native sidecar `proxy`, and with a container `beside` the worker where one is given."""
    found = pod_of("pod-1", "p", running=True)
    found["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "probe"}]
    states = {"worker": worker or RUNNING, **({"beside": beside} if beside else {})}
    found["status"] = {
        "phase": phase,
        "initContainerStatuses": [
            {"name": "proxy", "state": proxy},
            {"name": "probe", "state": probe or ended(0, "Completed")},
        ],
        "containerStatuses": [{"name": name, "state": state} for name, state in states.items()],
    }
    return found


@pytest.mark.parametrize(
    "state",
    [ended(137, "OOMKilled"), ended(1), CRASHES, NO_IMAGE],
    ids=["starved", "ended", "crashes", "no-image"],
)
@pytest.mark.parametrize("where", ["proxy", "beside"])
def test_beside_a_worker_that_runs_other_containers_may_do_what_they_like(where, state):
    assert pod_view(pod(**{"proxy": RUNNING, where: state})).cause is None


def test_why_the_worker_ended_counts_and_the_others_are_named_beside_it():
    cause = pod_view(pod(proxy=ended(143), worker=ended(137, "OOMKilled"), phase="Failed")).cause
    assert cause.outcome == "out_of_memory"
    assert cause.text == (
        "container 'worker' ended with exit code 137 (signal 9): OOMKilled; "
        "beside it, container 'proxy' ended with exit code 143 (signal 15)"
    )


def test_a_sidecar_whose_image_never_comes_keeps_the_worker_from_its_start():
    cause = pod_view(pod(proxy=NO_IMAGE, probe=STARTING, worker=STARTING, phase="Pending")).cause
    assert (cause.outcome, cause.patience) == ("image_pull", "image")


def test_a_sidecar_that_ends_before_the_worker_has_begun_is_started_again_by_its_kubelet():
    assert pod_view(pod(proxy=ended(1), probe=STARTING, worker=STARTING, phase="Pending")).cause is None


def test_while_a_sidecar_alone_runs_nothing_is_vetted_yet():
    assert (
        pod_view(pod(proxy=RUNNING, probe=STARTING, worker=STARTING, phase="Pending")).stage
        is Stage.PREPARING
    )


def test_a_run_goes_on_while_a_sidecar_is_restarted(world):
    world.submitted()
    for state in (RUNNING, ended(137, "OOMKilled"), CRASHES):
        world.put(
            ObjectChanged(
                POD, pod(proxy=state) | {"metadata": pod_of("pod-1", "mlhpc-x")["metadata"]}, source(POD)
            )
        )
        world.print("started")
        assert world.follow(200) == []
