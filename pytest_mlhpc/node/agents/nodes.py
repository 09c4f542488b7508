"""The nodes of this allocation, under which addresses they reach each other, and host lists as Slurm writes them."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import random
import re
import socket
import subprocess
from pathlib import Path
from typing import Iterable, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.processes import run_to_end

#: Most nodes of one list; Slurm's own limit for one range is 64 k (MAX_RANGE of its hostlist).
MAX_NODES = 65536

#: What Slurm prints where there is no list.
_NO_HOSTS = frozenset({"", "(null)", "None", "None assigned", "N/A", "n/a"})

_SEPARATORS = frozenset(", \t\n")
_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?")


class HostlistError(ValueError):
    """A text is no host list; the error names the fault."""


def expand_hostlist(hostlist: str) -> Tuple[str, ...]:
    """Return the nodes of *hostlist* in its order and Slurm's, duplicates included.

    Raises:
        HostlistError: unbalanced or empty brackets, a range that runs backwards, more than MAX_NODES names.
    """
    if hostlist.strip() in _NO_HOSTS:
        return ()
    names: List[str] = []
    for word in _split_hostlist(hostlist.strip()):
        names.extend(_expand_word(word, hostlist, MAX_NODES - len(names)))
    return tuple(names)


def number_list(text: str, most: int = MAX_NODES) -> List[int]:
    """Return the numbers of ``0-3,8``, at most *most*.

    Raises:
        HostlistError: it is no list of numbers, or a longer one.
    """
    try:
        return [int(number) for number in _expand_ranges(text, text, most)]
    except HostlistError as error:
        raise HostlistError(f"{text[:40]!r} is no list of processors") from error


def number_ranges(numbers: Iterable[int], width: int = 0) -> List[str]:
    """Return the parts of a list that Linux would write for *numbers*, ``0-3`` and ``8``, each at least *width* digits wide."""
    ranges = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [f"{number:0{width}d}" for _, number in run]
        ranges.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ranges


def _split_hostlist(hostlist: str) -> List[str]:
    """Split at separators outside brackets: comma, blank, tab, newline, as scontrol does."""
    names, depth, start = [], 0, 0
    for position, character in enumerate(hostlist):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character in _SEPARATORS and depth == 0:
            names.append(hostlist[start:position])
            start = position + 1
        if depth not in {0, 1}:
            raise HostlistError(f"host list {hostlist!r}: brackets do not match")
    if depth:
        raise HostlistError(f"host list {hostlist!r}: brackets do not match")
    names.append(hostlist[start:])
    return [word for word in names if word]


def _expand_word(word: str, hostlist: str, room: int) -> List[str]:
    """Return the names of one word, at most *room*."""
    pieces = re.split(r"\[([^\]]*)\]", word)  # text, inside, text, inside, ..., text
    texts, brackets, count = pieces[::2], [], 1
    for inside in pieces[1::2]:
        brackets.append(_expand_ranges(inside, hostlist, room // count))
        count *= len(brackets[-1])
    if count > room:
        raise HostlistError(f"host list {hostlist[:80]!r}: more than {MAX_NODES} nodes")
    if not brackets:
        return texts
    # Slurm's order, the same from 22.05 to 26.05: the last brackets vary fastest, then the first, the second ...
    slow_to_fast = [*reversed(range(len(brackets) - 1)), len(brackets) - 1]
    names = []
    for numbers in itertools.product(*(brackets[place] for place in slow_to_fast)):
        chosen = [number for _, number in sorted(zip(slow_to_fast, numbers))]
        names.append("".join(map("".join, zip(texts, [*chosen, ""]))))
    return names


def _expand_ranges(inside: str, hostlist: str, room: int) -> List[str]:
    """Return the numbers of ``1-4,07``, as wide as their range's first one, at most *room*."""
    numbers: List[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostlistError(f"host list {hostlist[:80]!r}: {part!r} is no range of numbers")
        first = match["first"]
        last = match["last"] or first
        size = int(last) - int(first) + 1
        if size < 1:
            raise HostlistError(f"host list {hostlist[:80]!r}: the range {part!r} runs backwards")
        if len(numbers) + size > room:
            raise HostlistError(f"host list {hostlist[:80]!r}: more than {MAX_NODES} nodes")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


#: Longest wait for one answer of scontrol, in seconds: a busy slurmctld answers after MessageTimeout (10 s by default),
#: and the command itself tries more than once.
SCONTROL_LIMIT_S = 60.0

#: Ports from which one is drawn: above the well-known ones, below any usual ephemeral range.
DRAWN_PORTS = range(20000, 32000)


class NodesUnknown(RuntimeError):  # noqa: N818 - named for what happened
    """The nodes, or the address of one, cannot be found out; the text says of which, and what was tried."""


def allocated(environ: Mapping[str, str]) -> Tuple[str, ...]:
    """Return the nodes of the Slurm job that *environ* tells of, in Slurm's order; without one this host alone.

    Raises:
        NodesUnknown: it is no host list.
    """
    compact = environ.get("SLURM_JOB_NODELIST", "")
    if not compact:
        return (os.uname().nodename,)
    try:
        return expand_hostlist(compact)
    except HostlistError as error:
        raise NodesUnknown(f"SLURM_JOB_NODELIST: {error}") from error


def own_node(environ: Mapping[str, str]) -> str:
    """Return the name by which Slurm knows this node; without Slurm this host's."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


def scontrol(*arguments: str) -> str:
    """Return what ``scontrol ARGUMENTS`` prints.

    Raises:
        NodesUnknown: there is no such command, it fails or does not answer; with its own message.
    """
    shown = " ".join(("scontrol", *arguments))
    try:
        done = run_to_end(["scontrol", *arguments], SCONTROL_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise NodesUnknown(f"{shown} did not answer within {SCONTROL_LIMIT_S:g} s") from error
    except OSError as error:
        raise NodesUnknown(f"cannot start {shown}: {error.strerror or error}") from error
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise NodesUnknown(f"{shown} ended with exit code {done.returncode}: {message}")
    return done.stdout.decode("utf-8", "replace")


def resolve(name: str) -> List[str]:
    """Return the addresses of *name* as this host sees them; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def slurm_address(node: str) -> str:
    """Return NodeAddr of ``scontrol show node``, or nothing where Slurm does not tell."""
    with contextlib.suppress(NodesUnknown):
        found = re.search(r"\bNodeAddr=(\S+)", scontrol("show", "node", "--oneliner", node))
        if found:
            return found.group(1)
    return ""


def reachable_as(node: str) -> Tuple[str, ...]:
    """Return under which names and addresses other nodes may reach *node*, the likeliest first; never none.

    A name that resolves to a loopback address here (Debian's 127.0.1.1) says nothing about what others see: then they
    resolve it themselves, and Slurm's own address for the node is tried as well.

    Raises:
        NodesUnknown: the name does not resolve, and Slurm has no address for it that does.
    """
    addresses = resolve(node)
    outer = [address for address in addresses if not is_loopback(address)][:3]
    if outer:
        return (*outer, node)
    other = slurm_address(node)
    found = [*([node] if addresses else []), *([other] if other and resolve(other) else []), *addresses[:1]]
    if not found:
        tried = f" and neither does its NodeAddr {other!r}" if other and other != node else ""
        raise NodesUnknown(f"the node name {node!r} does not resolve on {os.uname().nodename}{tried}")
    return tuple(dict.fromkeys(found))


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine: what is sent to it never leaves its host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def master_address(nodes: Sequence[str]) -> str:
    """Return the name by which all ranks find rank 0, on the first of *nodes*.

    A name that does not resolve would make ranks wait for ever, so it is tried here.

    Raises:
        NodesUnknown: neither the name resolves nor Slurm's own address of the node.
    """
    if len(nodes) == 1:
        return "127.0.0.1"
    first = nodes[0]
    if resolve(first):
        return first
    return reachable_as(first)[0]


def master_port(first: str, own: str) -> int:
    """Return a port for rank 0 on node *first*: a free one if that is this node, else one drawn at random.

    Another process may take it before rank 0 does: then the run is started once more with another.
    """
    return free_port() if first == own else _drawn_port()


def free_port() -> int:
    """Return a port that nothing listens at; 0 if none is found.

    The kernel gives it to no outgoing connection, unlike one that ``bind`` to port 0 finds: on a busy machine that one is
    often taken before its user comes to listen.
    """
    for _ in range(100):
        port = _drawn_port()
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    return 0


def _drawn_port() -> int:
    low, high = ephemeral_ports()
    return random.SystemRandom().choice([port for port in DRAWN_PORTS if not low <= port <= high] or [29500])


def ephemeral_ports() -> Tuple[int, int]:
    """Return the first and the last port that the kernel gives to connections by itself."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999  # Linux' default (ip(7))
