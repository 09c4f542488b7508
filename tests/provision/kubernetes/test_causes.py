"""What Kubernetes says of a pod becomes our stage, outcome and words; objects are as servers 1.20 to 1.34 write them."""

from __future__ import annotations

import pytest

from pytest_mlhpc.provision.kubernetes.causes import Stage, latest_event, view


def pod(status: dict | None = None, node: str = "n1", **meta) -> dict:
    return {
        "metadata": {"name": "p", "uid": "u", **meta},
        "spec": {"nodeName": node} if node else {},
        "status": status or {},
    }


def worker(state: dict, **more) -> dict:
    return {"containerStatuses": [{"name": "worker", "image": "site/image:1", "state": state, **more}]}


def waiting(reason: str, message: str = "why") -> dict:
    return worker({"waiting": {"reason": reason, "message": message}})


def ended(code: int, reason: str = "Error", message: str = "") -> dict:
    terminated = {"exitCode": code, "reason": reason, "message": message}
    return {"phase": "Failed" if code else "Succeeded", **worker({"terminated": terminated})}


def test_a_new_pod_is_unscheduled_and_nothing_is_wrong():
    found = view(pod({"phase": "Pending"}, node=""))
    assert (found.stage, found.cause) == (Stage.UNSCHEDULED, None)


def test_a_pod_with_a_node_is_being_prepared():
    assert view(pod({"phase": "Pending"})).stage is Stage.PREPARING


def test_a_pod_whose_probe_runs_is_being_vetted():
    status = {"phase": "Pending", "initContainerStatuses": [{"name": "probe", "state": {"running": {}}}]}
    assert view(pod(status)).stage is Stage.VETTING


def test_a_running_container_has_a_log_and_an_address():
    found = view(pod({"phase": "Running", "podIP": "10.0.0.7", **worker({"running": {}})}))
    assert (found.stage, found.started, found.address) == (Stage.RUNNING, True, "10.0.0.7")


def test_a_pod_that_no_node_can_take_says_so_in_the_schedulers_words():
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    cause = view(pod({"phase": "Pending", "conditions": [condition]}, node="")).cause
    assert (cause.outcome, cause.patience) == ("never_scheduled", "unschedulable")
    assert cause.text == f"Unschedulable: {message}"


@pytest.mark.parametrize(
    ("reason", "outcome", "patience"),
    [
        ("ErrImagePull", "image_pull", "image"),
        ("ImagePullBackOff", "image_pull", "image"),
        ("InvalidImageName", "image_pull", ""),
        ("ErrImageNeverPull", "image_pull", ""),
        ("CreateContainerConfigError", "container_config", "config"),
        ("CreateContainerError", "container_config", "config"),
        ("RunContainerError", "launch_failed", "config"),
        ("CrashLoopBackOff", "crash_loop", "crash"),
    ],
)
def test_a_waiting_container_names_its_trouble(reason, outcome, patience):
    cause = view(pod({"phase": "Pending", **waiting(reason)})).cause
    assert (cause.outcome, cause.patience, cause.node) == (outcome, patience, "n1")
    assert f"'worker': {reason}: why" in cause.text


def test_an_image_that_cannot_be_had_is_named():
    assert "(image site/image:1)" in view(pod(waiting("ErrImagePull"))).cause.text


def test_a_container_that_is_only_being_made_is_no_trouble():
    assert view(pod({"phase": "Pending", **waiting("ContainerCreating", "")})).cause is None


def test_a_container_that_ended_well_has_no_cause():
    found = view(pod(ended(0, "Completed")))
    assert (found.stage, found.exit, found.cause) == (Stage.ENDED, 0, None)


def test_a_container_whose_memory_ran_out_says_so():
    found = view(pod(ended(137, "OOMKilled")))
    assert (found.out_of_memory, found.cause.outcome) == (True, "out_of_memory")
    assert "exit code 137 (signal 9): OOMKilled" in found.cause.text


