"""The state and cause of a pod, and how long a cause may last; objects are as servers 1.20 to 1.34 write them."""

import pytest

from pytest_mlhpc.provision.kubernetes.causes import (
    CAUSES,
    FailureCause,
    PatienceTracker,
    Stage,
    find_cause,
    latest_event,
    pod_view,
)
from pytest_mlhpc.provision.kubernetes.settings import PATIENCE
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE


def pod(status=None, node="n1", **spec):
    spec |= {"nodeName": node} if node else {}
    return {"metadata": {"name": "p", "uid": "u"}, "spec": spec, "status": status or {}}


def worker(state):
    return {"containerStatuses": [{"name": "worker", "image": "site/image:1", "state": state}]}


def waiting(reason, message="why"):
    return {"phase": "Pending", **worker({"waiting": {"reason": reason, "message": message}})}


def ended(code, reason="Error", message=""):
    terminated = {"exitCode": code, "reason": reason, "message": message}
    return {"phase": "Failed" if code else "Succeeded", **worker({"terminated": terminated})}


def running(*conditions):
    return {"phase": "Running", "podIP": "10.0.0.7", "conditions": [*conditions], **worker({"running": {}})}


def probe(state, phase="Failed"):
    return {"phase": phase, "initContainerStatuses": [{"name": "probe", "state": state}]}


def unfit(message):
    return probe({"terminated": {"exitCode": 10, "reason": "Error", "message": message}})


def condition(kind, status, reason="", message="m"):
    return {"type": kind, "status": status, "reason": reason, "message": message}


NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
NO_PROGRAM = 'exec: "nosuch": executable file not found in $PATH: unknown'
LOG_LINE = 'before\n\x1e{"pod":"probe","fit":false}\ncannot write /mlhpc/work'
SIDECAR = {"name": "sidecar", "state": {"terminated": {"exitCode": 1}}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(pod({"phase": "Pending"}, node=""), {"stage": Stage.UNSCHEDULED, "cause": None}, id="a new pod"),
        pytest.param(pod({"phase": "Pending"}), {"stage": Stage.PREPARING}, id="a pod with a node is being prepared"),
        pytest.param(pod(probe({"running": {}}, "Pending")), {"stage": Stage.VETTING}, id="a pod whose probe runs"),
        pytest.param(
            pod(running()), {"stage": Stage.RUNNING, "started": True, "address": "10.0.0.7"},
            id="a running container has a log and an address",
        ),
        pytest.param(pod(waiting("ContainerCreating", "")), {"cause": None}, id="a container that is only being made"),
        pytest.param(
            pod(ended(0, "Completed")), {"stage": Stage.ENDED, "exit": 0, "cause": None}, id="a container that ended well"
        ),
        pytest.param(
            pod({"phase": "Running", "containerStatuses": [SIDECAR, *worker({"running": {}})["containerStatuses"]]}),
            {"cause": None}, id="a container beside ours may end as it likes",
        ),
        pytest.param(
            pod(running(condition("Ready", "False", "ContainersNotReady"), condition("ContainersReady", "False"))),
            {"cause": None}, id="a pod that is not ready as its containers are not",
        ),
        pytest.param(pod(unfit("1 of 2 devices answers")), {"unfit": "1 of 2 devices answers"}, id="a node that is unfit"),
        pytest.param(pod(probe({"terminated": {"exitCode": 1}})), {"unfit": ""}, id="a probe that fails otherwise"),
        pytest.param(pod(unfit(LOG_LINE)), {"unfit": "before cannot write /mlhpc/work"}, id="our own lines are left out"),
        pytest.param(pod(ended(137, "OOMKilled")), {"out_of_memory": True}, id="memory ran out"),
        pytest.param(
            pod(worker({"terminated": {"exitCode": 3}}), restartPolicy="OnFailure"), {"stage": Stage.PREPARING, "exit": None},
            id="a container that is started again",
        ),
        *[
            pytest.param(broken, {"stage": Stage.UNSCHEDULED}, id="an object that lacks everything")
            for broken in ({}, {"status": None}, {"metadata": None, "status": {"conditions": None}})
        ],
    ],
)  # fmt: skip
def test_a_pod_has_the_state(found, expected):
    view = pod_view(found)
    assert {name: getattr(view, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("status", "outcome", "patience", "text"),
    [
        *[
            (waiting(reason), outcome, patience, f"'worker': {reason}: why")
            for reason, outcome, patience in (
                ("ErrImagePull", "image_pull", "image"),
                ("ImagePullBackOff", "image_pull", "image"),
                ("InvalidImageName", "image_pull", ""),
                ("ErrImageNeverPull", "image_pull", ""),
                ("CreateContainerConfigError", "container_config", "config"),
                ("CreateContainerError", "container_config", "config"),
                ("RunContainerError", "launch_failed", "config"),
                ("CrashLoopBackOff", "crash_loop", "crash"),
            )
        ],
        (waiting("ErrImagePull"), "image_pull", "image", "(image site/image:1)"),
        (ended(137, "OOMKilled"), "out_of_memory", "", "exit code 137 (signal 9): OOMKilled"),
        (ended(128, "StartError", NO_PROGRAM), "launch_failed", "", NO_PROGRAM),
        pytest.param(
            running(condition("Ready", "False"), condition("ContainersReady", "True")), "node_failure", "node", "",
            id="not ready though its containers are: a silent node",
        ),
        (running(condition("DisruptionTarget", "True", "PreemptionByScheduler")), "preempted", "", "m"),
        pytest.param(unfit("dead"), "unfit_nodes", "", "dead", id="a node that is unfit is not the set-up's fault"),
        pytest.param(probe({"terminated": {"exitCode": 1}}), "import_failed", "", "", id="a probe that fails otherwise"),
        *[
            ({**ended(137), "phase": "Failed", "reason": reason, "message": "in its own words"}, outcome, "", f"{reason}: in its own words")
            for reason, outcome in (
                ("DeadlineExceeded", "time_limit"),
                ("Evicted", "evicted"),
                ("NodeLost", "node_failure"),
                ("Preempting", "preempted"),
                ("OutOfcpu", "rejected"),
                ("OutOfnvidia.com/gpu", "rejected"),
            )
        ],
    ],
)  # fmt: skip
def test_a_pod_that_does_not_go_on_has_a_cause(status, outcome, patience, text):
    cause = pod_view(pod(status)).cause
    assert (cause.outcome, cause.patience) == (outcome, patience)
    assert text in cause.text


@pytest.mark.parametrize(("teller", "whose", "pattern", "outcome", "patience"), CAUSES)
def test_no_row_of_the_table_is_hidden_by_one_before_it(teller, whose, pattern, outcome, patience):
    for reason in pattern.replace("(", "").replace(")", "").split("|"):
        cause = find_cause(teller, reason.replace(".*", "X"), "text", whose=whose)
        assert (cause and (cause.outcome, cause.patience)) == ((outcome, patience) if outcome else None)
    assert outcome in {"", *FAILURES, *INFRASTRUCTURE}
    assert patience in {"", "node", *PATIENCE}


@pytest.mark.parametrize(
    "status",
    [
        *[waiting(reason) for reason in ("ErrImagePull", "CreateContainerError", "CrashLoopBackOff")],
        running(condition("Ready", "False"), condition("ContainersReady", "True")),
    ],
)
def test_a_waiting_container_and_a_silent_node_name_the_node(status):
    assert pod_view(pod(status)).cause.node == "n1"


def test_a_pods_own_reason_counts_more_than_its_containers():
    status = {**ended(137, "OOMKilled"), "reason": "Evicted", "message": "in its own words"}
    assert pod_view(pod(status)).cause.text == "Evicted: in its own words"


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        pytest.param(
            pod(
                {
                    "phase": "Pending",
                    "conditions": [condition("PodScheduled", "False", "Unschedulable", NO_GPU)],
                },
                node="",
            ),
            ("never_scheduled", "unschedulable", f"Unschedulable: {NO_GPU}"),
            id="no node can take it, in the scheduler's words",
        ),
        pytest.param(
            pod(worker({"terminated": {"exitCode": 3}}), restartPolicy="OnFailure"),
            (
                "crash_loop",
                "crash",
                "container 'worker' ended with exit code 3, and is started again and again",
            ),
            id="its container is started again, for which there is patience",
        ),
    ],
)
def test_a_pod_that_may_still_run_has_a_cause_for_which_there_is_patience(found, cause):
    view = pod_view(found).cause
    assert (view.outcome, view.patience, view.text) == cause


