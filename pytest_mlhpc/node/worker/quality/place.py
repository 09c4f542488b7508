"""PAYLOAD. Which node this rank is on, and the few words that ranks exchange between phases."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, List, Mapping

import torch.distributed as dist

from pytest_mlhpc.node.worker.distributed import Group


@dataclass(frozen=True)
class Node:
    """This rank's node: its number among all, and this rank's place among those on it."""

    number: int = 0
    count: int = 1
    place: int = 0
    ranks: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank does what is to be done once on each node."""
        return self.place == 0


def gathered(group: Group, value: Any) -> List[Any]:
    """Return what every rank says, in the order of ranks. All ranks must call it; it waits for all."""
    if group.world == 1:
        return [value]
    values: List[Any] = [None] * group.world
    dist.all_gather_object(values, value)
    return values


def find_node(group: Group, environ: Mapping[str, str]) -> Node:
    """Ask all ranks for their host (and torchrun's GROUP_RANK, by which several agents may share one) and count."""
    hosts = gathered(group, f"{socket.gethostname()} {environ.get('GROUP_RANK', '')}")
    names = list(dict.fromkeys(hosts))
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
    return Node(names.index(hosts[group.rank]), len(names), mine.index(group.rank), len(mine))
