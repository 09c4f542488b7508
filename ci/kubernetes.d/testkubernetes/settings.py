"""How one cluster was started, and where its parts lie and listen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from testcluster.errors import ClusterError

#: Nodes of one machine: each is an address of its own on loopback, 127.0.0.1 and so on.
MOST_NODES = 3
#: Ports of one cluster: five of the control plane, three of each node.
PORTS = 5 + 3 * MOST_NODES
#: RFC 2544 keeps 198.18.0.0/15 for tests of networks, so that no site routes it. A cluster has 128 addresses of it.
_POD_NETWORKS = (198 << 24) | (18 << 16)
_ADDRESSES = 128
#: How long a part may take until it serves, in seconds: 10 on an idle machine, minutes where 40 processes share two cores.
START_LIMIT_S = 1200.0
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
#: ``node`` holds the namespace in which the other two run.
NODE_DAEMONS = ("node", "containerd", "kubelet")


@dataclass(frozen=True)
class Settings:
    """How a cluster was started; kept in ``state.json``."""

    port: int
    #: Which of the possible pod networks it has.
    network: int
    #: How many nodes have a kubelet; 0: the API alone, pods stay Pending.
    nodes: int = 1
    #: CPUs that each node says it has, whatever the machine has.
    cpus: int = 16
    #: GPUs that each node pretends to have.
    gpus: int = 0
    log_max_size: str = "10Mi"
    log_files: int = 5
    #: A node that is silent this long counts as lost, in seconds: far more than Kubernetes' own 40, as on a busy machine none is lost.
    node_grace_s: int = 600

    @classmethod
    def from_text(cls, text: str) -> Settings:
        """Read ``state.json``.

        Raises:
            ClusterError: It is from another version of this script.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ClusterError(f"state.json of the cluster is unreadable ({error}); remove it") from error

    def to_text(self) -> str:
        """Return what :meth:`from_text` reads."""
        return json.dumps(asdict(self))

    @property
    def server(self) -> str:
        """Return the address of the API."""
        return f"https://127.0.0.1:{self.port}"

    def port_of(self, name: str, number: int = 1) -> int:
        """Return where a daemon listens: of the control plane by name, of node ``number`` ``kubelet``, ``healthz``."""
        ports = ("kube-apiserver", "etcd", "etcd-peer", "kube-controller-manager", "kube-scheduler")
        if name in ports:
            return self.port + ports.index(name)
        return self.port + len(ports) + 3 * (number - 1) + ("kubelet", "healthz", "streaming").index(name)

    def pod_network(self) -> tuple[str, str]:
        """Return the network of all pods (CIDR) and the address of its bridge in it."""
        base = _POD_NETWORKS + self.network * _ADDRESSES
        return f"{_dotted(base)}/25", _dotted(base + 1)


def _dotted(address: int) -> str:
    return ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))


def network_of(port: int, first: int, stride: int) -> int:
    """Return the number of the pod network that goes with a range of ports: two clusters never share one."""
    return (port - first) // stride % 1024


def node_name(number: int) -> str:
    """Return the name of a node: its address, because nothing here resolves names."""
    return f"127.0.0.{number}"


def daemon_of(name: str, number: int) -> str:
    """Return what a node's daemon is called: ``kubelet`` of the first one, ``kubelet.2`` of the second."""
    return name if number == 1 else f"{name}.{number}"


def tag(directory: Path) -> str:
    """Return the short name of a cluster in what the whole machine shares: cgroups, network interfaces."""
    return hashlib.sha256(str(directory).encode()).hexdigest()[:8]
