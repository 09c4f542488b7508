"""Nodes: each a mount namespace with a containerd and a kubelet in it.

A kubelet has folders compiled in (/var/log/pods, /var/lib/kubelet ...), so that one machine has room for one; in a mount
namespace of its own each node sees its own. Whatever is mounted there ends with the node's last process: there is nothing to
unmount.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from testcluster import ports, processes
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError, UnfitMachineError
from testcluster.processes import Process

from testkubernetes import configuration, images, machine
from testkubernetes.api import Api, answers_well
from testkubernetes.configuration import containerd_socket, node_folder
from testkubernetes.settings import NODE_DAEMONS, START_LIMIT_S, Settings, daemon_of, node_name

#: Folders compiled into kubelet, containerd's shims and the network plug-ins: where -> whose name in the node's folder.
_PRIVATE = {
    "/var/log/pods": "pods", "/var/log/containers": "containers", "/var/lib/kubelet": "lib", "/var/lib/cni": "cni",
    "/run/containerd": "shims",
}  # fmt: skip
# Paths come as arguments, never as text. Mounts made outside later are seen in there, and let go of when they end.
_BOOT = """
set -eu
node=$1; shift
mount --make-rshared /
while [ $# -gt 0 ]; do mount --bind "$1" "$2"; shift 2; done
readlink /proc/self/ns/mnt >"$node/ready"
exec sleep infinity
"""


def start(
    daemons: Daemons, settings: Settings, number: int, programs: dict[str, Path], archives: dict[str, Path]
) -> None:
    """Start what does not run of a node: its namespace, containerd with our images, kubelet.

    Raises:
        ClusterError: It does not come up.
    """
    directory = daemons.directory
    box = daemon_of("node", number)
    if not daemons.alive(box):
        _start_box(daemons, settings, number)
    holder = daemons.recorded(box)
    if holder is None:
        raise ClusterError(f"{box} ended while starting{daemons.last_words(box)}")
    machine.keep_settings(directory, holder)
    machine.make_cgroups(directory, number)
    name, socket = daemon_of("containerd", number), containerd_socket(directory, number)
    if not daemons.alive(name):
        socket.unlink(missing_ok=True)
        conf = node_folder(directory, number) / "containerd.toml"
        layers = machine.snapshotter(directory)
        text = configuration.containerd(directory, number, programs["prefix"], snapshotter=layers)
        conf.write_text(text, encoding="utf-8")
        enter = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]
        daemons.start(
            name, [*enter, str(programs["containerd"]), "--config", str(conf), "--log-level", "warn"]
        )
        daemons.await_service(name, lambda: ports.answers(socket), limit_s=START_LIMIT_S)
        loaded = node_folder(directory, number) / "images-loaded"
        if not loaded.exists():
            for reference, archive in archives.items():
                images.load(archive, reference, ctr=programs["ctr"], socket=socket, snapshotter=layers)
            loaded.touch()


def start_kubelet(daemons: Daemons, settings: Settings, number: int, program: Path) -> None:
    """Start the kubelet of a node that is otherwise up; whether it is Ready the API knows."""
    directory = daemons.directory
    holder = daemons.recorded(daemon_of("node", number))
    if holder is None:
        raise ClusterError(f"node {number} is down; `ci/kubernetes up` starts it")
    file = node_folder(directory, number) / "kubelet.json"
    file.write_text(configuration.kubelet_configuration(directory, settings, number), encoding="utf-8")
    enter = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]
    daemons.start(daemon_of("kubelet", number), [*enter, *configuration.kubelet(directory, number, program)])


def await_ready(daemons: Daemons, settings: Settings, *numbers: int) -> None:
    """Wait until nodes are Ready; then they pretend to have the GPUs that they are to have.

    Raises:
        ClusterError: A kubelet ended, or is not Ready in time.
    """
    api = Api(daemons.directory, settings)
    kubelets = [daemon_of("kubelet", number) for number in numbers]

    def ready() -> bool:
        # What the API says may be from before a crash; a kubelet's own word is from now.
        if not all(answers_well(settings.port_of("healthz", number)) for number in numbers):
            return False
        states = api.node_states()
        return all(states.get(node_name(number)) == "Ready" for number in numbers)

    def dead() -> list[str]:
        return [name for name in kubelets if not daemons.alive(name)]

    well = processes.wait_until(lambda: ready() or bool(dead()), START_LIMIT_S)
    if not well or dead():
        trouble = f"{dead()[0]} ended" if dead() else f"nodes are {api.node_states() or 'unknown'}"
        raise ClusterError(f"{trouble}{daemons.last_words((dead() or kubelets)[0])}")
    for number in numbers if settings.gpus else ():
        api.pretend(settings.gpus, "nvidia.com/gpu", node_name(number))


def kill(daemons: Daemons, number: int) -> None:
    """Cut the power of a node: kubelet, containerd and all that its pods ran are gone."""
    processes.end_all(lambda: [*_inside(daemons, number), *machine.in_cgroups(daemons.directory, number)])
    for name in NODE_DAEMONS:
        (daemons.directory / "pids" / daemon_of(name, number)).unlink(missing_ok=True)


def _inside(daemons: Daemons, number: int) -> list[Process]:
    """Return the processes in a node's mount namespace: its daemons, and the shims, which are nobody's children."""
    try:
        namespace = (node_folder(daemons.directory, number) / "ready").read_text(encoding="ascii").strip()
    except OSError:
        return []
    marked = processes.with_variable(daemons.mark, str(daemons.directory))
    return [process for process in marked if _namespace(process) == namespace]


def _namespace(process: Process) -> str:
    try:
        return str(Path(f"/proc/{process.pid}/ns/mnt").readlink())
    except OSError:
        return ""


def _start_box(daemons: Daemons, settings: Settings, number: int) -> None:
    node = node_folder(daemons.directory, number)
    (node / "ready").unlink(missing_ok=True)
    pairs: list[str] = []
    for place, name in _PRIVATE.items():
        (node / "private" / name).mkdir(parents=True, exist_ok=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        pairs += [str(node / "private" / name), place]
    for place, tree in _pretended_cpus(node / "cpus", settings.cpus).items():
        pairs += [str(tree), place]
    name = daemon_of("node", number)
    boot = ["sh", "-c", _BOOT, "sh", str(node), *pairs]
    daemons.start(name, ["unshare", "--mount", "--propagation", "slave", *boot])
    try:
        daemons.await_service(name, (node / "ready").exists)
    except ClusterError as error:
        raise UnfitMachineError(
            f"a node needs mount namespaces, which this machine refuses (in a container: it needs CAP_SYS_ADMIN): {error}"
        ) from error


def _pretended_cpus(folder: Path, count: int) -> dict[str, Path]:
    """Write what the kernel would tell about ``count`` CPUs; a kubelet counts there. Return where each tree is seen."""
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(count):
        topology = folder / f"cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{number}\n", encoding="ascii")
        (topology / "physical_package_id").write_text("0\n", encoding="ascii")
        (folder / f"cpu/cpu{number}/online").write_text("1\n", encoding="ascii")
    for name in ("online", "possible", "present"):
        (folder / "cpu" / name).write_text(f"0-{count - 1}\n", encoding="ascii")
    (folder / "node").mkdir()
    places = {"/sys/devices/system/cpu": folder / "cpu", "/sys/devices/system/node": folder / "node"}
    return {place: tree for place, tree in places.items() if Path(place).is_dir()}
