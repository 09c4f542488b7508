"""What a server has left out of an object is told; what it has added, filled in or written in another way is not."""

from __future__ import annotations

from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import partition, rendered, workload

from pytest_mlhpc.provision.kubernetes.dropped import dropped, same_quantity


def without(sent, way):
    """Return a copy of *sent* that lacks the part to which *way* leads."""
    stored = deepcopy(sent)
    inner = reduce(getitem, way[:-1], stored)
    del inner[way[-1]]
    return stored


@pytest.mark.parametrize(
    ("path", "told"),
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
def test_a_field_that_is_gone_is_told_by_its_path(path, told):
    options = yaml.safe_load(Path(__file__).with_name("partition_with_a_queue.yaml").read_text())
    sent = workload(partition(**options), 2)
    way = [int(part) if part.isdigit() else part.replace("~1", "/") for part in path.split("/")]
    assert dropped(sent, without(sent, way)) == (told,)


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
    assert dropped(sent, stored) == ()


@pytest.mark.parametrize(
    ("sent", "stored", "told"),
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
def test_a_value_without_which_it_is_another_run_has_to_stay(sent, stored, told):
    assert dropped(sent, stored) == (told,)


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
def test_what_a_cluster_stores_of_ours_as_it_was_sent_has_lost_nothing(kind):
    made = rendered(partition("cuda", 4, kind=kind, service=True), 3, 12)
    assert {dropped(one, deepcopy(one)) for one in (made.config_map, *made.workloads)} == {()}


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


@settings(max_examples=60)
@given(OBJECTS)
def test_whatever_a_server_adds_and_fills_in_nothing_is_told(sent):
    assert dropped(sent, served(sent)) == ()


@settings(max_examples=60)
@given(OBJECTS, st.data())
def test_whatever_is_taken_away_is_told_and_nothing_else(sent, data):
    way = data.draw(st.sampled_from(paths(sent)))
    told = dropped(sent, without(sent, way))
    assert told, f"{way} is gone and nothing is told"
    assert all(path.startswith(way[0]) for path in told)
