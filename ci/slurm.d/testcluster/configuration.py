"""What the cluster looks like: pure functions from settings to the text of Slurm's files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from testcluster.errors import ClusterError

CPU_NODES = ("node1", "node2", "node3", "node4")
GPU_NODES = ("gpu1", "gpu2")
NODES = CPU_NODES + GPU_NODES
GPUS_PER_NODE = 4
#: Ports in a row: controller, database daemon, six nodes.
PORTS = 2 + len(NODES)
#: Two accounts and, besides Slurm's own `normal`, a QoS with limits. Root may use all of them.
CLUSTER, ACCOUNTS, QOS = "mlhpc", ("bench", "other"), "short"

ACCOUNTING = ("dbd", "filetxt", "none")
_SCHEMA = 1


@dataclass(frozen=True)
class Settings:
    """How one cluster was started; kept in ``state.json`` while it lives and for a later ``up``."""

    port: int
    accounting: str
    cgroup: bool
    #: Whether every node has its own host name, process ids and mounts.
    namespaces: bool
    #: Another release of Debian, where its root lies, and which of this machine's folders are seen in there besides the usual.
    release: str = ""
    root: str = ""
    binds: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Return the content of ``state.json``."""
        return json.dumps({"schema": _SCHEMA, **asdict(self)}) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Settings:
        """Read what :meth:`to_text` wrote."""
        content = json.loads(text)
        if content.pop("schema", None) != _SCHEMA:
            raise ClusterError("state.json was written by another version of ci/slurm; remove the directory")
        return cls(**content | {"binds": tuple(content.get("binds", ()))})


def check_directory(directory: Path) -> None:
    """Refuse a directory that Slurm's files or the kernel cannot name.

    Raises:
        ClusterError: Says what is wrong with it.
    """
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(directory)):
        raise ClusterError(
            f"--directory {str(directory)!r}: slurm.conf cannot quote; use letters, digits and _./+-"
        )
    if len(str(directory)) > 80:  # unix(7): 107 bytes for a socket's whole path
        raise ClusterError(f"--directory {directory}: too long for the path of a socket (80 bytes at most)")


def slurm_conf(directory: Path, settings: Settings, *, host: str, first_job: int) -> str:
    """Return slurm.conf. ``host`` is the short name of this machine, ``first_job`` the first job id that is given."""
    return "\n".join(
        [
            *_daemons(directory, settings, host, first_job),
            *_behaviour(settings),
            *_accounting(directory, settings),
            *_nodes(settings, host),
            *_partitions(),
            "",
        ]
    )


def _daemons(directory: Path, settings: Settings, host: str, first_job: int) -> list[str]:
    return [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={settings.port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={directory}/run/munge.sock",
        f"StateSaveLocation={directory}/controller",
        f"SlurmctldPidFile={directory}/run/slurmctld.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdPidFile={directory}/run/slurmd.%n.pid",
        f"SlurmdSpoolDir={directory}/spool.%n",
        f"SlurmdLogFile={directory}/log/slurmd.%n.log",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        # Nothing listens on the network.
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        # sacct would mix jobs of two starts if ids came back.
        f"FirstJobId={first_job}",
    ]


def _behaviour(settings: Settings) -> list[str]:
    """Return what a test waits for: short, but with every state of a real site within reach."""
    confined = [
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup",
        "SelectTypeParameters=CR_CPU_Memory",
        "DefMemPerCPU=200",
    ]
    loose = ["ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectTypeParameters=CR_CPU"]
    return [
        *(confined if settings.cgroup else loose),
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=1",
        "SelectType=select/cons_tres",
        "GresTypes=gpu",
        "SlurmdParameters=config_overrides",  # nodes have what is written here, not what this machine has
        "ReturnToService=1",
        "SlurmdTimeout=10",
        "SlurmctldTimeout=10",
        "MessageTimeout=10",
        "KillWait=3",
        "MinJobAge=600",
        "InactiveLimit=0",
        "Waittime=0",
        "EnforcePartLimits=NO",
        "JobRequeue=0",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",  # jobs that were not submitted with --requeue are cancelled
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
        "PropagateResourceLimits=NONE",
    ]


def _accounting(directory: Path, settings: Settings) -> list[str]:
    if settings.accounting == "dbd":
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={settings.port + 1}",
            # Clients of the database ignore AuthInfo.
            f"AccountingStoragePass={directory}/run/munge.sock",
            "AccountingStorageTRES=gres/gpu",
            "AccountingStorageEnforce=associations,limits,qos",
            "AccountingStoreFlags=job_comment,job_env,job_script",
        ]
    if settings.accounting == "filetxt":
        return ["JobCompType=jobcomp/filetxt", f"JobCompLoc={directory}/log/jobcomp.txt"]
    return []


def _nodes(settings: Settings, host: str) -> list[str]:
    lines = []
    for offset, node in enumerate(NODES):
        port = settings.port + 2 + offset
        line = f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=16000"
        gpus = f" Gres=gpu:h100:{GPUS_PER_NODE} Feature=gpu,h100" if node in GPU_NODES else " Feature=cpu"
        lines.append(f"{line}{gpus} State=UNKNOWN")
    return lines


def _partitions() -> list[str]:
    high = "MaxTime=60 DefaultTime=10 PriorityTier=10 PreemptMode=OFF State=UP"
    return [
        f"PartitionName=cpu Nodes=node[1-4] Default=YES {high}",
        f"PartitionName=gpu Nodes=gpu[1-2] {high}",
        "PartitionName=small Nodes=node[1-2] MaxTime=1 MaxNodes=1 DefaultTime=1 PriorityTier=10 PreemptMode=OFF State=UP",
        "PartitionName=low Nodes=node[1-4] MaxTime=60 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE State=UP",
    ]


def slurmdbd_conf(directory: Path, settings: Settings, *, host: str) -> str:
    """Return slurmdbd.conf."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={directory}/run/munge.sock",
            f"DbdHost={host}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={settings.port + 1}",
            "SlurmUser=root",
            f"PidFile={directory}/run/slurmdbd.pid",
            f"LogFile={directory}/log/slurmdbd.log",
            "CommunicationParameters=NoInAddrAny",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm_acct",
            "",
        ]
    )


def gres_conf(directory: Path) -> str:
    """Return gres.conf. slurmd wants character devices; ours are twins of /dev/null."""
    devices = f"File={directory}/dev/nvidia[0-{GPUS_PER_NODE - 1}]"
    return f"AutoDetect=off\nNodeName=gpu[1-2] Name=gpu Type=h100 {devices}\n"


def cgroup_conf(settings: Settings, *, version: tuple[int, int]) -> str:
    """Return cgroup.conf for this version of Slurm; from 23.11 on it must be told that there are no cgroups."""
    if settings.cgroup:
        return "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n"
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else ""


def hosts(present: str, *, host: str) -> str:
    """Return /etc/hosts as the nodes see it, from this machine's: every node name resolves, to loopback."""
    others = [line for line in present.splitlines() if not line.startswith("127.0.0.1")]
    return "\n".join([f"127.0.0.1 localhost {host} {' '.join(NODES)}", *others, ""])
