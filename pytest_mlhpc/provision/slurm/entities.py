"""What ``scontrol -o show node | partition | reservation`` and sacctmgr print. Pure functions.

One record is one line of ``Key=value`` pairs whose values may hold spaces, quotes and equals signs
(``OS=Linux 6.1 #1 SMP``, ``Reason=says "a b=c" [root@1700000000]``): a pair ends where the next known form of a key begins.
"""

from __future__ import annotations

import re

from pytest_mlhpc.provision.slurm.client import Node, PartitionLimits, QosLimits, Reservation
from pytest_mlhpc.provision.slurm.hostlist import nodes
from pytest_mlhpc.provision.slurm.text import duration_s, integer, time_ns, word

MIB = 1 << 20

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")

#: A reason's own end: who set it and when.
_SIGNED = re.compile(r"(?P<text>.*) \[(?P<who>[^\[\]@]+)@(?P<when>[^\[\]@]*)\]")

#: Marks behind a node's state (sinfo(1), NODE STATE CODES) -> the flag that newer versions spell out.
_MARKS = {
    "*": "not_responding", "~": "powered_down", "#": "powering_up", "!": "power_down", "%": "powering_down",
    "$": "maintenance", "@": "reboot_requested", "^": "reboot_issued", "-": "planned",
}  # fmt: skip

#: Other spellings of flags -> ours.
_FLAGS = {
    "maint": "maintenance",
    "reboot": "reboot_requested",
    "power_down": "powering_down",
    "no_respond": "not_responding",
}

_BASES = {"alloc": "allocated", "mix": "mixed", "unk": "unknown"}


def pairs(record: str) -> dict[str, str]:
    """Return the pairs of one record; of a key that comes twice the first counts, free text reaches to its end."""
    found: dict[str, str] = {}
    matches = list(_KEY.finditer(record))
    for index, match in enumerate(matches):
        key = match[1]
        if key in found:
            continue
        end = matches[index + 1].start() if index + 1 < len(matches) else len(record)
        if key == "Reason":
            signed = _SIGNED.match(record, match.end())
            end = signed.end() if signed else len(record)
        found[key] = record[match.end() : end].strip()
        if key == "Reason":  # stands last of what we read; what looks like a key in it is none
            break
    return found


def _records(text: str, first: str) -> list[dict[str, str]]:
    """Return the records of *text*: each begins with the key *first* at the start of a line."""
    parts = re.split(rf"(?m)^(?={first}=)", text)
    return [pairs(" ".join(part.split("\n")).strip()) for part in parts if part.startswith(f"{first}=")]


def parse_nodes(text: str) -> list[Node]:
    """Return the nodes of ``scontrol -o show node``."""
    return [_node(record) for record in _records(text, "NodeName")]


def _node(record: dict[str, str]) -> Node:
    base, flags = node_state(record.get("State", ""))
    reason = record.get("Reason", "")
    signed = _SIGNED.fullmatch(reason)
    return Node(
        name=record["NodeName"],
        state=base,
        flags=flags,
        reason=signed["text"] if signed else reason,
        address=word(record.get("NodeAddr", "")),
        hostname=word(record.get("NodeHostName", "")),
        cpus=integer(record.get("CPUTot", "")),
        memory=integer(record.get("RealMemory", "")) * MIB,
        gres=word(record.get("Gres", "")),
        features=names(record.get("AvailableFeatures", "")),
        partitions=names(record.get("Partitions", "")),
    )


def node_state(text: str) -> tuple[str, frozenset[str]]:
    """Return base state and flags of ``IDLE+DRAIN``, ``DOWN*``, ``idle~`` ..., in lower case."""
    flags: set[str] = set()
    words: list[str] = []
    for part in text.strip().lower().split("+"):
        bare = part
        while bare and bare[-1] in _MARKS:
            flags.add(_MARKS[bare[-1]])
            bare = bare[:-1]
        if bare:
            words.append(bare)
    base = words[0] if words else "unknown"
    flags.update(_FLAGS.get(flag, flag) for flag in words[1:])
    return _BASES.get(base, base), frozenset(flags)


def parse_partition(text: str) -> PartitionLimits | None:
    """Return the partition of ``scontrol -o show partition NAME``, None if there is none."""
    for record in _records(text, "PartitionName"):
        return PartitionLimits(
            name=record["PartitionName"],
            up=record.get("State", "") == "UP",
            max_time_s=duration_s(record.get("MaxTime", "")),
            max_nodes=number(record.get("MaxNodes", "")),
            min_nodes=integer(record.get("MinNodes", "")),
            total_nodes=integer(record.get("TotalNodes", "")),
            nodes=nodes(record.get("Nodes", "")),
            allow_accounts=names(record.get("AllowAccounts", "")),
            allow_qos=names(record.get("AllowQos", "")),
            qos=word(record.get("QoS", "")),
        )
    return None


def parse_reservations(text: str) -> list[Reservation]:
    """Return the reservations of ``scontrol -o show reservation``."""
    return [
        Reservation(
            name=record["ReservationName"],
            start_ns=time_ns(record.get("StartTime", "")),
            end_ns=time_ns(record.get("EndTime", "")),
            nodes=nodes(record.get("Nodes", "")),
            partition=word(record.get("PartitionName", "")),
            users=names(record.get("Users", "")),
            accounts=names(record.get("Accounts", "")),
            flags=frozenset(flag.upper() for flag in names(record.get("Flags", ""))),
        )
        for record in _records(text, "ReservationName")
    ]


def parse_qos(text: str, name: str) -> QosLimits | None:
    """Return the QoS *name* of ``sacctmgr -nP show qos format=Name,MaxWall,MaxTRES,UsageFactor``, None if not there."""
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 4 and fields[0] == name:
            limits = dict(part.partition("=")[::2] for part in fields[2].split(","))
            return QosLimits(
                name=name,
                max_time_s=duration_s(fields[1]),
                max_nodes=number(limits.get("node", "")),
                usage_factor=_factor(fields[3]),
            )
    return None


def _factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0


def number(text: str) -> int | None:
    """Return a limit; None for UNLIMITED and nothing."""
    return int(text) if text.isascii() and text.isdecimal() else None


def names(text: str) -> frozenset[str]:
    """Return the words between commas; none for ALL and Slurm's ways to say none."""
    return frozenset() if text == "ALL" or not word(text) else frozenset(filter(None, text.split(",")))
