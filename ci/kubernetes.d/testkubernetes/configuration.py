"""What the daemons read, and their command lines. Everything listens on loopback, or on the bridge of the pods."""

from __future__ import annotations

import json
from pathlib import Path

from testkubernetes import images
from testkubernetes.settings import Settings, node_name, tag

#: How long pods stay bound to a lost node before they are evicted; Kubernetes' own is 300 s. In seconds.
_EVICT_AFTER_S = 10
#: Requests a second that the parts of the cluster may make; with their own limits of 5 to 50, 20 pods take 15 s.
_REQUESTS, _BURST = "100", "200"


def etcd(directory: Path, settings: Settings, program: Path) -> list[str]:
    """Return the command line of etcd."""
    client, peer = (f"http://127.0.0.1:{settings.port_of(name)}" for name in ("etcd", "etcd-peer"))
    return [
        str(program), "--name", "one", "--data-dir", str(directory / "etcd"), "--logger", "zap", "--log-level", "warn",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}",
    ]  # fmt: skip


def apiserver(directory: Path, settings: Settings, program: Path) -> list[str]:
    """Return the command line of kube-apiserver."""
    pki = directory / "pki"
    return [
        str(program), "--bind-address=127.0.0.1", f"--secure-port={settings.port}", "--insecure-port=0",
        f"--advertise-address={settings.pod_network()[1]}", "--endpoint-reconciler-type=none",
        f"--etcd-servers=http://127.0.0.1:{settings.port_of('etcd')}", "--service-cluster-ip-range=10.96.0.0/24",
        f"--client-ca-file={pki}/ca.crt", f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key", f"--cert-dir={directory}/run",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt", f"--kubelet-client-key={pki}/kubelet-client.key",
        f"--service-account-key-file={pki}/apiserver.crt", f"--service-account-signing-key-file={pki}/apiserver.key",
        "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={pki}/tokens.csv",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
        "--feature-gates=TTLAfterFinished=true", "--profiling=false",
        f"--default-not-ready-toleration-seconds={_EVICT_AFTER_S}",
        f"--default-unreachable-toleration-seconds={_EVICT_AFTER_S}",
        f"--audit-policy-file={directory}/etc/audit.json", f"--audit-log-path={audit_log(directory)}",
        "--audit-log-maxsize=1000",
    ]  # fmt: skip


def controller_manager(directory: Path, settings: Settings, program: Path) -> list[str]:
    """Return the command line of kube-controller-manager."""
    pki = directory / "pki"
    return [
        str(program), f"--kubeconfig={pki}/controller-manager.kubeconfig", f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/apiserver.key", "--leader-elect=false",
        "--bind-address=127.0.0.1", f"--secure-port={settings.port_of('kube-controller-manager')}", "--port=0",
        f"--cert-dir={directory}/run", "--feature-gates=TTLAfterFinished=true", "--profiling=false",
        f"--kube-api-qps={_REQUESTS}", f"--kube-api-burst={_BURST}",
        "--node-monitor-period=2s", f"--node-monitor-grace-period={settings.node_grace_s}s",
    ]  # fmt: skip


def scheduler(directory: Path, settings: Settings, program: Path) -> list[str]:
    """Return the command line of kube-scheduler."""
    return [
        str(program), f"--kubeconfig={directory}/pki/scheduler.kubeconfig", "--leader-elect=false",
        "--bind-address=127.0.0.1", f"--secure-port={settings.port_of('kube-scheduler')}", "--port=0",
        f"--cert-dir={directory}/run", "--profiling=false",
        f"--kube-api-qps={_REQUESTS}", f"--kube-api-burst={_BURST}",
    ]  # fmt: skip


def kubelet(directory: Path, number: int, program: Path) -> list[str]:
    """Return the command line of a node's kubelet."""
    node = node_folder(directory, number)
    return [
        str(program), f"--config={node}/kubelet.json", f"--kubeconfig={directory}/pki/node{number}.kubeconfig",
        f"--hostname-override={node_name(number)}", "--container-runtime=remote",
        f"--container-runtime-endpoint=unix://{containerd_socket(directory, number)}",
        f"--root-dir={node}/kubelet", f"--cert-dir={node}/kubelet/pki",
    ]  # fmt: skip


