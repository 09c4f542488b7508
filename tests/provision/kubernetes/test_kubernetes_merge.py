"""Ours into a copy of the caller's manifest: theirs wins, but where a run would not be what was asked for."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import manifest_schemas
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import part, partition, pod, rendered, variables, workload

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.kinds import kind_of
from pytest_mlhpc.provision.kubernetes.merge import Conflict, Must, every_must, merge
from pytest_mlhpc.provision.kubernetes.options import settings_of

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
            {"spec": {"count": 3}}, {"spec": {"count": Must(2)}}, {"spec": {"count": 2}},
            ["spec.count: the manifest says 3, but 2 is set for each run; leave it out"],
            id="what must be is a conflict that names the path",
        ),
        pytest.param(
            {"a": "2", "b": {"c": 1}}, {"a": Must(2), "b": Must({"c": 1})}, {"a": 2, "b": {"c": 1}}, [],
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
            FROM_FIELD, {"env": [Must(HOME)]}, {"env": [HOME]},
            [
                ("env[HOME]: the manifest says {'name': 'HOME', 'valueFrom': {'fieldRef': {'fieldPath': 'x'}}}, "
                "but {'name': 'HOME', 'value': '/'} is set for each run; leave it out")
            ],
            id="a variable that must be",
        ),
    ],
)  # fmt: skip
def test_ours_is_merged_into_theirs(theirs, ours, merged, conflicts):
    found: list[Conflict] = []
    assert merge(theirs, ours, found, "") == merged
    assert [str(one) for one in found] == conflicts


def test_all_leaves_must_be_but_names_of_items():
    found = every_must({"a": {"b": 1}, "c": [{"name": "n", "d": 2}], "e": [3]})
    assert found == {"a": {"b": Must(1)}, "c": [{"name": "n", "d": Must(2)}], "e": Must([3])}


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
    assert found[agent]["command"][2] == "pytest_mlhpc.batch.pod"
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


def test_all_conflicts_are_told_at_once():
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
@settings(max_examples=40)
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
        assert "pytest_mlhpc.batch.pod" in str(one)
    assert manifest == before
