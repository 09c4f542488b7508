"""Which node of how many this process is, how nodes find the first one, and how they prove that they belong together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.agents.hub import FirstNodeNotReached, FirstNodeRefuses, find_hub, greeting
from pytest_mlhpc.node.agents.nodes import HostlistError, expand_hostlist, is_loopback, resolve, slurm_address
from pytest_mlhpc.node.agents.wire import Wire, address_of
from pytest_mlhpc.node.files import MOUNTS, NETWORK, PRIVATE_FILE, file_system, read_json, refuse_others
from pytest_mlhpc.node.vet.checks.network import ipv4_addresses

#: Most nodes of one vetting; Slurm's own limit for one range of names (MAX_RANGE of its hostlist).
MOST_NODES = 65536

#: Launchers that tell each process its place: its number, how many there are, its number on its own node, how many there.
#: Open MPI's come first, as its daemons are themselves tasks of Slurm; PMI-1 and 2 are those of MPICH,
#: Intel and Cray; the last are torchrun's and our own ``podrun``'s.
LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID", ""),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


class PlaceError(ValueError):
    """The environment does not tell what it should, or contradicts itself: a usage error, in a sentence."""


@dataclass(frozen=True)
class VetPlace:
    """One process of those that vet together.

    ``rank`` of ``nodes``, ``host`` as the scheduler calls this node, ``hosts`` all of them in order (empty where nothing tells,
    else ``nodes`` many), ``leaders`` where the first may be found (``host`` or ``host:port``; the likeliest first).
    ``extra`` is true for the second and later processes on one node: they have nothing to do. ``hint`` is for the user.
    """

    rank: int = 0
    nodes: int = 1
    host: str = ""
    hosts: Tuple[str, ...] = ()
    leaders: Tuple[str, ...] = ()
    extra: bool = False
    hint: str = ""

    def name_of(self, rank: int) -> str:
        """Return how node *rank* is called, by its number where nothing tells."""
        if rank < len(self.hosts):
            return self.hosts[rank]
        return self.host if rank == self.rank else f"node {rank}"


def place_of(environ: Mapping[str, str], *, hosts: Sequence[str] = (), single: bool = False) -> VetPlace:
    """Return where this process stands; *single*: alone, whatever the variables say.

    ``MLHPC_VET_RANK``, ``MLHPC_VET_NODES``, ``MLHPC_VET_HOST``, ``MLHPC_VET_NODELIST`` (with commas) and ``MLHPC_VET_LEADER`` go
    before what a launcher has set. *hosts* are how all nodes are called, in order, where the caller knows better. Without any
    of these it is alone.

    Raises:
        PlaceError: numbers contradict each other, or names are unknown.
    """
    host = environ.get("MLHPC_VET_HOST") or environ.get("SLURMD_NODENAME") or os.uname().nodename
    alone = VetPlace(host=host, hosts=(host,))
    if single:
        return alone
    leaders = _listed(environ.get("MLHPC_VET_LEADER", ""))
    if environ.get("MLHPC_VET_NODES"):
        rank, nodes = _number(environ, "MLHPC_VET_RANK"), _number(environ, "MLHPC_VET_NODES")
        listed = tuple(hosts) or _listed(environ.get("MLHPC_VET_NODELIST", ""))
        return _checked(VetPlace(rank, nodes, host, listed, leaders))
    for rank_name, size_name, local_name, local_size in LAUNCHERS:
        if environ.get(rank_name) and environ.get(size_name):
            needed = {"SLURM_NODEID": "SLURM_STEP_ID", "RANK": "MASTER_ADDR"}.get(rank_name, rank_name)
            if not environ.get(needed):
                continue
            if local_size and environ.get(local_size, "1") != "1":
                raise PlaceError(
                    f"{environ[local_size]} processes run on this node ({local_size}): start one on each node "
                    f"(mpirun --map-by ppr:1:node, mpiexec -ppn 1)"
                )
            rank, nodes = _number(environ, rank_name), _number(environ, size_name)
            extra = environ.get(local_name, "0") != "0"
            found = _hosts(environ, nodes)
            if not leaders and rank_name == "RANK":
                leaders = (environ["MASTER_ADDR"],)
            leaders = leaders or found[:1]
            return _checked(VetPlace(rank, nodes, host, tuple(hosts) or found, leaders, extra))
    if len(hosts) == 1:
        host = hosts[0]
    return VetPlace(host=host, hosts=(host,), hint=_only_this_node(environ))


def _only_this_node(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if nodes == "1":
        return ""
    return (
        f"this job has {nodes} nodes, but only this one is vetted: start it by "
        f"srun -N{nodes} --ntasks-per-node=1 mlhpc vet ..."
    )


def _checked(place: VetPlace) -> VetPlace:
    if not 0 < place.nodes <= MOST_NODES or not 0 <= place.rank < place.nodes:
        raise PlaceError(f"this is said to be node {place.rank} of {place.nodes}: that cannot be")
    hosts = place.hosts if len(place.hosts) == place.nodes else ()
    if hosts and len(set(hosts)) < len(hosts):
        raise PlaceError(f"a node is named twice in {','.join(hosts)[:200]}")
    leaders = place.leaders or hosts[:1]
    try:
        for leader in leaders:
            address_of(leader)
    except ValueError as error:
        raise PlaceError(f"where the first node is cannot be told: {error}") from error
    return VetPlace(
        place.rank, place.nodes, hosts[place.rank] if hosts else place.host, hosts, leaders, place.extra
    )


def _hosts(environ: Mapping[str, str], nodes: int) -> Tuple[str, ...]:
    """Return all nodes' names in the order of their numbers, nothing where that is not sure."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            found = _expanded(environ[name])
            if len(found) == nodes:
                return found
    return ()


