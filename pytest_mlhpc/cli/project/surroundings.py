"""What a machine has on which a project begins: torch, a Slurm that answers, a kubeconfig."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

#: Partition, nodes, CPUs and MiB of a node, generic resources, longest time (sinfo(1), --format).
_SINFO: Final = ("sinfo", "--noheader", "--format=%R|%D|%c|%m|%G|%l")
_LINE: Final = re.compile(r"([\w.-]+)\|(\d+)\|(\d+)\+?\|(\d+)\+?\|([^|]*)\|([^|]*)")
_LIMIT_S: Final = 30


@dataclass(frozen=True)
class SlurmPartition:
    """A partition as sinfo describes it, with the least that each of its nodes has."""

    name: str
    nodes: int
    cores: int
    memory_mib: int
    devices: int = 0
    device_model: str = ""
    max_time_s: int = 0  #: 0: no limit


@dataclass(frozen=True)
class Surroundings:
    """What the machine has."""

    torch: bool = False
    slurm: tuple[SlurmPartition, ...] = ()
    kubernetes: bool = False


def find_surroundings(environ: Mapping[str, str]) -> Surroundings:
    """Return what this machine has."""
    config = environ.get("KUBECONFIG") or str(Path(environ.get("HOME", "/"), ".kube/config"))
    try:
        done = subprocess.run(
            _SINFO, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
        answer = done.stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    return Surroundings(
        torch=importlib.util.find_spec("torch") is not None,
        slurm=partitions_of(answer),
        kubernetes=any(Path(part).is_file() for part in config.split(":") if part),
    )


def partitions_of(answer: str) -> tuple[SlurmPartition, ...]:
    """Return the partitions that sinfo listed. It has a line for each kind of node in a partition."""
    found: dict[str, SlurmPartition] = {}
    for match in map(_LINE.fullmatch, answer.split("\n")):
        if match is None:
            continue
        one = _partition(match)
        other = found.get(one.name)
        found[one.name] = one if other is None else _least(one, other)
    return tuple(found.values())


def _partition(line: re.Match[str]) -> SlurmPartition:
    name, nodes, cores, memory, resources, limit = line.groups()
    gpu = re.search(r"\bgpu:(?:([A-Za-z][\w.-]*):)?(\d+)", resources)
    devices, model = (int(gpu[2]), gpu[1] or "gpu") if gpu else (0, "")
    return SlurmPartition(name, int(nodes), int(cores), int(memory), devices, model, _seconds(limit))


def _least(one: SlurmPartition, other: SlurmPartition) -> SlurmPartition:
    """Return what all nodes have of a partition with two kinds of nodes."""
    return replace(
        min(one, other, key=lambda part: part.devices),
        nodes=one.nodes + other.nodes,
        cores=min(one.cores, other.cores),
        memory_mib=min(one.memory_mib, other.memory_mib),
    )


def _seconds(limit: str) -> int:
    """Return the seconds of days-hours:minutes:seconds, of which the first ones may be absent; 0 for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
