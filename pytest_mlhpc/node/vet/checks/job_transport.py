"""PAYLOAD. What would keep a job from the node's fabric, before anything is sent: variables, device files, plug-ins.

What libraries really choose is parsed by ``node/vet/job_transport.py`` when the killable child has let them talk.
"""

from __future__ import annotations

from typing import List, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Outcome
from pytest_mlhpc.node.vet.job_findings import judged, outcome
from pytest_mlhpc.node.vet.job_transport import CHECK, fits, forcing, weight
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.ports import Fabric, fabric_of, library_folders

#: Names of NCCL's and RCCL's plug-ins for libfabric. Source: NCCL user guide, NCCL_NET_PLUGIN; aws-ofi-nccl; aws-ofi-rccl.
PLUGINS = ("libnccl-net*.so*", "librccl-net*.so*")


class TransportAhead:
    """What would keep libraries from the fabric."""

    name = CHECK
    level = "quick"
    cost_s = 0.1
    reads = (
        "/sys/class/infiniband",
        "/sys/class/cxi",
        "/sys/class/net",
        "/dev/infiniband",
        "NCCL_*, FI_*, GLOO_*",
        "LD_LIBRARY_PATH",
    )
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look at variables first, then at what is missing."""
        if len(context.hosts) == 1:
            return outcome(self.name, (), "one node sends over no network")
        fabric = fabric_of(machine)
        said = (
            *_forced(machine, context, fabric),
            *_interfaces(machine, context),
            *_device_files(machine, context, fabric),
            *_plugin(machine, context, fabric),
        )
        return outcome(self.name, said, f"nothing keeps libraries from {fabric.words or 'sockets'}")


def _forced(machine: Machine, context: Context, fabric: Fabric) -> Tuple[Finding, ...]:
    names = [f"{name}={value}" for name, value in forcing(machine.environ, fabric)]
    text = f"{', '.join(names)} keeps NCCL from {fabric.words}: it would send by sockets; unset it"
    return judged(CHECK, context.policy, "job.transport", weight(fabric) if names else 0, text)


def _interfaces(machine: Machine, context: Context) -> Tuple[Finding, ...]:
    there = [path.rpartition("/")[2] for path in machine.names("/sys/class/net/*")]
    wrong: List[str] = []
    nccl = machine.environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and there and not any(fits(nccl, name) for name in there):
        wrong.append(f"NCCL_SOCKET_IFNAME={nccl}")
    gloo = machine.environ.get("GLOO_SOCKET_IFNAME", "")
    if gloo and there and not all(word.strip() in there for word in gloo.split(",")):
        wrong.append(f"GLOO_SOCKET_IFNAME={gloo}")
    text = f"{', '.join(wrong)}: this node has {', '.join(there[:12])}; name one of them"
    return judged(CHECK, context.policy, "job.interface_missing", len(wrong), text)


def _device_files(machine: Machine, context: Context, fabric: Fabric) -> Tuple[Finding, ...]:
    missing: List[str] = []
    if fabric.verbs and not machine.names("/dev/infiniband/uverbs*"):
        missing.append("/dev/infiniband/uverbs*")
    missing += [f"/dev/{name}" for name in fabric.slingshot if not machine.exists(f"/dev/{name}")]
    text = f"{', '.join(missing)} is missing, so that {fabric.words} cannot be used: give it to the container"
    return judged(CHECK, context.policy, "job.fabric_devices", len(missing), text)


def _plugin(machine: Machine, context: Context, fabric: Fabric) -> Tuple[Finding, ...]:
    wanted = bool(fabric.slingshot) and context.wanted.accelerator in {"cuda", "rocm", "auto"}
    there = wanted and any(
        machine.names(f"{folder}/{name}") for folder in library_folders(machine) for name in PLUGINS
    )
    text = (
        "NCCL's plug-in for Slingshot (aws-ofi-nccl) is neither on LD_LIBRARY_PATH nor where libraries lie: "
        "load its module; set NCCL_NET='AWS Libfabric' so that NCCL stops rather than sends by sockets"
    )
    return judged(CHECK, context.policy, "job.plugin_missing", int(wanted and not there), text)


CHECKS = (TransportAhead(),)