def _expanded(hostlist: str) -> Tuple[str, ...]:
    try:
        return expand_hostlist(hostlist)
    except HostlistError as error:
        raise PlaceError(f"the nodes of this step are not known: {error}") from error


def _listed(text: str) -> Tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise PlaceError(f"{name}={text!r:.80} in the environment is no number")
    return int(text)


#: Variables that are the same for all processes of one step, and for no other one.
COMMON = (
    "MLHPC_VET_KEY", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_LAUNCHER_PORT",
    "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PBS_JOBID", "LSB_JOBID", "MLHPC_RUN",
)  # fmt: skip

#: Ports that may be tried, and how many are: above the well-known ones, below Linux' own range for connections (32768).
PORTS, TRIES = range(20000, 32000), 4

#: Longest wait for one connection, and time between two rounds of attempts, in seconds.
CONNECT_S, AGAIN_S = 3.0, 0.25

#: Where the first node's addresses lie in the verdict's folder while it listens.
MEETING = ".leader.json"


def key_of(environ: Mapping[str, str]) -> bytes:
    """Return what all processes of this step have in common."""
    assignments = [f"{name}={environ[name]}" for name in COMMON if environ.get(name)]
    return hashlib.sha256(
        "\n".join([str(os.geteuid()), *assignments]).encode("utf-8", "surrogatepass")
    ).digest()


def ports_of(key: bytes) -> Tuple[int, ...]:
    """Return the ports at which the first node may listen, in order."""
    drawn = int.from_bytes(hashlib.sha256(b"port" + key).digest()[:8], "big")
    return tuple(PORTS[(drawn + 1009 * number) % len(PORTS)] for number in range(TRIES))


def announced_ports(place: VetPlace, key: bytes) -> Tuple[int, ...]:
    """Return the ports at which the first node may listen: those that came with its address, else drawn ones."""
    ports = (address_of(leader)[1] for leader in place.leaders)
    return tuple(dict.fromkeys(port for port in ports if port)) or ports_of(key)


def own_addresses(host: str) -> Tuple[str, ...]:
    """Return under which addresses others may reach this node: those of its name, and of each interface (IPv4)."""
    found = [*resolve(host), *resolve(socket.gethostname()), *ipv4_addresses().values()]
    return tuple(dict.fromkeys(one for one in found if not is_loopback(one)))


def write_leader_file(folder: str, key: bytes, addresses: Sequence[str], port: int) -> str:
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


