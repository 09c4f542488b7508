"""PAYLOAD. How the processes of one vetting find the first node's, and how both sides show that they belong together.

All know the first node by name, and derive the same few ports and the same key from what their launcher has told all of them.
The name is tried with every address that it has here and, under Slurm, that Slurm has for it; where the verdict's folder is
shared, the first node also leaves its addresses there. The key is a secret where ``MLHPC_VET_KEY`` is set on all nodes, or comes
from a file that they share (``node/vet/job_key.py``); else it keeps strays and other vettings away, and nobody who knows the job's numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.agents.nodes import is_loopback, resolve, slurm_address
from pytest_mlhpc.node.agents.wire import Wire, greet
from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.protocol.channel import keep_alive, running_payload
from pytest_mlhpc.node.vet.place import Place

#: Version of what agents and leader say to each other.
PROTOCOL = 2

#: Variables that are the same for all processes of one step, and for no other one.
COMMON = (
    "MLHPC_VET_KEY", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_LAUNCHER_PORT",
    "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PBS_JOBID", "LSB_JOBID", "MLHPC_RUN",
)  # fmt: skip

#: Ports that may be tried, and how many are: above the well-known ones, below Linux' own range for connections (32768).
PORTS, TRIES = range(20000, 32000), 4

#: Longest wait for one connection and for one proof, and time between two rounds of attempts, in seconds.
CONNECT_S, PROOF_S, AGAIN_S = 3.0, 10.0, 0.25

#: Where the first node's addresses lie in the verdict's folder while it listens.
MEETING = ".leader.json"


class NotMet(RuntimeError):  # noqa: N818 - what happened, in the words of the flow
    """The first node was not reached in time, or does not want us; the text says why."""


class Refused(NotMet):
    """It answered, and does not want us."""


def key_of(environ: Mapping[str, str]) -> bytes:
    """Return what all processes of this step have in common."""
    words = [f"{name}={environ[name]}" for name in COMMON if environ.get(name)]
    return hashlib.sha256("\n".join([str(os.geteuid()), *words]).encode("utf-8", "surrogatepass")).digest()


def ports_of(key: bytes) -> Tuple[int, ...]:
    """Return the ports at which the first node may listen, in order."""
    drawn = int.from_bytes(hashlib.sha256(b"port" + key).digest()[:8], "big")
    return tuple(PORTS[(drawn + 1009 * number) % len(PORTS)] for number in range(TRIES))


def told_ports(place: Place, key: bytes) -> Tuple[int, ...]:
    """Return the ports at which the first node may listen: those that came with its address, else drawn ones."""
    told = [port for leader in place.leaders for port in _split(leader, ())[1]]
    return tuple(dict.fromkeys(told)) or ports_of(key)


def listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens at the first free one of *ports* on all addresses.

    Raises:
        OSError: all are taken.
    """
    trouble = OSError("there are no ports")
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue
            dual = family == socket.AF_INET6
            try:
                made = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
            except OSError as error:  # taken, or a kernel whose IPv6 is switched off
                trouble = error
                continue
            made.setblocking(False)
            return made
    raise trouble


def own_addresses(host: str) -> Tuple[str, ...]:
    """Return under which addresses others may reach this node: those of its name, and of each interface (IPv4)."""
    import fcntl
    import struct

    found = [*resolve(host), *resolve(socket.gethostname())]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _number, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                packed = fcntl.ioctl(
                    asking.fileno(), 0x8915, struct.pack("256s", name.encode()[:15])
                )  # SIOCGIFADDR
                found.append(socket.inet_ntoa(packed[20:24]))
    return tuple(dict.fromkeys(one for one in found if not is_loopback(one)))


def leave_word(folder: str, key: bytes, addresses: Sequence[str], port: int) -> str:
    """Leave the first node's addresses in *folder*; return the file's path, or nothing if that does not go."""
    path = Path(folder) / MEETING
    content = {"of": _mark(key), "addresses": list(addresses), "port": port}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{MEETING}.{os.getpid()}")
        made.write_text(json.dumps(content), encoding="ascii")
        made.replace(path)
        return str(path)
    return ""


