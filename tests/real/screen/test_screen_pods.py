"""``mlhpc screen --pod`` on a real Kubernetes: it looks into a running pod, and says clearly when it cannot."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from services import wait_until


@pytest.fixture
def pod(kubernetes, namespace):
    """Start a pod that trains, and say its name; it goes with its namespace."""
    folders = kubernetes.host_folders()
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path in folders.items()]
    python = kubernetes.environment["MLHPC_TEST_PYTHON"]
    container = {
        "name": "main",
        "image": "mlhpc.test/host:1",
        "command": [python, "-c", Path(__file__).with_name("training.py.txt").read_text()],
        "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "4"}},  # without a request it gets nothing on a busy machine
    }
    spec = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container],
        "securityContext": {"runAsUser": 1000, "runAsGroup": 1000},
        "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in folders.items()],
    }  # fmt: skip
    base = f"/api/v1/namespaces/{namespace}/pods"
    kubernetes.ask("POST", base, {"metadata": {"name": "train-0"}, "spec": spec})
    logs = ("kubectl", "logs", "--namespace", namespace, "train-0")
    trains = wait_until(lambda: "trains" in kubernetes.run(*logs).stdout)
    assert trains, kubernetes.ask("GET", f"{base}/train-0")["status"]
    return "train-0"


def screen(kubernetes, namespace, *words, python=None) -> subprocess.CompletedProcess[str]:
    python = python or kubernetes.environment["MLHPC_TEST_PYTHON"]
    own = [sys.executable, "-m", "pytest_mlhpc.cli", "screen", "--namespace", namespace, "--python", python]
    return kubernetes.run(*own, *words)


def test_a_pod_that_trains_is_screened(kubernetes, namespace, pod):
    done = screen(kubernetes, namespace, "--seconds", "8", "--pod", pod)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stderr.splitlines()
    assert f"screened pod {pod} for" in first
    assert "1 rank on 1 node" in first
    assert any("computing" in line and "its first thread ran" in line for line in rest)
    assert rest[-1].startswith("mlhpc screen: not seen: steps and torch's profiler")


@pytest.mark.slow
def test_a_pod_that_is_not_there_is_named(kubernetes, namespace):
    done = screen(kubernetes, namespace, "--seconds", "1", "--pod", "nobody")
    assert done.returncode == 4
    assert "pod nobody: kubectl ended with 1: " in done.stderr
    assert 'pods "nobody" not found' in done.stderr


@pytest.mark.slow
def test_a_pod_without_that_python_says_which_was_missing(kubernetes, namespace, pod):
    done = screen(kubernetes, namespace, "--seconds", "1", "--pod", pod, python="/no/python3")
    assert done.returncode == 4
    assert f"pod {pod}: kubectl ended with " in done.stderr
    assert "/no/python3" in done.stderr


@pytest.mark.slow
def test_of_a_pod_that_ends_meanwhile_its_samples_are_reported(kubernetes, namespace, pod):
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}?gracePeriodSeconds=0"
    ending = threading.Timer(8.0, lambda: kubernetes.forget(path))
    ending.start()
    done = screen(kubernetes, namespace, "--seconds", "45", "--pod", pod)
    ending.join()
    assert done.returncode == 0, done.stderr
    assert f"screened pod {pod} for" in done.stderr
    assert "kubectl ended with " in done.stderr.splitlines()[-1]
