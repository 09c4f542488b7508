"""Paths and references of objects, merging into a manifest, and fields that a server dropped."""

from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import manifest_schemas
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from manifests import part, partition, pod, rendered, variables, workload

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.objects import (
    JOB,
    NODE,
    POD,
    FixedValue,
    ManifestConflict,
    ObjectRef,
    dropped_fields,
    mark_must,
    merge,
    object_ref,
    same_quantity,
)
from pytest_mlhpc.provision.kubernetes.settings import kind_of, settings_of


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (POD.path("mine"), "/api/v1/namespaces/mine/pods"),
        (POD.path("mine", "p", "log"), "/api/v1/namespaces/mine/pods/p/log"),
        (JOB.path("mine", "j"), "/apis/batch/v1/namespaces/mine/jobs/j"),
        (NODE.path("mine", "n"), "/api/v1/nodes/n"),
        pytest.param(
            POD.path("mine/../x", "p?q#r"),
            "/api/v1/namespaces/mine%2F..%2Fx/pods/p%3Fq%23r",
            id="a name that is no name reaches no other path",
        ),
    ],
)
def test_paths_are_those_of_the_api(path, expected):
    assert path == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (JOB, "jobs.batch"),
        (ObjectRef(JOB, "mine", "j"), "jobs.batch mine/j"),
        (ObjectRef(NODE, "", "n"), "nodes n"),
        (JOB.api_version, "batch/v1"),
        (POD.api_version, "v1"),
    ],
)
def test_words_are_those_of_kubectl(words, expected):
    assert str(words) == expected


@pytest.mark.parametrize(
    ("manifest", "names"),
    [
        ({"metadata": {"namespace": "mine", "name": "p", "uid": "u"}}, ("mine", "p", "u")),
        *[
            (odd, ("", "", ""))
            for odd in ({}, {"metadata": None}, {"metadata": []}, {"metadata": {"name": None}})
        ],
    ],
)
def test_an_object_has_its_reference_or_an_empty_one(manifest, names):
    assert object_ref(POD, manifest) == ObjectRef(POD, *names)


# --- merging into the user's manifest


TERMS = "requiredDuringSchedulingIgnoredDuringExecution"


def with_pod(spec, **more):
    """Return a partition whose manifest has this pod."""
    return partition(manifest={"spec": {"template": {"spec": spec}}}, **more)