def found_word(folder: str, key: bytes) -> List[Tuple[str, int]]:
    """Return what the first node of this vetting has left in *folder*."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        data = read_json((Path(folder) / MEETING).read_text(encoding="ascii")[: 1 << 16])
        if data["of"] == _mark(key):
            return [(str(one), int(data["port"])) for one in data["addresses"]]
    return []


def _mark(key: bytes) -> str:
    return hashlib.sha256(b"mark" + key).hexdigest()


class Search:
    """Looks for the first node.

    ``trouble`` is the last reason why it was not reached; ``lost_names`` those that do not resolve here, which is this node's
    problem even where an address does.
    """

    def __init__(self, place: Place, key: bytes, folder: str, clock: Callable[[], float] = time.time) -> None:
        self._place, self._key, self._folder, self._clock = place, key, folder, clock
        self._slurm: Dict[str, str] = {}
        self.trouble = (
            "nothing tells where it is: set MLHPC_VET_LEADER, or --output to a folder that all nodes share"
        )
        self.lost_names: Tuple[str, ...] = ()

    def meet(self, limit_s: float, stop: Callable[[], bool]) -> Wire:
        """Return the proved connection to the leader.

        Raises:
            NotMet: it was not reached within *limit_s* seconds, *stop* said so, or it refuses us.
        """
        deadline = time.monotonic() + limit_s
        while not stop() and time.monotonic() < deadline:
            for host, port in self._candidates():
                try:
                    return self._prove(_connect(host, port, max(0.1, deadline - time.monotonic())))
                except OSError as error:
                    self.trouble = f"{host} port {port}: {error.strerror or error}"
                if stop() or time.monotonic() >= deadline:
                    break
            else:
                time.sleep(
                    AGAIN_S
                )  # no synchronisation: nobody can tell us when the other side begins to listen
        raise NotMet(f"{self._place.name_of(0)} was not reached within {limit_s:g} s: {self.trouble}")

    def _candidates(self) -> List[Tuple[str, int]]:
        found, lost = [], []
        for leader in self._place.leaders:
            host, ports = _split(leader, ports_of(self._key))
            addresses = resolve(host)
            if not addresses:
                lost.append(host)
                self.trouble = f"the name {host} does not resolve on {self._place.host}"
                addresses = resolve(self._slurm_address(host))
            found += [(address, port) for port in ports for address in addresses]
        self.lost_names = tuple(lost)
        return [*found, *(found_word(self._folder, self._key) if self._folder else [])]

    def _slurm_address(self, host: str) -> str:
        if host not in self._slurm:
            self._slurm[host] = slurm_address(host)
        return self._slurm[host]

    def _prove(self, connection: socket.socket) -> Wire:
        wire = Wire(connection)
        welcome = greet(wire, self._key, self._hello, PROOF_S)
        if welcome.get("refused"):
            wire.close()
            raise Refused(f"{self._place.name_of(0)} refuses this node: {welcome['refused']}")
        return wire

    def _hello(self) -> str:
        place = self._place
        return json.dumps({"rank": place.rank, "host": place.host, "of": version(), "time": self._clock()})


def version() -> str:
    """Return what both sides must have equal."""
    return f"{PROTOCOL} {running_payload()}"


def _split(leader: str, ports: Sequence[int]) -> Tuple[str, Sequence[int]]:
    """Return host and ports of ``host``, ``host:port``, ``address`` or ``[address]:port``."""
    host, port = leader, ""
    if leader.startswith("["):
        host, _, port = leader[1:].partition("]")
    elif leader.count(":") == 1:
        host, _, port = leader.partition(":")
    number = port.lstrip(":")
    return host, (int(number),) if number.isascii() and number.isdigit() and int(number) < 65536 else ports


def _connect(host: str, port: int, limit_s: float) -> socket.socket:
    connection = socket.create_connection((host, port), min(CONNECT_S, limit_s))
    keep_alive(connection)
    return connection
