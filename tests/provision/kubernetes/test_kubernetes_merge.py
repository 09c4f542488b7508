"""Ours into a copy of the caller's manifest: theirs wins, but where a run would not be what was asked for."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import manifest_schemas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifests import ENVIRONMENT, partition, pod, rendered, variables, workload

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.kinds import kind_of
from pytest_mlhpc.provision.kubernetes.merge import Conflict, Must, every_must, merge
from pytest_mlhpc.provision.kubernetes.options import settings_of


def merged(theirs: Any, ours: Any, path: str = "") -> tuple[Any, list[Conflict]]:
    conflicts: list[Conflict] = []
    return merge(theirs, ours, conflicts, path), conflicts


def with_pod(spec: dict[str, Any], **more: Any):
    """Return a partition whose manifest has this pod."""
    return partition(manifest={"spec": {"template": {"spec": spec}}}, **more)


def test_theirs_wins_and_ours_fills_in():
    theirs = {"a": 1, "b": {"c": [1]}, "n": None}
    assert merged(theirs, {"a": 2, "b": {"c": [2], "d": 3}, "n": 4}) == (
        {"a": 1, "b": {"c": [1, 2], "d": 3}, "n": 4},
        [],
    )


def test_what_must_be_is_a_conflict_that_names_the_path():
    found, conflicts = merged({"spec": {"count": 3}}, {"spec": {"count": Must(2)}})
    assert found == {"spec": {"count": 2}}
    assert [str(one) for one in conflicts] == [
        "spec.count: the manifest says 3, but 2 is set for each run; leave it out"
    ]


def test_what_must_be_may_be_repeated():
    assert merged({"a": "2", "b": {"c": 1}}, {"a": Must(2), "b": Must({"c": 1})}) == (
        {"a": 2, "b": {"c": 1}},
        [],
    )


def test_items_of_lists_are_found_by_their_names():
    theirs = {"containers": [{"name": "b", "image": "x"}, {"name": "a"}]}
    found, conflicts = merged(theirs, {"containers": [{"name": "a", "image": "y"}, {"name": "c"}]})
    assert found == {"containers": [{"name": "b", "image": "x"}, {"name": "a", "image": "y"}, {"name": "c"}]}
    assert conflicts == []


def test_a_variable_or_volume_is_one_or_the_other_not_a_mixture():
    theirs = {"env": [{"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}
    found, _ = merged(theirs, {"env": [{"name": "HOME", "value": "/"}]})
    assert found == theirs
    found, conflicts = merged(theirs, {"env": [Must({"name": "HOME", "value": "/"})]}, "spec")
    assert found == {"env": [{"name": "HOME", "value": "/"}]}
    assert [one.path for one in conflicts] == ["spec.env[HOME]"]


def test_all_leaves_must_be_but_names_of_items():
    wanted = every_must({"a": {"b": 1}, "c": [{"name": "n", "d": 2}], "e": [3]})
    assert wanted == {"a": {"b": Must(1)}, "c": [{"name": "n", "d": Must(2)}], "e": Must([3])}


def test_the_callers_manifest_is_never_changed():
    manifest = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"template": {"spec": {"containers": [{"name": "main", "env": []}], "volumes": []}}},
    }
    before = deepcopy(manifest)
    where = partition(manifest=manifest)
    first, second = rendered(where, 2), rendered(where, 2)
    assert manifest == before
    assert where.scheduler_options["manifest"] == before
    assert first == second


def test_the_agent_runs_in_the_container_called_worker_else_in_the_first():
    side, main = {"name": "side", "image": "s"}, {"name": "worker", "tty": True}
    spec = pod(with_pod({"containers": [side, main]}))["spec"]
    assert [one["name"] for one in spec["containers"]] == ["side", "worker"]
    assert spec["containers"][0] == side
    assert spec["containers"][1]["command"][2] == "pytest_mlhpc.batch.pod"
    assert spec["containers"][1]["tty"] is True
    where = with_pod({"containers": [{"name": "main"}, {"name": "side", "image": "s"}]})
    spec = pod(where)["spec"]
    assert spec["containers"][0]["command"][2] == "pytest_mlhpc.batch.pod"
    assert kind_of(settings_of(where)).container == "main"


def test_what_the_manifest_says_of_its_pods_stays():
    where = with_pod(
        {
            "securityContext": {"runAsNonRoot": False, "supplementalGroups": [5]},
            "terminationGracePeriodSeconds": 99,
            "automountServiceAccountToken": True,
            "tolerations": [{"key": "a"}],
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "A", "value": "b"}, {"name": "HOME", "value": "/root"}],
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                    "resources": {"limits": {"cpu": "3"}},
                }
            ],
        },
        tolerations=[{"key": "b"}],
    )
    spec = pod(where)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["terminationGracePeriodSeconds"] == 99
    assert spec["automountServiceAccountToken"] is True
    assert [one["key"] for one in spec["tolerations"]] == ["a", "b"]
    (container,) = spec["containers"]
    told = variables(container)
    assert (told["A"], told["HOME"], told["MLHPC_PODS"]) == ("b", "/root", "1")
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["resources"]["limits"]["cpu"] == "3"
    assert spec["initContainers"][0]["env"] == container["env"]
    assert manifest_schemas.complaints(workload(where)) == []


def test_another_dev_shm_takes_the_place_of_ours():
    mount, volume = (
        {"name": "dshm", "mountPath": "/dev/shm"},
        {"name": "dshm", "emptyDir": {"medium": "Memory"}},
    )
    spec = pod(with_pod({"containers": [{"name": "w", "volumeMounts": [mount]}], "volumes": [volume]}))[
        "spec"
    ]
    assert [one for one in spec["containers"][0]["volumeMounts"] if one["mountPath"] == "/dev/shm"] == [mount]
    assert [one["name"] for one in spec["volumes"]] == ["dshm", "mlhpc-config", "mlhpc-work", "mlhpc-info"]


def test_init_containers_of_the_manifest_run_before_the_probe():
    where = with_pod({"initContainers": [{"name": "fetch", "image": "f"}]})
    assert [one["name"] for one in pod(where)["spec"]["initContainers"]] == ["fetch", "probe"]


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({"spec": {"parallelism": 4}}, "spec.parallelism: the manifest says 4, but 2 is set for each run"),
        ({"spec": {"completionMode": "NonIndexed"}}, "spec.completionMode: the manifest says 'NonIndexed', but 'Indexed'"),
        ({"spec": {"backoffLimit": 6}}, "spec.backoffLimit: the manifest says 6, but 0 is set"),
        ({"metadata": {"name": "mine"}}, "metadata.name: the manifest says 'mine', but 'mlhpc-0-a' is set"),
        ({"metadata": {"labels": {"pytest-mlhpc/run": "x"}}}, "metadata.labels.pytest-mlhpc/run: the manifest says 'x'"),
        ({"spec": {"template": {"spec": {"restartPolicy": "OnFailure"}}}}, "spec.template.spec.restartPolicy"),
        (
            {"spec": {"template": {"spec": {"containers": [{"name": "w", "command": ["sleep"]}]}}}},
            "spec.template.spec.containers[w].command: the manifest says ['sleep'], but ['/opt/python'",
        ),
        ({"spec": {"template": {"spec": {"containers": [{"name": "w", "args": ["1"]}]}}}}, "containers[w].args"),
        ({"spec": {"template": {"spec": {"containers": [{"name": "w", "image": "z"}]}}}}, "containers[w].image"),
        (
            {"spec": {"template": {"spec": {"containers": [{"name": "w", "env": [{"name": "PYTHONPATH", "value": "/x"}]}]}}}},
            "containers[w].env[PYTHONPATH]",
        ),
        (
            {"spec": {"template": {"spec": {"containers": [{"name": "w", "volumeMounts": [{"name": "v", "mountPath": "/mlhpc/work"}]}]}}}},
            "containers[w].volumeMounts[/mlhpc/work]",
        ),
        ({"spec": {"template": {"spec": {"volumes": [{"name": "mlhpc-work", "emptyDir": {"medium": "Memory"}}]}}}}, "volumes[mlhpc-work]"),
        (
            {"spec": {"template": {"spec": {"initContainers": [{"name": "probe", "command": ["true"]}]}}}},
            "spec.template.spec.initContainers[probe].command",
        ),
    ],
)  # fmt: skip
def test_what_would_make_another_run_of_it_is_refused(manifest: dict[str, Any], text: str):
    with pytest.raises(UsageError) as caught:
        rendered(partition(manifest=manifest), 2)
    assert str(caught.value).startswith("site:part: manifest of kind 'job': ")
    assert text in str(caught.value)


def test_devices_of_the_manifest_have_to_be_those_of_the_run():
    container = {"name": "w", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    where = partition("cuda", 4, manifest={"spec": {"template": {"spec": {"containers": [container]}}}})
    with pytest.raises(UsageError, match=r"limits\.nvidia\.com/gpu: the manifest says 8, but '4' is set"):
        rendered(where, 1, 4)


def test_all_conflicts_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        rendered(
            partition(manifest={"metadata": {"name": "a"}, "spec": {"backoffLimit": 3, "completions": 9}}), 2
        )
    assert len(str(caught.value).splitlines()) == 3


def test_no_image_anywhere_is_told():
    where = partition(image=None)
    assert not ENVIRONMENT.extra
    with pytest.raises(
        UsageError, match="no image is named: set image under kubernetes:, or container in environment"
    ):
        rendered(where)


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({"spec": "a"}, "spec: the manifest says 'a', which should be a mapping"),
        ({"spec": {"template": ["a"]}}, "spec.template: the manifest says ['a'], which should be a mapping"),
        ({"spec": {"template": {"spec": {"containers": "a"}}}}, "containers: the manifest says 'a', which should be a list"),
        ({"spec": {"template": {"spec": {"containers": ["a"]}}}}, "containers[0]: the manifest says 'a', which should be a mapping"),
        ({"spec": {"template": {"spec": {"affinity": "a"}}}}, "affinity: the manifest says 'a', which should be a mapping"),
        ({"metadata": {"generateName": "a-"}}, "metadata.generateName: the manifest says 'a-', but 'generate_name: false' is set"),
    ],
)  # fmt: skip
def test_what_has_another_form_is_told(manifest: dict[str, Any], text: str):
    with pytest.raises(UsageError) as caught:
        rendered(partition(manifest=manifest))
    assert text in str(caught.value)


def test_a_name_where_the_server_completes_it_is_refused():
    with pytest.raises(
        UsageError, match=r"metadata\.name: the manifest says 'a', but 'generate_name: true' is set"
    ):
        rendered(partition(generate_name=True, manifest={"metadata": {"name": "a"}}))


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


TERMS = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    "affinity",
    [
        {"nodeAffinity": "a"}, {"nodeAffinity": {TERMS: ["a"]}}, {"nodeAffinity": {TERMS: {"nodeSelectorTerms": ["a"]}}},
        {"nodeAffinity": {TERMS: {"nodeSelectorTerms": [{"matchFields": 1}]}}}, {"podAntiAffinity": []},
        {"podAntiAffinity": {TERMS: 1}},
    ],
)  # fmt: skip
def test_an_affinity_that_is_none_is_refused(affinity: dict[str, Any]):
    with pytest.raises(
        UsageError, match=r"spec\.affinity: the manifest says .* which should be an affinity of the API"
    ):
        rendered(with_pod({"affinity": affinity}), 2, excluded_nodes=("bad",))


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
@given(manifest=st.one_of(SPEC, POD, st.dictionaries(WORDS, ANYTHING)))
def test_whatever_a_manifest_holds_it_is_rendered_or_refused_in_words(kind: str, manifest: dict[str, Any]):
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