FROM_FIELD = {"env": [{"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}
HOME = {"name": "HOME", "value": "/"}


@pytest.mark.parametrize(
    ("theirs", "ours", "merged", "conflicts"),
    [
        pytest.param(
            {"a": 1, "b": {"c": [1]}, "n": None}, {"a": 2, "b": {"c": [2], "d": 3}, "n": 4},
            {"a": 1, "b": {"c": [1, 2], "d": 3}, "n": 4}, [], id="theirs wins and ours fills in",
        ),
        pytest.param(
            {"spec": {"count": 3}}, {"spec": {"count": FixedValue(2)}}, {"spec": {"count": 2}},
            ["spec.count: the manifest says 3, but 2 is set for each run; leave it out"],
            id="what must be is a conflict that names the path",
        ),
        pytest.param(
            {"a": "2", "b": {"c": 1}}, {"a": FixedValue(2), "b": FixedValue({"c": 1})}, {"a": 2, "b": {"c": 1}}, [],
            id="what must be may be repeated",
        ),
        pytest.param(
            {"containers": [{"name": "b", "image": "x"}, {"name": "a"}]},
            {"containers": [{"name": "a", "image": "y"}, {"name": "c"}]},
            {"containers": [{"name": "b", "image": "x"}, {"name": "a", "image": "y"}, {"name": "c"}]}, [],
            id="items of lists are found by their names",
        ),
        pytest.param(FROM_FIELD, {"env": [HOME]}, FROM_FIELD, [], id="a variable is one or the other, not a mixture"),
        pytest.param(
            FROM_FIELD, {"env": [FixedValue(HOME)]}, {"env": [HOME]},
            [
                ("env[HOME]: the manifest says {'name': 'HOME', 'valueFrom': {'fieldRef': {'fieldPath': 'x'}}}, "
                "but {'name': 'HOME', 'value': '/'} is set for each run; leave it out")
            ],
            id="a variable that must be",
        ),
    ],
)  # fmt: skip
def test_ours_is_merged_into_theirs(theirs, ours, merged, conflicts):
    found: list[ManifestConflict] = []
    assert merge(theirs, ours, found, "") == merged
    assert [str(one) for one in found] == conflicts


def test_all_leaves_must_be_but_names_of_items():
    found = mark_must({"a": {"b": 1}, "c": [{"name": "n", "d": 2}], "e": [3]})
    assert found == {
        "a": {"b": FixedValue(1)},
        "c": [{"name": "n", "d": FixedValue(2)}],
        "e": FixedValue([3]),
    }


def test_the_callers_manifest_is_never_changed():
    template = {"spec": {"containers": [{"name": "main", "env": []}], "volumes": []}}
    manifest = {"metadata": {"labels": {"team": "a"}}, "spec": {"template": template}}
    before = deepcopy(manifest)
    where = partition(manifest=manifest)
    assert rendered(where, 2) == rendered(where, 2)
    assert manifest == where.scheduler_options["manifest"] == before


SIDE = {"name": "side", "image": "s"}


@pytest.mark.parametrize(
    ("containers", "agent"),
    [([SIDE, {"name": "worker", "tty": True}], "worker"), ([{"name": "main", "tty": True}, SIDE], "main")],
)
def test_the_agent_runs_in_the_container_called_worker_else_in_the_first(containers, agent):
    where = with_pod({"containers": containers})
    found = {one["name"]: one for one in pod(where)["spec"]["containers"]}
    assert list(found) == [one["name"] for one in containers]
    assert (found["side"], found[agent]["tty"]) == (SIDE, True)
    assert found[agent]["command"][2] == "pytest_mlhpc.node.batch.pod"
    assert kind_of(settings_of(where)).container == agent


THEIR_POD = yaml.safe_load((Path(__file__).parent / "pod_of_a_manifest.yaml").read_text())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("securityContext runAsNonRoot", False),
        ("securityContext seccompProfile", {"type": "RuntimeDefault"}),
        ("terminationGracePeriodSeconds", 99),
        ("automountServiceAccountToken", True),
        ("tolerations 0 key", "a"),
        ("tolerations 1 key", "b"),
        ("containers 0 securityContext capabilities", {"add": ["IPC_LOCK"], "drop": ["ALL"]}),
        ("containers 0 resources limits cpu", "3"),
    ],
)
def test_what_the_manifest_says_of_its_pods_stays(path, expected):
    assert part(pod(with_pod(THEIR_POD, tolerations=[{"key": "b"}])), f"spec {path}") == expected


def test_variables_of_the_manifest_stay_in_the_container_and_its_probe():
    where = with_pod(THEIR_POD)
    spec = pod(where)["spec"]
    (container,), (probe, *_) = spec["containers"], spec["initContainers"]
    assert variables(container).items() >= {"A": "b", "HOME": "/root", "MLHPC_PODS": "1"}.items()
    assert probe["env"] == container["env"]
    assert manifest_schemas.complaints(workload(where)) == []


def test_another_dev_shm_takes_the_place_of_ours():
    mount = {"name": "dshm", "mountPath": "/dev/shm"}
    volume = {"name": "dshm", "emptyDir": {"medium": "Memory"}}
    spec = pod(with_pod({"containers": [{"name": "w", "volumeMounts": [mount]}], "volumes": [volume]}))[
        "spec"
    ]
    assert [one for one in spec["containers"][0]["volumeMounts"] if one["mountPath"] == "/dev/shm"] == [mount]
    assert [one["name"] for one in spec["volumes"]] == ["dshm", "mlhpc-config", "mlhpc-work", "mlhpc-info"]


def test_init_containers_of_the_manifest_run_before_the_probe():
    where = with_pod({"initContainers": [{"name": "fetch", "image": "f"}]})
    assert [one["name"] for one in pod(where)["spec"]["initContainers"]] == ["fetch", "probe"]


def pod_manifest(**spec):
    return {"spec": {"template": {"spec": spec}}}


def container_manifest(**container):
    return pod_manifest(containers=[{"name": "w", **container}])


SHOULD = "which should be an affinity of the API"


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({"spec": {"parallelism": 4}}, "spec.parallelism: the manifest says 4, but 2 is set for each run"),
        ({"spec": {"completionMode": "NonIndexed"}}, "spec.completionMode: the manifest says 'NonIndexed', but 'Indexed'"),
        ({"spec": {"backoffLimit": 6}}, "spec.backoffLimit: the manifest says 6, but 0 is set"),
        ({"metadata": {"name": "mine"}}, "metadata.name: the manifest says 'mine', but 'mlhpc-0-a' is set"),
        ({"metadata": {"labels": {"pytest-mlhpc/run": "x"}}}, "metadata.labels.pytest-mlhpc/run: the manifest says 'x'"),
        (pod_manifest(restartPolicy="OnFailure"), "spec.template.spec.restartPolicy"),
        (container_manifest(command=["sleep"]), "spec.template.spec.containers[w].command: the manifest says ['sleep'], but ['/opt/python'"),
        (container_manifest(args=["1"]), "containers[w].args"),
        (container_manifest(image="z"), "containers[w].image"),
        (container_manifest(env=[{"name": "PYTHONPATH", "value": "/x"}]), "containers[w].env[PYTHONPATH]"),
        (container_manifest(volumeMounts=[{"name": "v", "mountPath": "/mlhpc/work"}]), "containers[w].volumeMounts[/mlhpc/work]"),
        (pod_manifest(volumes=[{"name": "mlhpc-work", "emptyDir": {"medium": "Memory"}}]), "volumes[mlhpc-work]"),
        (pod_manifest(initContainers=[{"name": "probe", "command": ["true"]}]), "spec.template.spec.initContainers[probe].command"),
        ({"spec": "a"}, "spec: the manifest says 'a', which should be a mapping"),
        ({"spec": {"template": ["a"]}}, "spec.template: the manifest says ['a'], which should be a mapping"),
        (pod_manifest(containers="a"), "containers: the manifest says 'a', which should be a list"),
        (pod_manifest(containers=["a"]), "containers[0]: the manifest says 'a', which should be a mapping"),
        (pod_manifest(affinity="a"), "affinity: the manifest says 'a', which should be a mapping"),
        ({"metadata": {"generateName": "a-"}}, "metadata.generateName: the manifest says 'a-', but 'generate_name: false' is set"),
        (pod_manifest(affinity={"nodeAffinity": "a"}), SHOULD),
        (pod_manifest(affinity={"nodeAffinity": {TERMS: ["a"]}}), SHOULD),
        (pod_manifest(affinity={"nodeAffinity": {TERMS: {"nodeSelectorTerms": ["a"]}}}), SHOULD),
        (pod_manifest(affinity={"nodeAffinity": {TERMS: {"nodeSelectorTerms": [{"matchFields": 1}]}}}), SHOULD),
        (pod_manifest(affinity={"podAntiAffinity": []}), SHOULD),
        (pod_manifest(affinity={"podAntiAffinity": {TERMS: 1}}), SHOULD),
    ],
)  # fmt: skip
def test_what_would_make_another_run_of_it_or_none_is_refused(manifest, text):
    with pytest.raises(UsageError) as caught:
        rendered(partition(manifest=manifest), 2, excluded_nodes=("bad",))
    assert str(caught.value).startswith("site:part: manifest of kind 'job': ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        pytest.param(
            partition("cuda", 4, manifest=container_manifest(resources={"limits": {"nvidia.com/gpu": 8}})),
            r"limits\.nvidia\.com/gpu: the manifest says 8, but '4' is set", id="devices are those of the run",
        ),
        pytest.param(
            partition(image=None), "no image is named: set image under kubernetes:, or container in environment", id="no image"
        ),
        pytest.param(
            partition(generate_name=True, manifest={"metadata": {"name": "a"}}),
            r"metadata\.name: the manifest says 'a', but 'generate_name: true' is set", id="a name where the server completes it",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(where, text):
    with pytest.raises(UsageError, match=text):
        rendered(where, 1, 4)


def test_all_conflicts_are_reported_at_once():
    manifest = {"metadata": {"name": "a"}, "spec": {"backoffLimit": 3, "completions": 9}}
    with pytest.raises(UsageError) as caught:
        rendered(partition(manifest=manifest), 2)
    assert len(str(caught.value).splitlines()) == 3


WORDS = st.sampled_from(
    [
        "metadata", "spec", "template", "containers", "name", "worker", "env", "volumes", "volumeMounts", "affinity",
        "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms", "labels", "resources",
        "limits", "initContainers", "securityContext", "mountPath", "probe", "groups", "head", "image",
    ]
)  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(WORDS, st.integers(-1, 9), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=25,
)
SPEC = st.fixed_dictionaries({}, optional={"metadata": ANYTHING, "spec": ANYTHING})
POD = st.fixed_dictionaries({"spec": st.fixed_dictionaries({"template": SPEC})})


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
@given(manifest=st.one_of(SPEC, POD, st.dictionaries(WORDS, ANYTHING)))
def test_whatever_a_manifest_holds_it_is_rendered_or_refused_in_words(kind, manifest):
    where = partition(kind=kind)
    where = replace(where, scheduler_options={**where.scheduler_options, "manifest": manifest})
    before = deepcopy(manifest)
    try:
        made = rendered(where, 2, excluded_nodes=("bad",))
    except UsageError:
        return
    for one in made.workloads:
        assert one["metadata"]["labels"]["pytest-mlhpc/allocation"] == "0-a"
        assert "pytest_mlhpc.node.batch.pod" in str(one)
    assert manifest == before


# --- fields that a server dropped


def without(sent, way):
    """Return a copy of *sent* that lacks the part to which *way* leads."""
    stored = deepcopy(sent)
    inner = reduce(getitem, way[:-1], stored)
    del inner[way[-1]]
    return stored


@pytest.mark.parametrize(
    ("path", "reported"),
    [
        ("spec/completionMode", "spec.completionMode"),
        ("spec/suspend", "spec.suspend"),
        ("spec/podFailurePolicy", "spec.podFailurePolicy"),
        ("spec/ttlSecondsAfterFinished", "spec.ttlSecondsAfterFinished"),
        (
            "spec/template/spec/securityContext/seccompProfile",
            "spec.template.spec.securityContext.seccompProfile",
        ),
        ("spec/template/spec/volumes/4/ephemeral", "spec.template.spec.volumes[fast].ephemeral"),
        ("spec/template/spec/volumes/4", "spec.template.spec.volumes[fast]"),
        ("spec/template/spec/containers/0/env/1", "spec.template.spec.containers[worker].env[MLHPC_PODS]"),
        ("spec/template/spec/initContainers", "spec.template.spec.initContainers"),
        ("spec/template/spec/affinity", "spec.template.spec.affinity"),
        ("metadata/labels/kueue.x-k8s.io~1queue-name", "metadata.labels.kueue.x-k8s.io/queue-name"),
    ],
)
def test_a_dropped_field_is_reported_by_its_path(path, reported):
    options = yaml.safe_load(Path(__file__).with_name("partition_with_a_queue.yaml").read_text())
    sent = workload(partition(**options), 2)
    way = [int(part) if part.isdigit() else part.replace("~1", "/") for part in path.split("/")]
    assert dropped_fields(sent, without(sent, way)) == (reported,)


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": {}}, {}),
        ({"a": []}, {}),
        ({"a": None, "b": "", "c": {"d": {}}}, {}),
        ({"hostIPC": False}, {}),  # what is false is the default where a server leaves it out
        ({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}),
        ({"limits": {"cpu": 1, "memory": "1073741824"}}, {"limits": {"cpu": "1", "memory": "1Gi"}}),
        ({"image": "torch"}, {"image": "registry/torch:latest"}),  # a webhook's change, seen in the pod
        ({"env": [{"name": "a", "value": "1"}]}, {"env": [{"name": "z"}, {"name": "a", "value": "1"}]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}, {"key": "a", "operator": "Equal"}]}),
        ({"spec": {"suspend": True}}, {"spec": {"suspend": True}, "status": {"conditions": []}}),
        ({"status": {"a": 1}, "metadata": {"creationTimestamp": "x"}}, {}),
    ],
)
def test_defaults_and_other_ways_to_write_a_value_are_no_loss(sent, stored):
    assert dropped_fields(sent, stored) == ()


