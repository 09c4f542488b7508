"""PAYLOAD, no torch. What NCCL and RCCL say of the transport that they chose; both read these settings once, when first used.

The log goes to memory (memfd_create(2)), which no death of this process leaves behind, and no other user can read.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field
from typing import MutableMapping, Tuple

from pytest_mlhpc.node.vet import job_transport
from pytest_mlhpc.node.vet.job_transport import Transport

#: The process's one log; set by :func:`prepare` in the environment, where NCCL itself looks for it.
FILE, LEVEL, SUBSYSTEMS = "NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"

#: Most bytes of the log that are read.
MOST = 4 << 20

#: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read" (transport/p2p.cc, shm.cc, net.cc).
_VIA = re.compile(r"Channel \d+[^\r\n]*? via ([A-Z][\w]*(?:/[\w:.-]+)*)")

#: "NVLS multicast support is available on dev 0" (nvls.cc).
_NVLS = re.compile(r"NVLS multicast support is available")
_VERSION = re.compile(r"(?:NCCL|RCCL) version ([\w.+-]+)")


@dataclass(frozen=True)
class Chosen:
    """What a communication library chose.

    ``library`` is nccl, rccl or gloo; ``network`` its own word for what joins nodes (``IB``, ``Socket``, ``AWS Libfabric``), empty
    where it did not say; ``interfaces`` the ports or interfaces; ``inside`` what joins devices of a node (``P2P/CUMEM``);
    ``seen`` all that the log says of the network.
    """

    library: str
    network: str = ""
    interfaces: Tuple[str, ...] = ()
    inside: Tuple[str, ...] = ()
    provider: str = ""
    version: str = ""
    nvls: bool = False
    seen: Transport = field(default_factory=Transport)

    @property
    def sockets(self) -> bool:
        """Return whether nodes would be joined by TCP sockets."""
        return self.network == "TCP" or self.seen.kind == "sockets"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Have NCCL write its log where :func:`text` reads it, in place of what the user set for it."""
    environ[LEVEL], environ[SUBSYSTEMS] = "INFO", "INIT,NET,ENV,GRAPH,P2P,SHM,NVLS"
    environ[FILE] = _new_file()


def _new_file() -> str:
    """Return a path that leads to memory; where the kernel has none, to a file without a name."""
    create = getattr(os, "memfd_create", None)
    if create is not None:
        return f"/proc/self/fd/{create('nccl-log')}"
    descriptor, path = tempfile.mkstemp(prefix="mlhpc-nccl-")
    os.unlink(path)  # noqa: PTH108 - the descriptor is what counts
    return f"/proc/self/fd/{descriptor}"


def text(environ: MutableMapping[str, str]) -> str:
    """Return what was logged so far."""
    try:
        with open(environ.get(FILE, ""), "rb") as file:  # noqa: PTH123 - a path of /proc, which Path adds nothing to
            return file.read(MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def parse(log: str, library: str) -> Chosen:
    """Return what a log says."""
    seen, version = job_transport.parse(log), _VERSION.search(log)
    return Chosen(
        library,
        seen.network,
        seen.devices,
        tuple(sorted(set(_VIA.findall(log)))),
        seen.provider,
        version.group(1) if version else "",
        bool(_NVLS.search(log)),
        seen,
    )
