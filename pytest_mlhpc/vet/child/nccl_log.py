"""PAYLOAD, no torch. What NCCL and RCCL say of the transport that they chose; both read these settings once, when first used.

The log goes to memory (memfd_create(2)), which no death of this process leaves behind, and no other user can read.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from typing import MutableMapping, Tuple

#: The process's one log; set by :func:`prepare` in the environment, where NCCL itself looks for it.
FILE, LEVEL, SUBSYSTEMS = "NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"

#: Most bytes of the log that are read.
MOST = 4 << 20

#: "NCCL INFO Using network IB" (init.cc) for NCCL 2.4 and newer, and RCCL, which has the same source.
_NETWORK = re.compile(r"Using network ([^\r\n]+)")

#: "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB hsn0:10.0.0.1<0>" (net_ib.cc); "NET/Socket : Using [0]eth0:10.0.0.1<0>"
#: (net_socket.cc); "NET/OFI Selected Provider is cxi" (aws-ofi-nccl, in several spellings).
_USING = re.compile(r"NET/(\w+)[^\r\n]*?: Using ([^\r\n]+)")
_PROVIDER = re.compile(r"NET/OFI [^\r\n]*?[Pp]rovider (?:is|:)?\s*([\w;]+)")

#: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read" (transport/p2p.cc, shm.cc, net.cc).
_VIA = re.compile(r"Channel \d+[^\r\n]*? via ([A-Z][\w]*(?:/[\w:.-]+)*)")

#: "NVLS multicast support is available on dev 0" (nvls.cc).
_NVLS = re.compile(r"NVLS multicast support is available")
_VERSION = re.compile(r"(?:NCCL|RCCL) version ([\w.+-]+)")


@dataclass(frozen=True)
class Chosen:
    """What a communication library chose.

    ``library`` is nccl, rccl or gloo; ``network`` its own word for what joins nodes (``IB``, ``Socket``, ``AWS Libfabric``), empty
    where it did not say; ``interfaces`` the ports or interfaces; ``inside`` what joins devices of a node (``P2P/CUMEM``).
    """

    library: str
    network: str = ""
    interfaces: Tuple[str, ...] = ()
    inside: Tuple[str, ...] = ()
    provider: str = ""
    version: str = ""
    nvls: bool = False

    @property
    def sockets(self) -> bool:
        """Return whether nodes would be joined by TCP sockets."""
        return self.network.lower() in ("socket", "tcp") or (self.provider.lower().startswith("tcp"))


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
    networks = _NETWORK.findall(log)
    using = _USING.findall(log)
    network = networks[-1].strip() if networks else using[-1][0] if using else ""
    names = [
        name
        for kind, names in using
        if kind.lower() in (network.lower(), "ib", "socket")
        for name in _names(names)
    ]
    provider, version = _PROVIDER.search(log), _VERSION.search(log)
    return Chosen(
        library,
        network,
        tuple(dict.fromkeys(names)),
        tuple(sorted(set(_VIA.findall(log)))),
        provider.group(1) if provider else "",
        version.group(1) if version else "",
        bool(_NVLS.search(log)),
    )


def _names(using: str) -> Tuple[str, ...]:
    """Return ``mlx5_0:1`` and ``eth0`` of ``[0]mlx5_0:1/IB [1]eth0:10.0.0.1<0> ; OOB ib0:10.0.0.1<0>``."""
    found = re.findall(r"\[\d+\](\S+)", using.partition(";")[0])
    return tuple(name.partition("/")[0] if "<" not in name else name.partition(":")[0] for name in found)