@pytest.mark.parametrize(
    ("sent", "stored", "reported"),
    [
        ({"spec": {"backoffLimit": 0}}, {"spec": {"backoffLimit": 6}}, "spec.backoffLimit (0 became 6)"),
        ({"spec": {"suspend": True}}, {"spec": {"suspend": False}}, "spec.suspend (True became False)"),
        ({"completions": 2}, {"completions": 1}, "completions (2 became 1)"),
        ({"command": ["a", "b"]}, {"command": ["sh", "a"]}, "command (['a', 'b'] became ['sh', 'a'])"),
        ({"drop": ["ALL"]}, {"drop": ["NET"]}, "drop[0]"),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, "tolerations[0]"),
        ({"a": {"b": 1}}, {"a": "x"}, "a"),
    ],
)
def test_a_value_without_which_it_is_another_run_has_to_stay(sent, stored, reported):
    assert dropped_fields(sent, stored) == (reported,)


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
def test_what_a_cluster_stores_of_ours_as_it_was_sent_has_lost_nothing(kind):
    made = rendered(partition("cuda", 4, kind=kind, service=True), 3, 12)
    assert {dropped_fields(one, deepcopy(one)) for one in (made.secret, *made.workloads)} == {()}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", 1, True), ("1000m", "1", True), ("0.5", "500m", True), ("1Gi", 2**30, True), ("1G", 10**9, True),
        ("1e3", "1k", True), ("1Ki", "1k", False), ("100M", "100Mi", False), ("a", "a", False), ("", "", False),
        (True, 1, False), ("1..2", "1", False),
    ],
)  # fmt: skip
def test_quantities_are_compared_by_their_amount(one, other, same):
    assert same_quantity(one, other) is same


