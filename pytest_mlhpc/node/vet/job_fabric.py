"""PAYLOAD. Which fast fabric a node has, as /sys shows it: what a job should use, and what libraries could."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

from pytest_mlhpc.node.vet.machine import Absent, Machine

#: What a port says that may be used. Source: kernel, ABI/stable/sysfs-class-infiniband, state.
ACTIVE = "4:"

#: Where libraries lie that no variable names. Source: ld.so(8), and where distributions, CUDA and ROCm install.
FOLDERS = (
    "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib", "/usr/local/cuda/lib64", "/opt/rocm/lib",
)  # fmt: skip


@dataclass(frozen=True)
class Fabric:
    """Ports that are up: InfiniBand and its like, Slingshot, and Ethernet that could do RoCE; by device name."""

    verbs: Tuple[str, ...] = ()
    slingshot: Tuple[str, ...] = ()
    ethernet: Tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """Whether there is a fabric that is there for nothing else."""
        return bool(self.verbs or self.slingshot)

    @property
    def words(self) -> str:
        """What it is, for people."""
        kinds = (("InfiniBand", self.verbs), ("Slingshot", self.slingshot), ("RoCE", self.ethernet))
        return ", ".join(f"{kind} ({', '.join(names[:4])})" for kind, names in kinds if names)


def fabric_of(machine: Machine) -> Fabric:
    """Return the fabric.

    Raises:
        Unreadable: a port does not say whether it is up.
    """
    verbs: List[str] = []
    ethernet: List[str] = []
    for path in machine.names("/sys/class/infiniband/*/ports/*/state"):
        if not machine.text(path).startswith(ACTIVE):
            continue
        folder, device = path.rpartition("/")[0], path.split("/")[4]
        try:
            layer = machine.text(f"{folder}/link_layer")
        except Absent:
            layer = ""
        (ethernet if layer == "Ethernet" else verbs).append(device)
    slingshot = [path.rpartition("/")[2] for path in machine.names("/sys/class/cxi/cxi*")]
    return Fabric(tuple(verbs), tuple(slingshot), tuple(ethernet))


def library_folders(machine: Machine) -> Tuple[str, ...]:
    """Return where the loader looks, in its order."""
    told = machine.environ.get("LD_LIBRARY_PATH", "").split(":")
    return tuple(dict.fromkeys([*(folder for folder in told if folder.startswith("/")), *FOLDERS]))