def test_a_command_that_does_not_exist_is_a_launch_that_failed():
    text = 'exec: "nosuch": executable file not found in $PATH: unknown'
    cause = view(pod(ended(128, "StartError", text))).cause
    assert cause.outcome == "launch_failed"
    assert text in cause.text


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("DeadlineExceeded", "time_limit"),
        ("Evicted", "evicted"),
        ("NodeLost", "node_failure"),
        ("Preempting", "preempted"),
        ("OutOfcpu", "rejected"),
        ("OutOfnvidia.com/gpu", "rejected"),
    ],
)
def test_a_pods_own_reason_counts_more_than_its_containers(reason, outcome):
    status = {**ended(137), "phase": "Failed", "reason": reason, "message": "in its own words"}
    cause = view(pod(status)).cause
    assert (cause.outcome, cause.text) == (outcome, f"{reason}: in its own words")


def test_a_pod_that_newer_servers_call_disrupted_says_by_what():
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "m",
    }
    assert view(pod({"phase": "Running", "conditions": [condition]})).cause.outcome == "preempted"


def test_a_probe_that_finds_the_node_unfit_is_not_the_set_ups_fault():
    terminated = {"exitCode": 10, "reason": "Error", "message": "1 of 2 devices answers"}
    status = {"initContainerStatuses": [{"name": "probe", "state": {"terminated": terminated}}]}
    found = view(pod({"phase": "Failed", **status}))
    assert found.unfit == "1 of 2 devices answers"
    assert found.cause.outcome == "unfit_nodes"


def test_a_probe_that_fails_otherwise_is_a_broken_set_up():
    status = {"initContainerStatuses": [{"name": "probe", "state": {"terminated": {"exitCode": 1}}}]}
    found = view(pod({"phase": "Failed", **status}))
    assert (found.unfit, found.cause.outcome) == ("", "import_failed")


def test_a_container_beside_ours_may_end_as_it_likes():
    status = {"phase": "Running", "containerStatuses": [
        {"name": "sidecar", "state": {"terminated": {"exitCode": 1}}}, {"name": "worker", "state": {"running": {}}},
    ]}  # fmt: skip
    assert view(pod(status)).cause is None


def test_a_pod_marked_not_ready_while_its_containers_are_is_on_a_silent_node():
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    cause = view(pod({"phase": "Running", "conditions": conditions, **worker({"running": {}})})).cause
    assert (cause.outcome, cause.patience, cause.node) == ("node_failure", "node", "n1")


def test_a_pod_that_is_not_ready_as_its_containers_are_not_is_no_trouble():
    conditions = [
        {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
        {"type": "ContainersReady", "status": "False"},
    ]
    assert view(pod({"phase": "Running", "conditions": conditions, **worker({"running": {}})})).cause is None


@pytest.mark.parametrize("broken", [{}, {"status": None}, {"metadata": None, "status": {"conditions": None}}])
def test_an_object_that_lacks_everything_is_a_pod_of_which_nothing_is_known(broken):
    assert view(broken).stage is Stage.UNSCHEDULED


def test_of_several_events_the_latest_speaks():
    events = [
        {"reason": "FailedCreate", "message": "old", "lastTimestamp": "2026-01-01T00:00:00Z"},
        {"reason": "FailedCreate", "message": "new", "lastTimestamp": "2026-01-02T00:00:00Z"},
        {"reason": "Pulled", "message": "other", "lastTimestamp": "2026-01-03T00:00:00Z"},
    ]
    assert latest_event(events, frozenset({"FailedCreate"})) == "FailedCreate: new"


def test_a_container_that_is_started_again_is_a_crash_loop_for_which_there_is_patience():
    status = {"phase": "Running", **worker({"terminated": {"exitCode": 3, "reason": "Error"}})}
    again = pod(status)
    again["spec"]["restartPolicy"] = "OnFailure"
    found = view(again)
    assert (found.cause.outcome, found.cause.patience) == ("crash_loop", "crash")
    assert (found.stage, found.exit) == (Stage.PREPARING, None)
    assert found.cause.text == "container 'worker' ended with exit code 3, and is started again and again"


def test_our_own_protocol_lines_in_a_containers_last_words_are_left_out():
    message = 'before\n\x1e{"pod":"probe","fit":false}\ncannot write /mlhpc/work'
    state = {"terminated": {"exitCode": 10, "message": message}}
    status = {"phase": "Failed", "initContainerStatuses": [{"name": "probe", "state": state}]}
    assert view(pod(status)).unfit == "before cannot write /mlhpc/work"
