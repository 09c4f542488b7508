"""The cluster as a whole: up, down, status, and the faults that tests make."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path

from testcluster import ports, processes
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError

from testkubernetes import access, configuration, control_plane, images, machine, nodes
from testkubernetes.api import Api
from testkubernetes.settings import (
    CONTROL_PLANE,
    MOST_NODES,
    NODE_DAEMONS,
    PORTS,
    START_LIMIT_S,
    Settings,
    daemon_of,
    network_of,
)

#: Every process of a cluster has this in its environment, but for what runs in pods.
MARK = "MLHPC_KUBERNETES_DIRECTORY"


@dataclass(frozen=True)
class Wish:
    """What the caller of ``up`` asks for; None: whatever is there, else the default."""

    port: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    log_max_size: str | None = None
    log_files: int | None = None
    node_grace_s: int | None = None


class Cluster:
    """The cluster of one directory. Callers hold ``daemons.locked`` around everything that changes it."""

    def __init__(self, directory: Path) -> None:
        """Name the directory; nothing is made."""
        machine.check_directory(directory)
        self.directory = directory
        self.daemons = Daemons(directory, mark=MARK, variables={"KUBECONFIG": "/dev/null"})

    # --- up and down

    def up(self, wish: Wish, programs: dict[str, Path]) -> None:
        """Start what does not run; all nodes are Ready afterwards."""
        if self.is_up():
            self._check(wish)
            self._start(self.settings(), programs)
            return
        self.down()  # whatever is left of one that died
        with ports.free_range(PORTS, self.directory, first=wish.port) as port:
            asked = {key.name: getattr(wish, key.name) for key in fields(wish)}
            given = {key: value for key, value in asked.items() if value is not None and key != "port"}
            settings = Settings(port=port, network=network_of(port, ports.FIRST, ports.STRIDE), **given)
            try:
                self._prepare(settings, programs)
                self._start(settings, programs)
            except BaseException:
                self.down()  # nobody uses half a cluster; its logs stay
                raise

    def down(self, *, purge: bool = False) -> None:
        """End all that was started and everything that runs in pods, at once with or without ``purge``.

        Raises:
            ClusterError: Something lives on.
        """
        del purge
        processes.end_all(self._every_process)
        self.daemons.forget()
        if os.geteuid() == 0:
            machine.remove_cgroups(self.directory)
            machine.remove_bridge(self.directory)
            machine.restore_settings(self.directory)

    def is_up(self) -> bool:
        """Return whether any of it lives (a test may have ended the rest)."""
        return any(self.daemons.alive(name) for name in self.daemons.names() if name != "watcher")

    def expected(self) -> list[str]:
        """Return the names of the daemons that a whole cluster has."""
        numbers = range(1, self.settings().nodes + 1)
        return [*CONTROL_PLANE, *(daemon_of(name, number) for number in numbers for name in NODE_DAEMONS)]

    def settings(self) -> Settings:
        """Return how the cluster was started.

        Raises:
            ClusterError: It never was.
        """
        try:
            return Settings.from_text((self.directory / "state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ClusterError(f"no cluster in {self.directory}; `ci/kubernetes up` starts one") from None

    def api(self) -> Api:
        """Return how the API is asked."""
        return Api(self.directory, self.settings())

    # --- faults

    def kill(self, name: str, *, politely: bool) -> None:
        """End one daemon, or a whole node, as a crash does; ``politely``: SIGTERM, as an administrator does."""
        kind, number = self._parse(name)
        if kind == "node":
            nodes.kill(self.daemons, number)
            return
        self.daemons.end(name, patience_s=20.0 if politely else 0.0)

    def start(self, name: str, programs: dict[str, Path]) -> None:
        """Start one daemon, or a whole node, again, and wait until it serves."""
        kind, number = self._parse(name)
        settings = self.settings()
        if kind in CONTROL_PLANE:
            control_plane.start(self.daemons, settings, programs, kind)
            return
        if kind != "kubelet":
            nodes.start(self.daemons, settings, number, programs, self._archives())
        if kind in {"node", "kubelet"}:
            nodes.start_kubelet(self.daemons, settings, number, programs["kubelet"])
            nodes.await_ready(self.daemons, settings, number)

    def pretend(self, count: int, resource: str, node: str) -> None:
        """Let a node say that it has ``count`` of a device; 0: none.

        Raises:
            ClusterError: The API refuses it.
        """
        self.api().pretend(count, resource, node)

    def load_image(self, reference: str, source: Path, programs: dict[str, Path]) -> None:
        """Load an image into every node: a directory tree, or an archive as `docker save` and OCI tools write it."""
        if not source.exists():
            raise ClusterError(f"no {source}")
        archive = source
        if source.is_dir():
            archive = self.directory / "images" / f"given-{os.getpid()}.tar"
            images.pack(archive, reference, source, ["/bin/sh"])
        try:
            for number in range(1, self.settings().nodes + 1):
                socket = configuration.containerd_socket(self.directory, number)
                layers = machine.snapshotter(self.directory)
                images.load(archive, reference, ctr=programs["ctr"], socket=socket, snapshotter=layers)
        finally:
            if archive != source:
                archive.unlink(missing_ok=True)

    # --- parts

    def _parse(self, name: str) -> tuple[str, int]:
        """Return kind and number of ``kubelet.2`` or ``node``; 1 where there is no number."""
        kind, _, number = name.partition(".")
        known = {*CONTROL_PLANE, "node", "containerd", "kubelet"}
        count = self.settings().nodes
        if kind not in known or (number and not number.isdecimal()) or (number and kind in CONTROL_PLANE):
            raise ClusterError(
                f"no {name}; there are {', '.join(sorted(known))}, and kubelet.2 of a second node"
            )
        if kind not in CONTROL_PLANE and not 1 <= int(number or 1) <= count:
            raise ClusterError(f"no {name}; the cluster has {count} nodes")
        return kind, int(number or 1)

    def _check(self, wish: Wish) -> None:
        settings = self.settings()
        for key in fields(wish):
            asked, present = getattr(wish, key.name), getattr(settings, key.name)
            if asked is not None and asked != present:
                words = key.name.replace("_", "-")
                raise ClusterError(
                    f"runs already with {words} {present}, not {asked}; `ci/kubernetes down` first"
                )

    def _prepare(self, settings: Settings, programs: dict[str, Path]) -> None:
        folder = self.directory
        for stale in (
            "etcd",
            "addresses",
            "log",
            "pki",
            "run",
            "bin",
            *(f"node{n}" for n in range(1, MOST_NODES + 1)),
        ):
            shutil.rmtree(folder / stale, ignore_errors=True)
        for name in ("etc/cni", "etc/registries/mlhpc.test", "log", "pids", "run", "bin"):
            (folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        (folder / "etcd").mkdir(mode=0o700)
        for number in range(1, settings.nodes + 1):
            configuration.node_folder(folder, number).mkdir()
        (folder / "bin/kubectl").symlink_to(programs["kubectl"])
        access.make(folder, settings)
        for name, text in (
            ("audit.json", configuration.audit_policy()),
            ("cni/10-mlhpc.conflist", configuration.network(folder, settings)),
            ("registries/mlhpc.test/hosts.toml", configuration.registry()),
        ):
            (folder / "etc" / name).write_text(text, encoding="utf-8")
        if settings.nodes:
            images.build(folder / "images", programs["busybox"])
        (folder / "state.json").write_text(settings.to_text(), encoding="utf-8")

    def _archives(self) -> dict[str, Path]:
        names = (images.PAUSE, images.BUSYBOX, images.HOST)
        return {name: images.archive_of(self.directory / "images", name) for name in names}

    def _start(self, settings: Settings, programs: dict[str, Path]) -> None:
        control_plane.start(self.daemons, settings, programs, "etcd")
        # It needs seconds: nodes start meanwhile.
        control_plane.spawn(self.daemons, settings, programs, "kube-apiserver")
        numbers = range(1, settings.nodes + 1)
        for number in numbers:
            nodes.start(self.daemons, settings, number, programs, self._archives())
        for name in CONTROL_PLANE[1:]:
            control_plane.start(self.daemons, settings, programs, name)
        for number in numbers:
            nodes.start_kubelet(self.daemons, settings, number, programs["kubelet"])
        nodes.await_ready(self.daemons, settings, *numbers)
        api = self.api()
        if not processes.wait_until(api.has_service_account, START_LIMIT_S):
            raise ClusterError(
                f"the controller manager makes no service account{self.daemons.last_words('kube-controller-manager')}"
            )

    def _every_process(self) -> list[processes.Process]:
        pods = machine.in_cgroups(self.directory) if os.geteuid() == 0 else []
        return [*self.daemons.every_process(), *pods]