def kubelet_configuration(directory: Path, settings: Settings, number: int) -> str:
    """Return the configuration file of a node's kubelet; JSON is YAML."""
    return _json(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node_name(number),
            "port": settings.port_of("kubelet", number),
            "readOnlyPort": 0,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": settings.port_of("healthz", number),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{directory}/pki/ca.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroup(directory, number)}",
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "hairpinMode": "none",
            # Nobody listens there: names are refused at once, where another address would take seconds.
            "clusterDNS": [settings.pod_network()[1]],
            "clusterDomain": "cluster.local",
            "volumePluginDir": f"{node_folder(directory, number)}/kubelet/volumeplugins",
            # Images are loaded, none can be pulled again: they may never be cleaned away.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "evictionPressureTransitionPeriod": "10s",
            "containerLogMaxSize": settings.log_max_size,
            "containerLogMaxFiles": settings.log_files,
            "nodeStatusUpdateFrequency": "1s",  # looked at so often, told when it has changed
            "nodeStatusReportFrequency": "1m",
            "nodeLeaseDurationSeconds": 16,  # renewed every quarter of it
            "kubeAPIQPS": 50,
            "kubeAPIBurst": 100,
            "eventRecordQPS": 50,
            "eventBurst": 100,
        }
    )


def containerd(directory: Path, number: int, prefix: Path, *, snapshotter: str) -> str:
    """Return the configuration file of a node's containerd; ``snapshotter``: see :func:`machine.snapshotter`."""
    node = node_folder(directory, number)
    return f"""\
version = 2
root = "{node}/containerd"
state = "{node}/run"
# Nothing but this service; others would look for devices and file systems that tests have no use for.
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{containerd_socket(directory, number)}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{node}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE}"
  stream_server_address = "127.0.0.1"
  netns_mounts_under_state_dir = true
  # Without CAP_SYS_RESOURCE no process can lower its own score, and every sandbox asks for -998.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{prefix}/usr/lib/cni"
    conf_dir = "{directory}/etc/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{directory}/etc/registries"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{prefix}/usr/sbin/runc"
"""


def network(directory: Path, settings: Settings) -> str:
    """Return the pods' network: one bridge for all nodes, no masquerading, so that pods reach each other and us alone."""
    subnet, gateway = settings.pod_network()
    ranges = [[{"subnet": subnet, "gateway": gateway}]]
    addresses = {
        "type": "host-local",
        "dataDir": f"{directory}/addresses",
        "ranges": ranges,
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": bridge_of(directory),
        "isGateway": True,
        "ipMasq": False,
        "ipam": addresses,
    }
    return _json({"cniVersion": "0.4.0", "name": "mlhpc", "plugins": [bridge]})


def registry() -> str:
    """Return where images `mlhpc.test/...` that were not loaded are sought: where nobody answers, so that it fails at once."""
    return (
        'server = "http://127.0.0.1:9"\n[host."http://127.0.0.1:9"]\n  capabilities = ["pull", "resolve"]\n'
    )


def audit_policy() -> str:
    """Return what the API server logs: who asked what when, of all that is no part of the cluster."""
    return _json(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
                {
                    "level": "None",
                    "users": [
                        "system:apiserver", "system:kube-controller-manager", "system:kube-scheduler",
                        "system:mlhpc-probe",
                    ],
                },
                {"level": "Metadata"},
            ],
        }
    )  # fmt: skip


def audit_log(directory: Path) -> Path:
    """Return where the API server logs requests, one JSON object a line."""
    return directory / "log/audit.jsonl"


def node_folder(directory: Path, number: int) -> Path:
    """Return where a node keeps its own."""
    return directory / f"node{number}"


def containerd_socket(directory: Path, number: int) -> Path:
    """Return where a node's containerd answers."""
    return node_folder(directory, number) / "containerd.sock"


def bridge_of(directory: Path) -> str:
    """Return the network interface of a cluster's pods; at most 15 characters."""
    return f"mlk{tag(directory)}"


def cgroup(directory: Path, number: int) -> str:
    """Return the cgroup below which a node's pods run."""
    return f"mlhpc-kubernetes-{tag(directory)}-{number}"


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
