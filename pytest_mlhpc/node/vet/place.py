"""PAYLOAD. Where this process stands among those that vet together: which node of how many, and how the first is called."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.agents.nodes import NodesUnknown, scontrol

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
class Place:
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


def place_of(environ: Mapping[str, str], *, hosts: Sequence[str] = (), single: bool = False) -> Place:
    """Return where this process stands; *single*: alone, whatever the variables say.

    ``MLHPC_VET_RANK``, ``MLHPC_VET_NODES``, ``MLHPC_VET_HOST``, ``MLHPC_VET_NODELIST`` (with commas) and ``MLHPC_VET_LEADER`` go
    before what a launcher has set. *hosts* are how all nodes are called, in order, where the caller knows better. Without any
    of these it is alone.

    Raises:
        PlaceError: numbers contradict each other, or names cannot be told.
    """
    host = environ.get("MLHPC_VET_HOST") or environ.get("SLURMD_NODENAME") or os.uname().nodename
    alone = Place(host=host, hosts=(host,))
    if single:
        return alone
    leaders = _words(environ.get("MLHPC_VET_LEADER", ""))
    if environ.get("MLHPC_VET_NODES"):
        rank, nodes = _number(environ, "MLHPC_VET_RANK"), _number(environ, "MLHPC_VET_NODES")
        listed = tuple(hosts) or _words(environ.get("MLHPC_VET_NODELIST", ""))
        return _checked(Place(rank, nodes, host, listed, leaders))
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
            return _checked(Place(rank, nodes, host, tuple(hosts) or found, leaders, extra))
    if len(hosts) == 1:
        host = hosts[0]
    return Place(host=host, hosts=(host,), hint=_only_this_node(environ))


def _only_this_node(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if nodes == "1":
        return ""
    return (
        f"this job has {nodes} nodes, but only this one is vetted: start it by "
        f"srun -N{nodes} --ntasks-per-node=1 mlhpc vet ..."
    )


def _checked(place: Place) -> Place:
    if not 0 < place.nodes <= MOST_NODES or not 0 <= place.rank < place.nodes:
        raise PlaceError(f"this is said to be node {place.rank} of {place.nodes}: that cannot be")
    hosts = place.hosts if len(place.hosts) == place.nodes else ()
    if hosts and len(set(hosts)) < len(hosts):
        raise PlaceError(f"a node is named twice in {','.join(hosts)[:200]}")
    leaders = place.leaders or hosts[:1]
    return Place(
        place.rank, place.nodes, hosts[place.rank] if hosts else place.host, hosts, leaders, place.extra
    )


def _hosts(environ: Mapping[str, str], nodes: int) -> Tuple[str, ...]:
    """Return all nodes' names in the order of their numbers, nothing where that is not sure."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            found = expand(environ[name])
            if len(found) == nodes:
                return found
    return ()


def expand(hostlist: str) -> Tuple[str, ...]:
    """Return the nodes of Slurm's ``rack[1-2,07]x,login`` in its order; scontrol is asked where brackets follow brackets.

    Raises:
        PlaceError: it is no such list, and scontrol does not help.
    """
    names: List[str] = []
    words = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", hostlist)
    if ",".join(words) != hostlist:
        return _asked(hostlist)
    for word in words:
        found = re.fullmatch(r"([^\[]*)(?:\[([0-9,-]+)\]([^\[]*))?", word)
        numbers = _numbers(found.group(2), MOST_NODES - len(names)) if found and found.group(2) else None
        if found and not found.group(2) and "[" not in word:
            names.append(word)
        elif found and numbers:
            names.extend(f"{found.group(1)}{number}{found.group(3)}" for number in numbers)
        else:
            return _asked(hostlist)
    return tuple(names)


def _asked(hostlist: str) -> Tuple[str, ...]:
    try:
        return tuple(scontrol("show", "hostnames", hostlist).split())
    except NodesUnknown as error:
        raise PlaceError(f"the nodes {hostlist[:200]!r} cannot be told apart: {error}") from error


def _numbers(inside: str, room: int) -> Optional[List[str]]:
    """Return the numbers of ``1-4,07``, each range as wide as its first; None if it is no such list."""
    found: List[str] = []
    for part in inside.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if match is None:
            return None
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if not 0 <= last - first < room - len(found):
            return None
        found.extend(str(number).zfill(len(match.group(1))) for number in range(first, last + 1))
    return found


def _words(text: str) -> Tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise PlaceError(f"{name}={text!r:.80} in the environment is no number")
    return int(text)
