"""A real Kubernetes of its own for benchmarks (``ci/kubernetes``): sessions on it, its audit log, a connection to cut."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import packed_training
from benchmarks.slurm_cluster import ROOT, UNFIT, Ended, NotHereError
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.objects import JOB, POD, SECRET, SERVICE, ObjectRef, object_ref

CONFTEST = Path(__file__).with_name("slurm_conftests") / "reports.py"
OURS = "app.kubernetes.io/managed-by=pytest-mlhpc"


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up; ``folder`` is ours alone, ``namespace`` too."""

    folder: Path
    environment: Mapping[str, str]
    namespace: str = "bench"

    def prepare(self) -> None:
        """Make the namespace, and a systems file whose pods run this environment, mounted from the host."""
        self.kubectl("create", "namespace", self.namespace)
        until = time.monotonic() + 60
        while "default" not in self.kubectl("get", "serviceaccounts", "--output", "name"):
            if time.monotonic() > until:
                raise SystemExit("the namespace does not get its service account")
            time.sleep(0.2)
        stamps = self.folder / "stamps"
        stamps.mkdir()
        stamps.chmod(0o777)  # pods write there as another user
        mounts = {"usr": "/usr", "venv": self.environment["MLHPC_TEST_VENV"], "prefix": self.environment["MLHPC_TEST_PREFIX"]}  # fmt: skip
        volumes: list[dict[str, Any]] = [
            {"name": name, "host_path": path, "mount": path, "read_only": True}
            for name, path in mounts.items()
        ]
        volumes.append({"name": "stamps", "host_path": str(stamps), "mount": str(stamps)})
        partition = {
            "scheduler": "kubernetes", "launcher": "plain", "accelerator": "cpu",
            "nodes": {"cores": 1, "memory": "512MiB", "max": 1},
            "kubernetes": {
                "namespace": self.namespace, "image": "mlhpc.test/host:1", "run_as_user": 1000, "run_as_group": 1000,
                "fs_group": 1000, "volumes": volumes, "grace": "3s",
            },
            "environments": {"default": {"python": self.environment["MLHPC_TEST_PYTHON"]}},
            "preset": "smoke", "time_limit": "5m",
        }  # fmt: skip
        training = {**partition, "launcher": "auto", "nodes": {"cores": 2, "memory": "3GiB", "max": 1}}
        trainings = {name: {**training, "warm": warm} for name, warm in packed_training.PARTITIONS.items()}
        systems = {"schema": 1, "systems": {"bench": {"partitions": {"pods": partition, **trainings}}}}
        (self.folder / "systems.yaml").write_text(json.dumps(systems), encoding="utf-8")  # JSON is YAML

    def kubectl(self, *words: str) -> str:
        """Return what kubectl prints, in our namespace."""
        done = subprocess.run(
            ["kubectl", "--namespace", self.namespace, *words],
            env=dict(self.environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"kubectl {shlex.join(words)}: {done.stderr}")
        return done.stdout

    def session(self, suite: str, reports: Path, *options: str, partition: str = "pods") -> Ended:
        """Run pytest over one suite in a folder of its own and return how it ended."""
        where = self.folder / f"suite-{time.monotonic_ns()}"
        where.mkdir()
        (where / "test_suite.py").write_text(suite, encoding="utf-8")
        (where / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
        argv = [sys.executable, "-m", "pytest", "-q", "-ra", "--rootdir", ".", "-p", "no:cacheprovider"]
        argv += [
            "-p",
            "no:randomly",
            "-p",
            "no:benchmark",
            "-o",
            f"mlhpc_systems_file={self.folder / 'systems.yaml'}",
        ]
        variables = {
            "MLHPC_BENCH_REPORTS": str(reports),
            "MLHPC_STATE": str(self.folder / "state"),
            "PYTEST_ADDOPTS": "",
        }
        begin = time.perf_counter()
        done = subprocess.run(
            [*argv, "--system", f"bench:{partition}", *options], cwd=where, env={**self.environment, **variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return Ended(done.stdout, time.perf_counter() - begin, 0.0, done.returncode)

    def asked(self) -> list[tuple[float, str]]:
        """Return all requests so far: epoch seconds, and ``verb URI``; what the cluster's own parts ask is not in the log."""
        found: dict[str, tuple[float, str]] = {}
        log = Path(self.environment["MLHPC_KUBERNETES_AUDIT"]).read_text(encoding="utf-8")
        for line in log.splitlines():
            event = json.loads(line)
            when = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            found.setdefault(event["auditID"], (when, f"{event['verb']} {event['requestURI']}"))
        return sorted(found.values())

    def objects(self) -> list[str]:
        """Return the names of all objects of ours."""
        kinds = ",".join(str(one) for one in (JOB, POD, SECRET, SERVICE))
        return self.kubectl("get", kinds, "--selector", OURS, "--output", "name").split()

    def printer(self, script: str) -> ObjectRef:
        """Run a shell's script in a pod and return it once its container has started."""
        container = {
            "name": "main", "image": "mlhpc.test/busybox:1", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
        }  # fmt: skip
        spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
        api = connect(namespace=self.namespace, environ=self.environment)
        ref = object_ref(POD, api.create(POD, {"metadata": {"name": "printer"}, "spec": spec}))
        while api.get(ref)["status"].get("phase") == "Pending":
            time.sleep(0.05)
        api.close()
        return ref

    def remove(self, ref: ObjectRef) -> None:
        """Delete a pod."""
        api = connect(namespace=self.namespace, environ=self.environment)
        api.delete(ref, grace_s=0)
        api.close()

    @contextlib.contextmanager
    def cuttable(self) -> Iterator[tuple[Path, Callable[[], int]]]:
        """Yield a kubeconfig that leads through a connection of ours, and what cuts all that goes through it."""
        sys.path.insert(0, str(ROOT / "tests"))
        wires = importlib.import_module("kubernetes_wire")  # as the tests of the same thing use it
        real = Path(self.environment["KUBECONFIG"])
        wire = wires.wire_to(real)
        try:
            yield wires.through(wire, real, self.folder / "through-wire"), wire.cut
        finally:
            wire.close()


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """Start a cluster below *folder* for as long as the context lasts, and no longer than this process.

    Raises:
        NotHereError: it cannot run on this machine; with the words of ``ci/kubernetes``.
        SystemExit: it does not come up.
    """
    where = ["--directory", str(folder / "cluster")]
    script = [sys.executable, str(ROOT / "ci/kubernetes")]
    try:
        done = subprocess.run(
            [*script, "up", "--for", str(os.getpid()), *where],
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode == UNFIT:
            raise NotHereError(done.stderr.strip())
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        cluster = Cluster(folder, {**os.environ, **_exported(script, where)})
        cluster.prepare()
        yield cluster
    finally:
        subprocess.run([*script, "down", "--purge", *where], capture_output=True, check=False, timeout=120)


def _exported(script: list[str], where: list[str]) -> dict[str, str]:
    """Return the variables that ``ci/kubernetes env`` exports."""
    words = subprocess.run([*script, "env", *where], capture_output=True, text=True, check=True).stdout
    text = f"{words}\nenv -0"
    shown = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    pairs = [item.partition("=") for item in shown.split("\0") if item]
    known = ("KUBECONFIG", "PATH")
    return {name: value for name, _, value in pairs if name in known or name.startswith("MLHPC_")}
