"""Cordoning what vetting found unfit, and uncordoning what was ours, on a real API server; and the affinity file as it takes it."""

import json

import pytest
from kubernetes_service import end_kubernetes, private_kubernetes

from pytest_mlhpc.node.vet.finding import Exit, Finding, Fitness, NodeVerdict, Origin, Severity, VetVerdict
from pytest_mlhpc.node.vet.verdict_files import prepare
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.vetting.cordon import ANNOTATION, KubernetesNodes, apply, is_ours, undo

pytestmark = pytest.mark.servers

#: A node that no kubelet has.
HOST = "vet-cordon-test"
_MERGE = "application/merge-patch+json"


def unfit(host=HOST, text='row remap "failure"', origin=Origin.NODE):
    finding = Finding("nvidia_memory", Severity.CRITICAL, text, "gpu1", origin=origin)
    return NodeVerdict(host, Fitness.UNFIT, f"[{origin.value}] {text}", (finding,))


def verdict(*nodes):
    return VetVerdict(Exit.TOO_FEW, 1, nodes, (), tuple(node.host for node in nodes))


@pytest.fixture(scope="module")
def api_server(request):
    """An API server of these tests: schedulers of a shared cluster would count their node."""
    server = private_kubernetes(request.config, "--api-only")
    yield server
    end_kubernetes(server)


@pytest.fixture
def node(api_server):
    """A node of this test alone, as an object of the API, which is read, or changed as an administrator would."""
    path = f"/api/v1/nodes/{HOST}"
    spec = {"taints": [{"key": "test/none", "effect": "NoExecute"}]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": HOST}, "spec": spec}
    api_server.ask("POST", "/api/v1/nodes", body)

    def ask(**patch):
        if patch:
            return api_server.ask("PATCH", f"{path}?fieldManager=kubectl-cordon", patch, kind=_MERGE)
        return api_server.ask("GET", path)

    yield ask
    api_server.ask("DELETE", path)


@pytest.fixture
def keeper(api_server):
    api = connect(kubeconfig=str(api_server.kubeconfig), environ={})
    yield KubernetesNodes(api)
    api.close()


def cordoned(node):
    return node()["spec"].get("unschedulable", False)


def reason(node):
    return node()["metadata"].get("annotations", {}).get(ANNOTATION)


def test_a_node_problem_cordons_the_node_with_its_reason_and_undo_uncordons_it(node, keeper):
    (done,) = apply(verdict(unfit()), keeper)
    assert (done.host, done.outcome, cordoned(node)) == (HOST, "changed", True)
    assert reason(node).startswith("[node_problem] mlhpc: nvidia_memory gpu1: row remap 'failure' (mlhpc ")
    assert is_ours(HOST, reason(node))
    assert keeper.ours() == [HOST]
    (back,) = undo([], keeper)
    assert (back.host, back.outcome, cordoned(node), reason(node)) == (HOST, "changed", False, None)


def test_cordoning_twice_changes_nothing(node, keeper):
    apply(verdict(unfit()), keeper)
    before = reason(node)
    (again,) = apply(verdict(unfit(text="another")), keeper)
    assert (again.outcome, again.text, reason(node)) == ("left", f"already cordoned: {before}", before)


def test_a_node_that_an_administrator_cordoned_is_touched_by_neither(node, keeper):
    node(spec={"unschedulable": True})
    (done,), (back,) = apply(verdict(unfit()), keeper), undo([HOST], keeper)
    assert (done.outcome, done.text) == ("left", "already cordoned (by kubectl-cordon)")
    assert (back.outcome, back.text) == ("left", "cordoned by another user (by kubectl-cordon)")
    assert (cordoned(node), reason(node)) == (True, None)


def test_an_administrators_cordon_on_top_of_our_forgotten_reason_is_theirs(node, keeper):
    apply(verdict(unfit()), keeper)
    node(spec={"unschedulable": None})
    node(spec={"unschedulable": True})
    assert is_ours(HOST, reason(node))
    (back,) = undo([HOST], keeper)
    assert (back.outcome, cordoned(node)) == ("left", True)


def test_a_reason_that_an_administrator_has_changed_is_theirs(node, keeper):
    apply(verdict(unfit()), keeper)
    node(metadata={"annotations": {ANNOTATION: f"{reason(node)}, waits for a part"}})
    (back,) = undo([HOST], keeper)
    assert (back.outcome, cordoned(node), keeper.ours()) == ("left", True, [])


class Meddling:
    """The server, with somebody who changes the node between our look and our change."""

    def __init__(self, api, meddle, times):
        self._api, self._meddle, self._left = api, meddle, times

    def __getattr__(self, name):
        return getattr(self._api, name)

    def patch(self, ref, body):
        if self._left:
            self._left -= 1
            self._meddle()
        return self._api.patch(ref, body)


def test_an_administrator_who_cordons_between_our_reading_and_our_change_is_not_overwritten(node, keeper):
    meddling = Meddling(keeper._api, lambda: node(spec={"unschedulable": True}), 1)
    (done,) = apply(verdict(unfit()), KubernetesNodes(meddling))
    assert (done.outcome, done.text, reason(node)) == ("left", "already cordoned (by kubectl-cordon)", None)


def test_a_node_that_changes_for_another_reason_is_looked_at_anew_and_cordoned(node, keeper):
    labels = iter(range(100))
    meddling = Meddling(keeper._api, lambda: node(metadata={"labels": {"a": str(next(labels))}}), 2)
    (done,) = apply(verdict(unfit()), KubernetesNodes(meddling))
    assert (done.outcome, cordoned(node)) == ("changed", True)


def test_a_node_that_never_rests_is_given_up(node, keeper):
    labels = iter(range(100))
    meddling = Meddling(keeper._api, lambda: node(metadata={"labels": {"a": str(next(labels))}}), 100)
    (done,) = apply(verdict(unfit()), KubernetesNodes(meddling))
    assert str(done) == f"{HOST}: FAILED: others changed it 5 times while it was read; try again"
    assert not cordoned(node)


def test_a_node_that_the_cluster_does_not_know_is_named(keeper):
    (done,), (back,) = apply(verdict(unfit("nope")), keeper), undo(["nope"], keeper)
    assert str(done) == str(back) == "nope: FAILED: the cluster has no node of this name"


def test_an_account_without_rights_is_refused_with_those_that_it_lacks(api_server, node):
    api = connect(kubeconfig=str(api_server.user("limited")), environ={})
    try:
        (done,) = apply(verdict(unfit()), KubernetesNodes(api))
    finally:
        api.close()
    assert done.outcome == "failed"
    assert "The account needs the verb `get` on nodes" in done.text


def test_the_server_takes_the_affinity_file_and_keeps_pods_off(kubernetes, tmp_path):
    prepare(tmp_path).write(verdict(unfit("node-a"), unfit("node-b")))
    affinity = json.loads((tmp_path / "k8s-affinity.json").read_text())
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default"},
        "spec": {"affinity": affinity, "containers": [{"name": "c", "image": "none"}]},
    }  # fmt: skip
    found = kubernetes.ask("POST", "/api/v1/namespaces/default/pods?dryRun=All", pod)
    assert found["spec"]["affinity"] == affinity
    assert kubernetes.ask("GET", "/api/v1/nodes/127.0.0.1")["metadata"]["labels"]["kubernetes.io/hostname"]
