"""`ci/kubernetes`: starts a real Kubernetes, breaks it on demand, and leaves nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
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
from services import ROOT, command, control, leave, marked_processes, wait_until

pytestmark = pytest.mark.servers

_SHELL = "mlhpc.test/busybox:1"
_READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]


def pod(name: str, *command: str, image: str = _SHELL, **spec: Any) -> dict[str, Any]:
    main = {"name": "main", "image": image, "command": list(command)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main], **spec},
    }


def host_pod(folders: dict[str, str], name: str, *command: str) -> dict[str, Any]:
    """Return a pod as the restricted profile wants it, with this machine's Python in it."""
    made = pod(name, *command, image="mlhpc.test/host:1", automountServiceAccountToken=False)
    made["spec"]["volumes"] = [{"name": key, "hostPath": {"path": path}} for key, path in folders.items()]
    made["spec"]["securityContext"] = {
        "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    made["spec"]["containers"][0] |= {
        "volumeMounts": [{"name": key, "mountPath": path, "readOnly": True} for key, path in folders.items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return made


def create(cluster: Kubernetes, namespace: str, manifest: dict[str, Any]) -> None:
    cluster.ask("POST", f"/api/v1/namespaces/{namespace}/pods", manifest)


def status(cluster: Kubernetes, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]
    return found


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


@pytest.fixture
def user() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a cluster can be started for."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


# --- the cluster that all tests share


@pytest.fixture
def ours(kubernetes: Kubernetes) -> Kubernetes:
    """The shared cluster, if it is one of ci/kubernetes."""
    if kubernetes.directory is None:
        pytest.skip("MLHPC_TEST_KUBECONFIG names somebody else's cluster")
    return kubernetes


def test_the_server_says_which_version_it_is(kubernetes: Kubernetes) -> None:
    assert kubernetes.version().startswith("v1.20.2" if kubernetes.directory else "v")


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


def test_pods_run_and_end_as_on_a_site(ours: Kubernetes, namespace: str) -> None:
    torch = "import os, torch; print(torch.ones(2).sum().item(), os.getuid(), os.access('/usr', os.W_OK))"
    serve = "mkdir /tmp/www && echo hello >/tmp/www/index.html && httpd -f -p 8080 -h /tmp/www"
    eater = pod("eater", "sh", "-c", "x=a; while true; do x=$x$x; done")
    eater["spec"]["containers"][0]["resources"] = {"limits": {"memory": "32Mi"}}
    gpu = pod("gpu", "true")
    gpu["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 3}}
    server = pod("server", "sh", "-c", serve, nodeName="127.0.0.1")
    lost = pod("lost", "true", image="mlhpc.test/nobodys:1")
    for one in (
        server,
        host_pod(ours.host_folders(), "torch", os.environ["MLHPC_TEST_PYTHON"], "-c", torch),
        eater,
        gpu,
        lost,
    ):
        create(ours, namespace, one)
    address = until_phase(ours, namespace, "server", "Running")["podIP"]
    fetch = f"until wget -q -O - http://{address}:8080/; do sleep 0.2; done"
    create(ours, namespace, pod("client", "sh", "-c", fetch, nodeName="127.0.0.2"))

    for name in ("torch", "client", "gpu"):
        until_phase(ours, namespace, name, "Succeeded")
    assert logs(ours, namespace, "torch") == "2.0 1000 False\n", "an ordinary user has this machine's Python"
    assert logs(ours, namespace, "client").endswith("hello\n"), "pods of both nodes reach each other"
    (main,) = until_phase(ours, namespace, "eater", "Failed")["containerStatuses"]
    assert main["state"]["terminated"]["reason"] == "OOMKilled"

    def waiting() -> dict[str, str]:
        (main,) = status(ours, namespace, "lost").get("containerStatuses") or [{"state": {}}]
        return dict(main["state"].get("waiting", {}))

    assert wait_until(lambda: waiting().get("reason") == "ErrImagePull"), waiting()
    assert "127.0.0.1:9: connect: connection refused" in waiting()["message"], "no registry is asked"


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


@pytest.mark.parametrize("name", ["limited", "mlhpc"])
def test_users_have_the_rights_that_a_test_gives_them_and_no_others(
    ours: Kubernetes, namespace: str, name: str
) -> None:
    user, path = Kubernetes(ours.user(name)), f"/api/v1/namespaces/{namespace}/pods"
    with pytest.raises(ApiError, match=f'User \\\\"{name}\\\\" cannot list') as refusal:
        user.ask("GET", path)
    assert refusal.value.status == 403

    ours.grant(namespace, name, _READ_PODS)

    assert wait_until(lambda: user.has(path))
    with pytest.raises(ApiError, match="cannot create"):
        user.ask("POST", path, pod("mine", "true"))


def test_a_token_expires_when_it_is_told_to_and_can_be_renewed(
    kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    account = kubernetes.account(namespace, tmp_path, _READ_PODS)
    path = f"/api/v1/namespaces/{namespace}/pods"
    assert wait_until(lambda: Kubernetes(account.kubeconfig).has(path))

    account.expire()
    with pytest.raises(ApiError, match="Unauthorized") as refusal:
        Kubernetes(account.kubeconfig).ask("GET", path)
    assert refusal.value.status == 401
    account.renew()

    assert Kubernetes(account.kubeconfig).ask("GET", path)["items"] == []


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


def test_daemons_listen_on_loopback_only(ours: Kubernetes) -> None:
    assert ours.directory is not None
    ours_pids = [text.split()[0] for text in pids(ours.directory).values()]
    sockets = {
        str(entry.readlink())
        for pid in ours_pids
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if entry.is_symlink()
    }
    listening = [
        words[1]
        for name in ("tcp", "tcp6")
        for words in map(str.split, Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:])
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets
    ]

    assert len(listening) >= 5
    assert [address for address in listening if not address.partition(":")[0].endswith("00007F")] == []


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
def test_a_node_that_is_lost_is_told_and_its_pods_are_evicted(
    start_own_kubernetes: Callable[..., Kubernetes],
) -> None:
    cluster = start_own_kubernetes("--nodes", "2")
    create(cluster, "default", pod("there", "sleep", "1000", nodeName="127.0.0.2"))
    until_phase(cluster, "default", "there", "Running")

    cluster.kill("node.2")

    def ready() -> str:
        conditions = cluster.ask("GET", "/api/v1/nodes/127.0.0.2")["status"]["conditions"]
        return next(str(one["status"]) for one in conditions if one["type"] == "Ready")

    assert wait_until(lambda: ready() == "Unknown"), ready()
    there = "/api/v1/namespaces/default/pods/there"
    assert wait_until(lambda: "deletionTimestamp" in cluster.ask("GET", there)["metadata"])
    # It goes on to call itself Running: nobody is there to say that it is not.
    last = cluster.ask("GET", there)["status"]
    assert last["phase"] == "Running"
    assert {one["type"]: one["status"] for one in last["conditions"]}["Ready"] == "False"


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


def test_a_cluster_without_nodes_is_broken_mended_used_by_others_and_kept_for_good(
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


def test_two_clusters_live_side_by_side_and_one_goes_down_with_its_last_user_even_if_that_is_killed(
    start_own_kubernetes: Callable[..., Kubernetes], user: subprocess.Popen[bytes]
) -> None:
    with socket.socket() as busy:
        with contextlib.suppress(OSError):  # taken already: as good
            busy.bind(("127.0.0.1", 17003))
            busy.listen()
        one, two = start_own_kubernetes("--api-only"), start_own_kubernetes("--api-only")
    assert one.version() == two.version()
    assert one.directory is not None
    assert two.directory is not None
    end_kubernetes(one)
    assert two.version()
    state = json.loads((two.directory / "state.json").read_text(encoding="utf-8"))
    third = Path(f"{two.directory}-b")
    done = command("kubernetes", "up", "--api-only", "--port", str(state["port"]), "--directory", third)
    control("kubernetes", "down", "--purge", directory=third)
    assert done.returncode == 1
    assert f"--port {state['port']}: a port from {state['port']} to" in done.stderr

    control("kubernetes", "up", "--for", str(user.pid), directory=two.directory)
    leave("kubernetes", two.directory)
    assert two.version()
    user.kill()
    user.wait()
    assert wait_until(lambda: not two.directory.exists() and not marked(two.directory))


@contextlib.contextmanager
def killed_up(directory: Path, moment: str, *options: str) -> Iterator[None]:
    """Kill an `up` once it has started a daemon; whatever happens, the cluster is taken down."""
    argv = [sys.executable, ROOT / "ci/kubernetes", "up", *options, "--directory", directory]
    clean = {key: value for key, value in os.environ.items() if key != "MLHPC_TEST"}
    try:
        with subprocess.Popen(argv, env=clean, stderr=subprocess.DEVNULL, start_new_session=True) as up:
            begun = directory / "pids" / moment
            wait_until(lambda: begun.exists() or up.poll() is not None)
            up.kill()
        assert begun.exists()
        yield
    finally:
        control("kubernetes", "down", "--purge", directory=directory)


def test_what_a_killed_up_leaves_is_cleared_away(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("k")
    with killed_up(directory, "kubelet"):
        control("kubernetes", "down", directory=directory)
        assert marked(directory) == []
        assert rest_of(directory) == []


def test_what_an_up_leaves_that_is_killed_together_with_its_user_goes_by_itself(
    user: subprocess.Popen[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("k")
    with killed_up(directory, "etcd", "--api-only", "--for", str(user.pid)):
        user.kill()
        user.wait()
        assert wait_until(lambda: not directory.exists())
        assert wait_until(lambda: not marked(directory))


@pytest.mark.parametrize(
    ("folder", "words"),
    [("/tmp/" + "x" * 100, "is too long for a socket"), ("/tmp/mlhpc-a b", "' ' would be misread")],
)
def test_folders_that_the_parts_would_misread_are_refused(folder: str, words: str) -> None:
    done = command("kubernetes", "up", "--directory", folder)

    assert done.returncode == 1
    assert words in done.stderr
    assert not Path(folder).exists()


def test_without_root_it_says_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    done = subprocess.run(
        ["runuser", "-u", "nobody", "--", "/usr/bin/python3", ROOT / "ci/kubernetes", "up", "--directory", "/tmp/mlhpc-none"],
        capture_output=True, text=True, timeout=600, check=False, cwd="/",
    )  # fmt: skip

    assert done.returncode == 4, done.stderr
    assert "run this as root" in done.stderr


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

    done = command(
        "kubernetes",
        "up",
        "--parts",
        tmp_path / "parts",
        "--directory",
        tmp_path / "c",
        MLHPC_KUBERNETES_BINARIES=str(given),
    )

    assert done.returncode == 4
    assert ("cannot be unpacked" if kind == "nonsense" else "has no program kube-apiserver") in done.stderr
    assert not list(tmp_path.glob("parts/server*-1"))


def test_the_kubeconfig_of_a_site_is_not_taken_for_a_test_cluster_unless_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "config").touch()

    assert given_kubernetes({"KUBECONFIG": str(tmp_path / "config")}) is None
    named = given_kubernetes({"MLHPC_TEST_KUBECONFIG": str(tmp_path / "config")})
    assert named is not None
    assert (named.kubeconfig, named.directory, named.private) == (tmp_path / "config", None, False)