def test_of_several_events_the_latest_speaks():
    events = [
        {"reason": reason, "message": message, "lastTimestamp": f"2026-01-0{day}T00:00:00Z"}
        for reason, message, day in (
            ("FailedCreate", "old", 1),
            ("FailedCreate", "new", 2),
            ("Pulled", "other", 3),
        )
    ]
    assert latest_event(events, frozenset({"FailedCreate"})) == "FailedCreate: new"


# --- how long a cause may last


PULL = FailureCause("image_pull", "ErrImagePull", "image")
BACK_OFF = FailureCause("image_pull", "ImagePullBackOff", "image")
CONFIG = FailureCause("container_config", "no secret", "config")
FINAL = FailureCause("image_pull", "InvalidImageName")


@pytest.mark.parametrize(
    ("notes", "now", "overdue"),
    [
        pytest.param([], 1e9, None, id="with nothing wrong nothing is overdue"),
        pytest.param([(100.0, {"p": PULL})], 109.9, None, id="its limit has not passed"),
        pytest.param([(100.0, {"p": PULL})], 110.0, PULL, id="its limit has passed"),
        pytest.param([(100.0, {"p": PULL}), (108.0, {"p": BACK_OFF})], 110.0, BACK_OFF, id="one that changes its word goes on ageing"),
        pytest.param(
            [(100.0, {"p": PULL}), (105.0, {}), (106.0, {"p": PULL})], 115.0, None, id="one that heals gets all its time again"
        ),
        pytest.param([(0.0, {"p": PULL, "q": CONFIG})], 10.5, CONFIG, id="of two the one that is longest overdue"),
        pytest.param([(5.0, {"p": FINAL})], 5.0, FINAL, id="one that never heals is overdue at once"),
    ],
)  # fmt: skip
def test_a_cause_is_overdue(notes, now, overdue):
    patience = PatienceTracker({"image": 10.0, "config": 2.0})
    for when, causes in notes:
        patience.update(causes, when)
    assert patience.overdue(now) == overdue


def test_the_next_look_is_when_a_limit_passes():
    patience = PatienceTracker({"image": 10.0})
    assert patience.next_deadline() is None
    patience.update({"p": PULL}, 100.0)
    assert patience.next_deadline() == 110.0
    patience.update({"p": BACK_OFF}, 108.0)
    assert patience.waited(BACK_OFF, 110.0) == 10.0
