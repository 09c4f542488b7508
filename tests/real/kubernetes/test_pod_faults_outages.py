"""Parts of the cluster that fail while pods wait, run and end: what was measured is told once, whole, and nothing is left."""

import re
import time

import pytest
from pod_suites import Suite
from running_suites import wait_for

#: What docs/kubernetes.md says that a user needs.
ROLE = [
    {"apiGroups": [""], "resources": ["pods", "secrets", "services"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods/log", "events"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["*"]},
]

#: Prints a number every few milliseconds until the file `go` is there.
COUNTING = (
    "i=0; touch {folder}/begun-counting; while [ ! -e {folder}/go ]; do i=$((i+1)); echo line $i; sleep 0.02; done; "
    "echo last $i; echo rate: 4; touch {folder}/over"
)


def counted(suite: Suite) -> tuple[int, list[int]]:
    """Return how many lines the counting run printed, and those of its log as it came here."""
    (text,) = [
        text
        for path in suite.state.glob("runs/**/rank0.log")
        if re.match(r"line 1\b", text := path.read_text(encoding="utf-8"))
    ]
    last = re.search(r"last (\d+)", text)
    assert last, text[-300:]
    return int(last[1]), [int(number) for number in re.findall(r"line (\d+)", text)]


def whole(suite: Suite) -> None:
    """Assert that each line of the counting run came, once, in order."""
    last, lines = counted(suite)
    assert lines == list(range(1, last + 1))


@pytest.mark.parametrize("down_s", [0, pytest.param(60, marks=pytest.mark.slow)], ids=["restarted", "down"])
def test_an_api_server_that_goes_away_under_what_waits_runs_and_ends_costs_nothing(
    own_kubernetes, namespace, make_pod_suite, down_s
):
    suite = make_pod_suite(own_kubernetes, namespace, grace="1s")
    suite.partition({"nodes": {"cores": 1, "memory": "1GiB"}}, grace="1s")
    suite.tests(f"""\
        @script("echo rate: 4", kubernetes={{"resources": {{"limits": {{"nvidia.com/gpu": "1"}}}}}})
        def test_waiting(run): pass

        @script({COUNTING.format(folder=suite.folder)!r})
        def test_counting(run): pass

        @script("touch {suite.folder}/begun-ending; while [ ! -e {suite.folder}/end ]; do sleep 0.1; done; echo rate: 4; touch {suite.folder}/ended")
        def test_ending(run): pass
    """)
    session = suite.begin("counting", "ending")
    session.until("three pods", lambda: len(suite.objects("pods")) == 3)
    own_kubernetes.kill("kube-apiserver")
    (suite.folder / "end").touch()
    wait_for((suite.folder / "ended").exists)
    time.sleep(down_s)
    own_kubernetes.start("kube-apiserver")
    own_kubernetes.gpus(1)
    suite.go()
    session.end().expect(0, passed=3)
    assert suite.records()[0]["verdict"] == "unjudged"
    assert len(suite.records()) == 3
    whole(suite)


@pytest.mark.slow
def test_the_other_parts_of_a_control_plane_may_go_and_come_back(own_kubernetes, namespace, make_pod_suite):
    suite = make_pod_suite(own_kubernetes, namespace, grace="1s")
    suite.gated("one")
    for part in ("kube-controller-manager", "kube-scheduler"):
        own_kubernetes.kill(part)
    session = suite.start()
    session.until("a Job", lambda: suite.objects("jobs"))
    for part in ("kube-controller-manager", "kube-scheduler"):
        own_kubernetes.start(part)
    session.begun("one")
    own_kubernetes.kill("etcd")
    own_kubernetes.start("etcd")
    suite.go()
    session.end().expect(0, passed=1)
    assert len(suite.records()) == 1


@pytest.mark.slow
def test_a_kubelet_that_dies_under_a_run_is_waited_for(own_kubernetes, namespace, make_pod_suite):
    suite = make_pod_suite(own_kubernetes, namespace, grace="1s")
    suite.tests(f"@script({COUNTING.format(folder=suite.folder)!r})\ndef test_counting(run): pass\n")
    session = suite.begin("counting")
    own_kubernetes.kill("kubelet")
    suite.go()
    wait_for((suite.folder / "over").exists)  # the run ends, and nobody tells the server
    own_kubernetes.start("kubelet")
    session.end().expect(0, passed=1)
    whole(suite)


NODES = {"127.0.0.1": "node", "127.0.0.2": "node.2"}


@pytest.mark.parametrize(
    "removed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lost", "removed"]
)
@pytest.mark.long
def test_a_node_that_is_lost_under_a_run_is_named_and_the_run_made_elsewhere(
    start_own_kubernetes, make_pod_suite, removed
):
    cluster = start_own_kubernetes("--nodes", "2", "--node-grace", "20")
    suite = make_pod_suite(cluster, cluster.make_namespace(), grace="1s")
    session = suite.begin_gated("one")
    (pod,) = suite.objects("pods")
    lost = pod["spec"]["nodeName"]
    cluster.kill(NODES[lost])
    if removed:
        cluster.run("kubectl", "delete", "node", lost)
    session.until(
        "a second pod",
        lambda: [one for one in suite.objects("pods") if one["spec"].get("nodeName") not in {None, lost}],
    )
    suite.go()
    result = session.end()
    result.expect(0, passed=1)
    first, made = result.records
    assert (first["verdict"], made["verdict"]) == ("node_failure", "unjudged")
    assert lost in first["failure"]
    assert made["nodes"] == [next(node for node in NODES if node != lost)]


@pytest.mark.slow
def test_a_log_that_is_rotated_under_a_run_comes_whole_or_is_said_not_to(
    start_own_kubernetes, make_pod_suite
):
    """Kubelets of 1.20 drop what was printed between their last look at a log and its rotation."""
    cluster = start_own_kubernetes("--log-max-size", "1Mi", "--log-files", "3")
    suite = make_pod_suite(cluster, cluster.make_namespace(), grace="1s")
    suite.tests("""\
        @script("i=0; while [ $i -lt 40000 ]; do i=$((i+1)); echo line $i 0123456789012345678901234567890123456789; "
                "[ $((i % 500)) != 0 ] || sleep 0.5; done; echo last $i; echo rate: 4")
        def test_long(run): pass
    """)
    result = suite.run()
    if result.verdicts() == ["unjudged"]:
        result.expect(0, passed=1)
        whole(suite)
    else:
        assert result.verdicts() == ["truncated_result"]
        result.expect(
            1,
            "the pod's log is incomplete: of the 2068913 bytes of rank0.log",
            "containerLogMaxSize",
            failed=1,
        )


@pytest.mark.slow
def test_a_token_that_expires_under_a_run_and_is_renewed_costs_nothing(pod_suite, tmp_path):
    account = pod_suite.cluster.account(pod_suite.namespace, tmp_path, ROLE)
    pod_suite.partition(kubeconfig=str(account.kubeconfig))
    pod_suite.tests(f"@script({COUNTING.format(folder=pod_suite.folder)!r})\ndef test_counting(run): pass\n")
    session = pod_suite.begin("counting")
    account.expire()
    account.renew()
    pod_suite.go()
    session.end().expect(0, passed=1)
    whole(pod_suite)


@pytest.mark.slow
def test_a_token_that_expires_and_is_not_renewed_is_reported_and_what_it_leaves_is_reaped_with_the_next_one(
    own_kubernetes, namespace, make_pod_suite, tmp_path
):
    account = own_kubernetes.account(namespace, tmp_path, ROLE)
    suite = make_pod_suite(
        own_kubernetes, namespace, kubeconfig=str(account.kubeconfig), patience={"unknown": "20s"}
    )
    session = suite.begin_gated("one")
    account.expire()
    own_kubernetes.kill("kube-apiserver")  # which cuts its watch
    own_kubernetes.start("kube-apiserver")
    session.end().expect(1, "unauthorized:", "401 Unauthorized", error=1)
    assert suite.objects("jobs")
    account.renew()
    assert "deleted jobs.batch" in suite.reap(code=None)