def read_leader_file(folder: str, key: bytes) -> List[Tuple[str, int]]:
    """Return what the first node of this vetting has left in *folder*."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        data = read_json((Path(folder) / MEETING).read_text(encoding="ascii")[: 1 << 16])
        if data["of"] == _mark(key):
            return [(str(one), int(data["port"])) for one in data["addresses"]]
    return []


def _mark(key: bytes) -> str:
    return hashlib.sha256(b"mark" + key).hexdigest()


class Search:
    """Searches the first node.

    ``lost_names`` are those that do not resolve here, which is this node's problem even where an address does.
    """

    def __init__(
        self, place: VetPlace, key: bytes, folder: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._place, self._key, self._folder, self._clock = place, key, folder, clock
        self._slurm: Dict[str, str] = {}
        self.lost_names: Tuple[str, ...] = ()

    def meet(self, limit_s: float, stop: Callable[[], bool]) -> Wire:
        """Return the proved connection to the leader.

        Raises:
            FirstNodeNotReached: it was not reached within *limit_s* seconds, *stop* said so, or it refuses us.
        """

        def pause() -> bool:
            time.sleep(
                AGAIN_S
            )  # no synchronisation: no process can tell us when the other side begins to listen
            return not stop()

        place = self._place

        def hello() -> str:
            return greeting(place.rank, place.host, time=self._clock())

        try:
            return find_hub(
                self._places, self._key, hello, limit_s=limit_s, each_s=min(CONNECT_S, limit_s), pause=pause
            )
        except FirstNodeRefuses as error:
            raise FirstNodeRefuses(f"{place.name_of(0)} refuses this node: {error}") from error
        except FirstNodeNotReached as error:
            raise FirstNodeNotReached(f"{place.name_of(0)} was not reached {error}") from error

    def _places(self) -> List[Tuple[str, int]]:
        """Return where the first node may listen.

        Raises:
            ValueError: nothing tells.
        """
        found, lost = [], []
        for leader in self._place.leaders:
            host, port = address_of(leader)
            addresses = resolve(host)
            if not addresses:
                lost.append(host)
                addresses = resolve(self._slurm_address(host))
            ports = (port,) if port else ports_of(self._key)
            found += [(address, one) for one in ports for address in addresses]
        self.lost_names = tuple(lost)
        found += read_leader_file(self._folder, self._key) if self._folder else []
        if not found and lost:
            raise ValueError(f"the name {lost[-1]} does not resolve on {self._place.host}")
        if not found:
            raise ValueError(
                "its address is not known: set MLHPC_VET_LEADER, or --output to a folder that all nodes share"
            )
        return found

    def _slurm_address(self, host: str) -> str:
        if host not in self._slurm:
            self._slurm[host] = slurm_address(host)
        return self._slurm[host]


KEY = "MLHPC_VET_KEY"

#: What is the same on all nodes; the others may be the root of one container or virtual machine.
SHARED = NETWORK - {"fuse", "9p", "virtiofs"}

#: Bytes of a secret, and how long whoever makes the file may take to write them, in seconds.
SECRET_BYTES, WRITE_S = 32, 10.0

#: All processes of a job have read the file within minutes of its start: so old a one is a killed vetting's, in seconds.
STALE_S = 86400.0


def shared_key(
    environ: Mapping[str, str], out: str, kind: Callable[[Path, Path], str] = file_system
) -> Tuple[str, Dict[str, str]]:
    """Return the path of the file and the variable that holds its secret. Raises as :func:`job_key`."""
    path = key_file(environ, out, kind)
    if path:
        _remove_stale(Path(path).parent)
    return path, job_key(path) if path else {}


def key_file(environ: Mapping[str, str], out: str, kind: Callable[[Path, Path], str] = file_system) -> str:
    """Return the path of the file; empty where a key is set, nothing tells one job from another, or no folder is shared."""
    numbers = [f"{name}={environ[name]}" for name in COMMON if environ.get(name)]
    folder = Path(out).absolute()
    if environ.get(KEY) or not numbers or kind(folder, MOUNTS) not in SHARED:
        return ""
    return str(folder / f".mlhpc-vet-{hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]}.key")


def _remove_stale(folder: Path) -> None:
    """Remove this user's files of killed vettings; what cannot be looked at or removed stays."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".mlhpc-vet-*.key"):
            with contextlib.suppress(OSError):  # another process was faster
                found = path.lstat()
                if found.st_uid == os.getuid() and found.st_mtime < time.time() - STALE_S:
                    path.unlink()


def job_key(path: str) -> Dict[str, str]:
    """Return the variable that holds the secret of *path*, which is made if it is not there.

    Empty where no file can be made, which all processes of the job find alike.

    Raises:
        UnsafeDirectoryError: another user has put a file there.
        OSError: the file cannot be read, or holds no secret.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):  # it is there, or cannot be made
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, PRIVATE_FILE)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
    until = time.monotonic() + WRITE_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        with os.fdopen(descriptor, "rb") as file:
            refuse_others(Path(path), os.fstat(file.fileno()))
            found = file.read(2 * SECRET_BYTES + 1)
        if len(found) == 2 * SECRET_BYTES:
            return {KEY: found.decode("ascii", "replace")}
        if time.monotonic() > until:
            raise OSError(0, f"it holds no key; remove it, or set {KEY}", path)
        time.sleep(0.05)  # no synchronisation: on a network disk nobody tells that a file was written
