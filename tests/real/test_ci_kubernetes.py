"""`ci/kubernetes`: starts a real Kubernetes, breaks it on demand, and leaves nothing."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes_service import (
    ApiError,
    Kubernetes,
    clear_away,
    cluster_of,
    end_kubernetes,
    given_kubernetes,
)
from services import ROOT, command, control, killed_up, leave, marked_processes, wait_until

pytestmark = pytest.mark.servers


def pod(name: str, *command: str, image: str = "mlhpc.test/busybox:1", **spec: Any) -> dict[str, Any]:
    main = {"name": "main", "image": image, "command": list(command)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main], **spec},
    }


def create(cluster: Kubernetes, namespace: str, manifest: dict[str, Any]) -> None:
    cluster.ask("POST", f"/api/v1/namespaces/{namespace}/pods", manifest)


def status(cluster: Kubernetes, namespace: str, name: str) -> dict[str, Any]:
    return cluster.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]


def until_phase(cluster: Kubernetes, namespace: str, name: str, *phases: str) -> dict[str, Any]:
    found = wait_until(lambda: status(cluster, namespace, name)["phase"] in phases)
    assert found, status(cluster, namespace, name)
    return status(cluster, namespace, name)


def logs(cluster: Kubernetes, namespace: str, name: str) -> str:
    return str(cluster.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}/log"))


def marked(directory: Path) -> list[str]:
    """Return the command lines of processes that this cluster started."""
    return marked_processes("MLHPC_KUBERNETES_DIRECTORY", directory)


def rest_of(directory: Path) -> list[str]:
    """Return what a cluster has of the machine: cgroups, network interface, mounts, a note of kernel settings."""
    tag = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    found = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/mlhpc-kubernetes-{tag}-*")]
    found += [str(path) for path in Path("/sys/class/net").glob(f"mlk{tag}")]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    found += [line for line in mounts if str(directory) in line]
    kept = Path("/run/mlhpc-kubernetes.json")
    holders = json.loads(kept.read_text(encoding="utf-8"))["holders"] if kept.exists() else {}
    return found + [words for words in holders if words == str(directory)]


def pids(directory: Path) -> dict[str, str]:
    return {entry.name: entry.read_text() for entry in (directory / "pids").glob("[!.]*")}


# --- the cluster that all tests share


@pytest.fixture
def ours(kubernetes: Kubernetes) -> Kubernetes:
    """The shared cluster, if it is one of ci/kubernetes."""
    if kubernetes.directory is None:
        pytest.skip("MLHPC_TEST_KUBECONFIG names somebody else's cluster")
    return kubernetes


def test_a_session_says_which_other_cluster_it_talks_to(kubernetes: Kubernetes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/real/test_ci_kubernetes.py"],
        env={**os.environ, "MLHPC_TEST_KUBECONFIG": str(kubernetes.kubeconfig)}, cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip

    words = f"kubernetes: {kubernetes.version()} at {kubernetes.server()}, of MLHPC_TEST_KUBECONFIG="
    assert words in done.stdout, done.stdout + done.stderr


def test_there_are_two_nodes_with_16_cpus_and_four_gpus_whatever_the_machine_has(ours: Kubernetes) -> None:
    nodes = {node["metadata"]["name"]: node["status"]["allocatable"] for node in ours.items("/api/v1/nodes")}

    assert list(nodes) == ["127.0.0.1", "127.0.0.2"]
    assert {(node["cpu"], node["nvidia.com/gpu"]) for node in nodes.values()} == {("16", "4")}


@pytest.mark.parametrize("kind", ["tree", "archive"])
def test_images_can_be_loaded_under_any_name(
    ours: Kubernetes, namespace: str, tmp_path: Path, kind: str
) -> None:
    assert ours.directory is not None
    source = ours.directory / "images/busybox-1.tar"
    if kind == "tree":
        with tarfile.open(source) as image, tarfile.open(fileobj=image.extractfile("layer.tar")) as layer:
            layer.extractall(tmp_path / "tree", filter="tar")
        source = tmp_path / "tree"

    done = command("kubernetes", "image", "--directory", ours.directory, f"mlhpc.test/{namespace}:1", source)

    assert done.returncode == 0, done.stderr
    for node in ("127.0.0.1", "127.0.0.2"):
        made = pod(f"on-{node}", "sh", "-c", "ls /etc", image=f"mlhpc.test/{namespace}:1", nodeName=node)
        create(ours, namespace, made)
        until_phase(ours, namespace, f"on-{node}", "Succeeded")
        assert logs(ours, namespace, f"on-{node}").split() == [
            "group", "hostname", "hosts", "nsswitch.conf", "passwd", "resolv.conf",
        ]  # fmt: skip


def test_what_is_no_image_is_refused(ours: Kubernetes, tmp_path: Path) -> None:
    assert ours.directory is not None
    (tmp_path / "nonsense").write_text("nonsense")

    for source, words in (
        ("nonsense", f"containerd takes no {tmp_path}/nonsense"),
        ("none", f"no {tmp_path}/none"),
    ):
        done = command(
            "kubernetes", "image", "--directory", ours.directory, "mlhpc.test/never:1", tmp_path / source
        )
        assert done.returncode == 1
        assert words in done.stderr


def test_the_audit_log_has_each_request_once_and_none_of_the_clusters_own(
    ours: Kubernetes, namespace: str
) -> None:
    create(ours, namespace, pod("one", "true"))
    until_phase(ours, namespace, "one", "Succeeded")

    path = f"/api/v1/namespaces/{namespace}/pods"
    requests = [one for one in ours.requests(ours_too=True) if one["requestURI"] == path]
    assert [(one["verb"], one["user"]["username"], one["responseStatus"]["code"]) for one in requests] == [
        ("create", "admin", 201)
    ]
    users = {one["user"].get("username", "") for one in ours.requests(ours_too=True)}
    assert not [name for name in users if name.startswith(("system:node", "system:kube", "system:apiserver"))]
    assert not [one for one in ours.requests() if one["requestURI"] == path]


def test_the_environment_is_quoted_for_a_shell(ours: Kubernetes) -> None:
    assert ours.directory is not None
    done = command("kubernetes", "env", "--directory", ours.directory)

    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert {words[0] for words in lines} == {"export"}
    assert [words[1].partition("=")[0] for words in lines] == [
        "KUBECONFIG", "MLHPC_KUBERNETES_AUDIT", "MLHPC_TEST_NAMESPACE", "MLHPC_TEST_PYTHON", "MLHPC_TEST_VENV",
        "MLHPC_TEST_PREFIX", "PATH",
    ]  # fmt: skip
    folders = [words[1].partition("=")[2] for words in lines[4:6]]
    assert len({*folders, "/usr"}) == 3
    assert all(Path(folder).is_dir() for folder in folders)


def test_what_a_test_leaves_is_found(kubernetes: Kubernetes, namespace: str) -> None:
    labels = {"app.kubernetes.io/managed-by": "pytest-mlhpc"}
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    kubernetes.ask("POST", path, {"metadata": {"name": "left", "labels": labels}})
    kubernetes.ask("POST", path, {"metadata": {"name": "somebodys"}})

    left = clear_away(kubernetes, [namespace], limit_s=0.0)

    assert left == [f"configmaps/left in {namespace}"]
    kubernetes.forget(f"{path}/left")


# --- faults, on clusters of their own


def test_a_cluster_breaks_and_comes_back(own_kubernetes: Kubernetes, namespace: str) -> None:
    create(own_kubernetes, namespace, pod("stays", "sleep", "1000"))
    until_phase(own_kubernetes, namespace, "stays", "Running")

    own_kubernetes.kill("kube-apiserver")
    with pytest.raises(ApiError, match="Connection refused"):
        own_kubernetes.version()
    own_kubernetes.start("kube-apiserver")
    own_kubernetes.kill("kubelet")
    own_kubernetes.kill("containerd")
    own_kubernetes.start("containerd")
    own_kubernetes.start("kubelet")

    assert status(own_kubernetes, namespace, "stays")["containerStatuses"][0]["restartCount"] == 0
    create(own_kubernetes, namespace, pod("after", "true"))
    until_phase(own_kubernetes, namespace, "after", "Succeeded")

    own_kubernetes.kill("node")  # cuts its power
    assert own_kubernetes.directory is not None
    tag = hashlib.sha256(str(own_kubernetes.directory).encode()).hexdigest()[:8]
    assert [file.read_text() for file in Path("/sys/fs/cgroup").glob(f"pids/mlhpc-kubernetes-{tag}-1/**/cgroup.procs")
            if file.read_text()] == []  # fmt: skip
    own_kubernetes.start("node")
    create(own_kubernetes, namespace, pod("again", "true"))
    until_phase(own_kubernetes, namespace, "again", "Succeeded")

    end_kubernetes(own_kubernetes)
    assert marked(own_kubernetes.directory) == []
    assert rest_of(own_kubernetes.directory) == []


@pytest.mark.slow
def test_logs_are_rotated_at_the_size_that_was_asked_for(
    start_own_kubernetes: Callable[..., Kubernetes],
) -> None:
    cluster = start_own_kubernetes("--log-max-size", "64Ki", "--log-files", "2")
    assert cluster.directory is not None
    print_all = "i=0; while true; do echo line $i; i=$((i+1)); usleep 200; done"
    create(cluster, "default", pod("talks", "sh", "-c", print_all))
    until_phase(cluster, "default", "talks", "Running")

    files = cluster.directory / "node1/private/pods"
    assert wait_until(lambda: len(list(files.glob("*_talks_*/main/0.log*"))) == 2)


# --- up and down


def test_a_cluster_without_nodes_can_be_broken_repaired_shared_and_left_running(
    start_own_kubernetes: Callable[..., Kubernetes],
) -> None:
    api = start_own_kubernetes("--api-only")
    assert api.directory is not None
    place = ("--directory", api.directory)
    create(api, "default", pod("waits", "true"))
    assert api.items("/api/v1/nodes") == []
    assert wait_until(lambda: bool(status(api, "default", "waits").get("conditions")))
    assert status(api, "default", "waits")["conditions"][0]["reason"] == "Unschedulable"

    # `up` starts only what is missing.
    before = pids(api.directory)
    api.kill("kube-scheduler")
    broken = command("kubernetes", "status", *place)
    assert broken.returncode == 3
    dead = [line.split() for line in broken.stdout.splitlines() if "dead" in line]
    assert dead == [["kube-scheduler", "dead"]]
    control("kubernetes", "up", directory=api.directory)
    after = pids(api.directory)
    assert {name for name in before if before[name] != after.get(name)} == {"kube-scheduler"}
    well = command("kubernetes", "status", *place)
    assert well.returncode == 0, well.stdout
    other = command("kubernetes", "up", "--nodes", "2", *place)
    assert other.returncode == 1
    assert "runs already with nodes 0, not 2; `ci/kubernetes down` first" in other.stderr

    # Somebody has said `up` for good: it stays when its last user leaves.
    leave("kubernetes", api.directory)
    assert api.version()
    assert given_kubernetes({"KUBECONFIG": str(api.kubeconfig)}) == cluster_of(api.directory)

    # What a test leaves is found though it broke its cluster, and what tells is started again.
    labels = {"app.kubernetes.io/managed-by": "pytest-mlhpc"}
    path = "/api/v1/namespaces/default/secrets"
    api.ask("POST", path, {"metadata": {"name": "left", "labels": labels}})
    for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
        api.kill(name)
    assert clear_away(api, [], limit_s=0.0) == ["secrets/left in default"]
    api.forget(f"{path}/left")
    assert api.runs("kube-controller-manager")
    control("kubernetes", "down", directory=api.directory)


def test_what_a_killed_up_leaves_is_cleared_away(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("k")
    with killed_up("kubernetes", directory, "kubelet"):
        control("kubernetes", "down", directory=directory)
        assert marked(directory) == []
        assert rest_of(directory) == []


# --- the programs


def test_programs_are_not_fetched_unless_that_is_wanted(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="k") as short:  # sockets have short names
        done = command(
            "kubernetes", "up", "--no-install", "--parts", tmp_path, "--directory", Path(short) / "c"
        )

    assert done.returncode == 4
    assert f"Debian's packages are not in {tmp_path}/packages-1; `ci/kubernetes install` helps" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "archive", "nonsense"])
def test_given_programs_that_are_incomplete_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "parts/packages-1").mkdir(parents=True)
    given = tmp_path / "given"
    if kind == "folder":
        given.mkdir()
    elif kind == "archive":
        (tmp_path / "kubelet").write_bytes(b"")
        with tarfile.open(given, "w:xz") as tar:
            tar.add(tmp_path / "kubelet", arcname="kubelet")
    else:
        given.write_text("nonsense")

    with tempfile.TemporaryDirectory(prefix="k") as short:  # sockets have short names
        words = ("up", "--parts", tmp_path / "parts", "--directory", Path(short) / "c")
        done = command("kubernetes", *words, MLHPC_KUBERNETES_BINARIES=str(given))

    assert done.returncode == 4
    assert ("cannot be unpacked" if kind == "nonsense" else "has no program kube-apiserver") in done.stderr
    assert not list(tmp_path.glob("parts/server*-1"))


def test_the_kubeconfig_of_a_site_is_not_taken_for_a_test_cluster_unless_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "config").touch()

    assert given_kubernetes({"KUBECONFIG": str(tmp_path / "config")}) is None
    named = given_kubernetes({"MLHPC_TEST_KUBECONFIG": str(tmp_path / "config")})
    assert named is not None
    assert (named.kubeconfig, named.directory, named.private) == (tmp_path / "config", None, False)