LEAVES = st.one_of(st.integers(1, 99), st.sampled_from(["a", "500m", "2Gi", "v1"]), st.just(value=True))
KEYS = st.sampled_from(["alpha", "beta", "gamma", "limits", "spec"])
NAMED = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["x", "y", "z"]), "value": LEAVES}),
    min_size=1,
    max_size=3,
    unique_by=lambda one: one["name"],
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3), st.fixed_dictionaries({"containers": NAMED})
    ),
    max_leaves=12,
).filter(lambda found: isinstance(found, dict))


def paths(found, way=()):
    """Return the way to every part of *found*."""
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [one for key, inner in items for one in ((*way, key), *paths(inner, (*way, key)))]


def served(found):
    """Return *found* as a server may store it: more fields, more items, quantities written in another way."""
    if isinstance(found, dict):
        return {"default": "added", **{key: served(value) for key, value in found.items()}}
    if isinstance(found, list):
        return [{"name": "injected"}, *map(served, found)]
    return {"500m": "0.5", "2Gi": str(2 * 2**30)}.get(found, found) if isinstance(found, str) else found


@given(OBJECTS)
def test_additions_and_defaults_of_a_server_are_not_reported(sent):
    assert dropped_fields(sent, served(sent)) == ()


@given(OBJECTS, st.data())
def test_exactly_what_is_dropped_is_reported(sent, data):
    way = data.draw(st.sampled_from(paths(sent)))
    reported = dropped_fields(sent, without(sent, way))
    assert reported, f"{way} is gone and nothing is reported"
    assert all(path.startswith(way[0]) for path in reported)
