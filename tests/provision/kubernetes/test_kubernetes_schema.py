"""``kubernetes:`` of a partition: its options, the names of mistakes, and the settings made from it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc.config.model import Target
from pytest_mlhpc.config.overrides import apply
from pytest_mlhpc.config.systems import load_systems
from pytest_mlhpc.errors import ConfigError
from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions
from pytest_mlhpc.provision.kubernetes.settings import (
    PATIENCE,
    KubernetesSettings,
    merge_options,
    settings_of,
)

HERE = Path(__file__).parent
PART = "systems.mine.partitions.part"


def load(folder, text, **environ):
    path, launchers = folder / "systems.yaml", ["plain", "torchrun", "srun", "mpirun", "poprun"]
    path.write_text(text)
    schedulers = {"kubernetes": KubernetesOptions}
    systems = load_systems(path, schedulers=schedulers, launchers=launchers, environ=environ)
    return systems.select("mine")[0].partition


def file_with(option="", accelerator="cpu", devices=0):
    """Return a systems file with one partition, which has this option beside its image."""
    text = (HERE / "systems_with_an_option.yaml").read_text()
    return text.replace("OPTION", option).replace("DEVICES", str(devices)).replace("ACCELERATOR", accelerator)


def settings(folder, option="", *shape, **environ):
    return settings_of(load(folder, file_with(option, *shape), **environ))


def complaints(folder, text):
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    head = f"{folder}/systems.yaml:"
    return [str(problem).removeprefix(head) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("namspace: a", "namspace: unknown key (did you mean 'namespace'?)"),
        ("kind: jobs", "kind 'jobs' is not one of ipujob, job, jobset, kueue, pods, pytorchjob (did you mean 'job'?)"),
        ("kind: mpijob", "kind 'mpijob' is not one of ipujob, job, jobset, kueue, pods, pytorchjob (did you mean 'job'?)"),
        ("keep: on-failur", "keep: 'on-failur' is not one of 'never', 'on-failure' or 'always' (did you mean 'on-failure'?)"),
        ("security: strict", "security: 'strict' is not one of 'restricted' or 'as_manifest' (did you mean 'restricted'?)"),
        ("image_pull_policy: always", "image_pull_policy: 'always' is not one of 'Always', 'IfNotPresent' or 'Never' (did you mean 'Always'?)"),
        ("namespace: My_Space", "namespace: 'My_Space' is not a name: lower-case letters, digits and '-', at most 63"),
        ("labels: {pytest-mlhpc/run: a}", "labels.pytest-mlhpc/run: 'pytest-mlhpc/run' is set for each allocation"),
        ("labels: {app.kubernetes.io/managed-by: helm}", "labels.app.kubernetes.io/managed-by: 'app.kubernetes.io/managed-by' is set for each allocation"),
        ("labels: {a: b c}", "labels.a: 'b c' is not a label's value: letters, digits, '.', '_' and '-', at most 63"),
        ("labels: {a: true}", "labels.a: true should be text; put it in quotes"),
        ("node_selector: {a/b/c: d}", "node_selector.a/b/c: 'a/b/c' is not a label's or annotation's key, such as site.org/project"),
        ("patience: {imag: 1m}", "patience.imag: unknown key (did you mean 'image'?)"),
        ("patience: {image: soon}", "patience.image: 'soon' is not a duration; write it like 1h, 30m, 1h30m or 3600 (seconds)"),
        ("resources: {requests: {ephemeral-storage: 512K}}", "resources.requests.ephemeral-storage: '512K' is not a quantity; write it like 2, 500m, 16Gi"),
        ("resources: {requests: {memory: 16000}}", "resources.requests: memory: '16000' is 15.62 KiB; did you mean 16000Mi?"),
        ("resources: {limits: {memory: 500m}}", "resources.limits: memory: '500m' is 0.5 B; did you mean 500Mi?"),
        ("volumes: [{name: a, mount: /a, template: 10}]", "volumes[0].template.size: '10' is 10 B; did you mean 10Mi?"),
        ("volumes: [{name: a, mount: /a, empty_dir: {size: 64k}}]", "volumes[0].empty_dir.size: '64k' is 62.5 KiB; did you mean 64Mi?"),
        ("resources: {limits: {cpu: lots}}", "resources.limits.cpu: 'lots' is not a quantity; write it like 2, 500m, 16Gi"),
        ("resources: {limits: {cpu: -1}}", "resources.limits.cpu: -1 is less than 0"),
        ("volumes: [{name: d, mount: /d}]", "volumes[0]: volume 'd' says no source; give one of claim, template, host_path, empty_dir, config_map, secret"),
        ("volumes: [{name: d, mount: /d, claim: c, secret: s}]", "volumes[0]: volume 'd' says both claim and secret; give one of claim, template, host_path, empty_dir, config_map, secret"),
        ("volumes: [{name: d, mount: /mlhpc/work, claim: c}]", "volumes[0].mount: '/mlhpc/work': /mlhpc holds the plan and the work of each allocation; mount it elsewhere"),
        ("volumes: [{name: d, mount: d, claim: c}]", "volumes[0].mount: 'd' is not an absolute path"),
        ("volumes: [{name: d, mount: /d, claim: c, sub_path: ../e}]", "volumes[0].sub_path: '../e' is not a path below the volume"),
        ("tolerations: [{key: a, operator: Exist}]", "tolerations[0].operator: 'Exist' is not one of 'Equal' or 'Exists' (did you mean 'Exists'?)"),
        ("run_as_user: 0", "run_as_user: 0 is root, which `security: restricted` forbids; set security: as_manifest"),
        ("service: true, generate_name: true", "with generate_name the host of rank 0 is not known before, so that service: true is not possible"),
        ("kind: kueue", "kind 'kueue' needs a queue: add the label kueue.x-k8s.io/queue-name"),
        ("manifest: {kind: Pod}", "the manifest's kind is 'Pod', but kind 'job' is 'Job'"),
        ("custom: {resource: {version: v1, kind: A, plural: as}, most: 1, templates: [{path: spec.template}], status: {succeeded: [Done], failed: [Failed]}}", "`custom` describes a kind of your own, but kind is 'job'; give it another name"),
        ("reprovision: 1000", "reprovision: input should be less than or equal to 100, not 1000"),
        ("ttl: 0", "ttl: 0 is not a duration above 0 and up to a year"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_the_nearest_word(tmp_path, option, message):
    (found,) = complaints(tmp_path, file_with(option))
    assert found.startswith(f"8: {PART}.kubernetes")
    assert found.partition("kubernetes")[2].lstrip(".: ") == message


def test_no_option_gives_the_defaults(tmp_path):
    assert settings(tmp_path) == KubernetesSettings(image="a")
    assert settings(tmp_path).patience == PATIENCE


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "ttl: 1h, keep_for: 2m, grace: 5, max_time: 1d",
            {"ttl_s": 3600, "keep_for_s": 120, "grace_s": 5, "max_time_s": 86400},
        ),
        ("shared_memory: 2GiB", {"shared_memory": 2 * 2**30}),
        ("patience: {image: 3m}", {"patience": {**PATIENCE, "image": 180.0}}),
        (
            "resources: {limits: {memory: 16GiB, a.b/c: 2}}",
            {"limits": {"memory": str(16 * 2**30), "a.b/c": "2"}},
        ),
        ("tolerations: [{key: a}]", {"tolerations": ({"key": "a", "operator": "Equal"},)}),
        ("labels: {team: 7}", {"labels": {"team": "7"}}),
    ],
)
def test_options_become_seconds_bytes_and_texts(tmp_path, option, expected):
    found = settings(tmp_path, option)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("option", "accelerator", "devices", "resource"),
    [
        ("", "cuda", 4, "nvidia.com/gpu"),
        ("", "cpu", 0, ""),
        ("device_resource: site.org/gpu", "cuda", 4, "site.org/gpu"),
        ("device_resource: none", "cuda", 4, ""),
        ("device_resource: nvidia.com/gpu", "cpu", 2, "nvidia.com/gpu"),
        ("device_resource: nvidia.com/gpu", "cpu", 0, ""),
    ],
)
def test_the_resource_of_devices_is_decided(tmp_path, option, accelerator, devices, resource):
    assert settings(tmp_path, option, accelerator, devices).device_resource == resource


def test_variables_are_put_in_and_then_checked(tmp_path):
    option = 'namespace: "${NS}", labels: {q: "${NS}-queue"}, resources: {limits: {cpu: "${CPUS}"}}'
    found = settings(tmp_path, option, NS="proj", CPUS="2")
    assert (found.namespace, found.labels, found.limits) == ("proj", {"q": "proj-queue"}, {"cpu": "2"})
    with pytest.raises(ConfigError, match=r"namespace: the value of '\$\{NS\}' is not a name") as caught:
        settings(tmp_path, option, NS="No Name", CPUS="2")
    assert "No Name" not in str(caught.value)


def test_a_manifest_is_read_from_a_file_beside_the_systems_file(tmp_path):
    (tmp_path / "job.yaml").write_text("spec: {suspend: false}\n")
    assert settings(tmp_path, "manifest: job.yaml").manifest == {"spec": {"suspend": False}}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "job.yaml: cannot be read: no such file"),
        ("- a\n", "job.yaml:1: should be a mapping"),
        ("a: !!python/object/apply:os.system [ls]\n", "tag"),
        ("a: b\na: c\n", "a"),
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "job.yaml").write_text(content)
    (found,) = complaints(tmp_path, file_with("manifest: job.yaml"))
    assert found.startswith(f"8: {PART}.kubernetes.manifest: ")
    assert "job.yaml" in found
    assert complaint in found.lower()


def test_poprun_starts_ranks_in_one_pod_alone(tmp_path):
    text = file_with("kind: ipujob", "ipu\n        launcher: poprun", 8)
    says = "poprun reaches other nodes by ssh, which pods have not: nodes.max must be 1"
    assert f"7: {PART}.launcher: {says}" in complaints(tmp_path, text)
    assert load(tmp_path, text.replace("max: 4", "max: 1")).launcher == "poprun"


def test_all_that_pods_cannot_have_is_listed_at_once(tmp_path):
    expected = (HERE / "systems_that_pods_cannot_have.txt").read_text().splitlines()
    assert complaints(tmp_path, (HERE / "systems_that_pods_cannot_have.yaml").read_text()) == expected


def test_an_image_of_the_manifest_will_do(tmp_path):
    manifest = "manifest: {spec: {template: {spec: {containers: [{name: main, image: i}]}}}}"
    text = file_with().replace("image: a, ", manifest)
    assert settings_of(load(tmp_path, text)).image == ""


def test_options_of_a_test_are_put_over_those_of_the_partition(tmp_path):
    option = "labels: {a: x, b: y}, patience: {image: 1m, config: 1m}, ttl: 1h"
    where = load(tmp_path, file_with(option))
    given = {"image": "b", "labels": {"b": "z"}, "patience": {"image": 5.0, "config": None}}
    found = settings_of(where, given)
    assert (found.image, found.labels, found.ttl_s) == ("b", {"a": "x", "b": "z"}, 3600)
    assert (found.patience["image"], found.patience["config"]) == (5.0, 60.0)
    assert settings_of(where).image == "a"


def test_putting_over_changes_neither_side():
    options: dict[str, Any] = {"resources": {"limits": {"cpu": "1"}, "requests": {}}, "labels": {"a": "b"}}
    overrides: dict[str, Any] = {"resources": {"limits": {"memory": "1Gi"}}}
    before = deepcopy((options, overrides))
    merged = merge_options(options, overrides)
    assert merged["resources"] == {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {}}
    assert (options, overrides) == before


def test_an_option_is_set_for_one_session(tmp_path):
    where = load(tmp_path, file_with("labels: {a: b}"))
    values = {"image": "b", "probe": "false", "run_as_user": "7", "ttl": "1h"}
    given = {f"kubernetes.{name}": value for name, value in values.items()}
    (target,) = apply([Target(where, where.environments[0])], given, {"kubernetes": KubernetesOptions})
    found = vars(settings_of(target.partition))
    expected = {"image": "b", "probe": False, "run_as_user": 7, "ttl_s": 3600, "labels": {"a": "b"}}
    assert {name: found[name] for name in expected} == expected
