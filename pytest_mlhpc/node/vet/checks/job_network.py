"""A job's network: names of the rendezvous and of this node, and which transport NCCL, RCCL or gloo takes."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.network import Fabric, fabric_of, library_folders
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, is_number, some

#: How long a resolver may take, in seconds: resolv.conf(5) waits 5 s for its first server, so that one is missing by then.
RESOLVE_S = 1.8

#: RFC 1123, 2.1, and underscores, which pods have.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?\Z")


def addresses(machine: Machine, name: str) -> Tuple[str, ...]:
    """Return the addresses that *name* has on this node; none if it is not known here.

    Raises:
        Unreadable: nobody can be asked.
    """
    if _is_address(name):
        return (name,)
    if not _NAME.match(name):
        return ()
    done = machine.command(("getent", "ahosts", name), RESOLVE_S)
    if done.code not in {0, 2}:  # getent(1): 2, the name is not known
        message = (done.errors or done.output).strip()[-200:]
        raise Unreadable(f"getent ahosts {name} failed: {message or done.code}")
    found = (line.split()[0] for line in done.output.splitlines() if line.strip())
    return tuple(dict.fromkeys(found))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(found: Tuple[str, ...]) -> bool:
    """Return whether all of these addresses mean the node itself."""
    return bool(found) and all(_loopback(address) for address in found)


def _loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified  # 0.0.0.0 as a destination is this node (Linux, ip(7))


#: Where ranks meet unless MASTER_PORT says otherwise. Source: torchrun, --master-port.
PORT = 29500

#: How long an address may take to answer, in seconds, and how many of a name's are tried.
ANSWER_S, MOST = 0.8, 2


def _judge_names(exam: Examination) -> str:
    """Resolve and reach the rendezvous (MASTER_ADDR, else the first node), and resolve this node."""
    machine, context = exam.machine, exam.context
    master = machine.environ.get("MASTER_ADDR") or (context.hosts[0] if context.hosts else "") or context.host
    several = len(context.hosts) > 1
    found = addresses(machine, master)
    text = (
        f"the rendezvous {master!r} is not known here: torch would wait until its time limit; use an address, "
        "or a name that every node knows"
    )
    exam.judge("job.name_unresolved", int(not found), text)
    text = f"the rendezvous {master!r} means each node itself ({', '.join(found[:2])}): MASTER_ADDR has to be the first node"
    alone = several and is_loopback(found) and master != context.host
    exam.judge("job.name_loopback", int(alone), text)
    _judge_rendezvous(exam, master, found)
    own = addresses(machine, context.host) if several and context.host else ()
    text = (
        f"{context.host} is {', '.join(own[:2])} to itself, so that gloo would listen where no other node comes: "
        "set GLOO_SOCKET_IFNAME"
    )
    unset = is_loopback(own) and not machine.environ.get("GLOO_SOCKET_IFNAME")
    exam.judge("job.own_name_loopback", int(unset), text)
    return f"{master} is {', '.join(found[:2])}"


def _judge_rendezvous(exam: Examination, master: str, found: Tuple[str, ...]) -> None:
    """Judge connections to the rendezvous: no address answers, or its port is taken already."""
    port = exam.machine.environ.get("MASTER_PORT", "")
    number = int(port) if is_number(port) and 0 < int(port) < 65536 else PORT
    answers = [_answer(exam.machine, address, number) for address in found[:MOST]]
    troubles = [why for _, why in answers if why]
    silent = bool(troubles) and len(troubles) == len(found[:MOST])
    text = (
        f"the rendezvous {master} port {number} cannot be reached from this node ({'; '.join(troubles)}): "
        "a firewall, or the address of another network"
    )
    exam.judge("job.rendezvous", int(silent), text)
    text = (
        f"another process listens on port {number} of the rendezvous {master} already, so that the job could not: "
        "choose another MASTER_PORT, or end what an earlier job left"
    )
    exam.judge("job.port_taken", int(any(there for there, _ in answers)), text)


def _answer(machine: Machine, address: str, port: int) -> Tuple[bool, str]:
    """Return whether somebody listens there, and why nobody answers."""
    try:
        return machine.connect(address, port, ANSWER_S), ""
    except Unreadable as error:
        return False, str(error)


#: Providers of libfabric that are sockets in the end. Source: fabric(7), fi_tcp(7), fi_sockets(7), fi_udp(7), fi_net(7).
SOCKET_PROVIDERS = ("tcp", "sockets", "udp", "net")

#: Most lines that are looked at, and of each so many characters: debugging output has no end.
MOST_LINES = 5000
MOST_CHARACTERS = 1000

#: What a line must hold to be looked at.
_TELLING = (
    "NET/",
    "network ",
    "NET plugin",
    "set by environment",
    "CCL version",
    "loopback address",
    "plugin",
    "Plugin",
)

# All repeats are bounded, so that no text makes them slow.
_NETWORK = re.compile(
    r"(?:Using network|Assigned NET plugin) (\S[^\n]{0,60}?)(?: to comm\b[^\n]{0,80})?[ \t\r]{0,8}$",
    re.MULTILINE,
)
_VERBS = re.compile(r"NET/IB : Using((?: {0,2}\[\d{1,4}\][^\s:]{1,60}:\d{1,4}/[^\s]{1,20}){1,64})")
_PORT = re.compile(r"\[\d{1,4}\]([^\s:]{1,60}:\d{1,4})/([A-Za-z]+)")
_SOCKET = re.compile(r"NET/Socket : Using((?: {0,2}\[\d{1,4}\][^\s:]{1,60}:\S{1,80}){1,64})")
_INTERFACE = re.compile(r"\[\d{1,4}\]([^\s:]{1,60}):")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,]{1,60})")
_VIA = re.compile(r"via NET/([A-Za-z][\w ]{0,40})/\d{1,4}((?:/[A-Za-z]{1,20}){0,4})")
_SET = re.compile(
    r"(NCCL_[A-Z0-9_]{1,60}) set by environment to (\S[^\n]{0,200}?)\.?[ \t\r]{0,8}$", re.MULTILINE
)
_VERSION = re.compile(r"([NR]CCL) version ?:? ?([^\s+]{1,40})")
_LOOPBACK = "Using the loopback address as fallback"
_NO_PLUGIN = re.compile(r"(?:No plugin found|[Cc]ould not find: \S{1,200})[^\n]{0,200}")


@dataclass(frozen=True)
class Transport:
    """What was chosen. ``kind`` is infiniband, roce, libfabric, sockets, other, or empty where no line says it.

    ``devices`` are ports or interfaces; ``provider`` is libfabric's; ``direct`` whether the network reads the device's memory
    (None: not said); ``forced`` are variables that the library says it was given; ``plugin`` why none was loaded.
    """

    kind: str = ""
    network: str = ""
    devices: Tuple[str, ...] = ()
    provider: str = ""
    direct: Optional[bool] = None
    forced: Tuple[Tuple[str, str], ...] = ()
    version: str = ""
    plugin: str = ""
    loopback: bool = False


def parse(text: str) -> Transport:
    """Return what the output of one or more ranks of one node says; where ranks differ, the slowest."""
    text = _telling(text)
    networks = [match[1].strip() for match in _NETWORK.finditer(text)]
    routes = [match[1].strip() for match in _VIA.finditer(text)]
    ports = [port for match in _VERBS.finditer(text) for port in _PORT.findall(match[1])]
    interfaces = [name for match in _SOCKET.finditer(text) for name in _INTERFACE.findall(match[1])]
    providers = [match[1].lower() for match in _PROVIDER.finditer(text)]
    kinds = [_kind(name, ports, providers) for name in (*networks, *routes)]
    kind = next((one for one in ("sockets", "other", "libfabric", "roce", "infiniband") if one in kinds), "")
    network = next((name for name in (*networks, *routes) if _kind(name, ports, providers) == kind), "")
    version = _VERSION.search(text)
    missing = _NO_PLUGIN.search(text)
    return Transport(
        kind=kind,
        network=network,
        devices=tuple(
            dict.fromkeys(interfaces if kind == "sockets" and interfaces else [port for port, _ in ports])
        ),
        provider=next((name for name in providers if _sockets(name)), providers[0] if providers else ""),
        direct=_direct(text) if routes else None,
        forced=tuple(dict.fromkeys(_SET.findall(text))),
        version=f"{version[1]} {version[2]}" if version else "",
        plugin=missing[0].strip() if missing else "",
        loopback=_LOOPBACK in text,
    )


def _telling(text: str) -> str:
    """Return the lines that may say something, each once, without who printed them."""
    found: Dict[str, None] = {}
    for line in text.splitlines():
        if any(word in line for word in _TELLING):
            found.setdefault(re.sub(r"^.{0,200}? NCCL INFO ", "NCCL INFO ", line[:MOST_CHARACTERS]))
            if len(found) >= MOST_LINES:
                break
    return "\n".join(found)


def _kind(network: str, ports: Sequence[Tuple[str, str]], providers: Sequence[str]) -> str:
    """Return the kind of a network by the name that the library gives it."""
    name = network.lower()
    if name.startswith("socket"):
        return "sockets"
    if "libfabric" in name or "ofi" in name:
        return "sockets" if any(_sockets(provider) for provider in providers) else "libfabric"
    if name.startswith("ib"):
        return "roce" if ports and all(layer == "RoCE" for _, layer in ports) else "infiniband"
    return "other"


def _sockets(provider: str) -> bool:
    """Return whether a provider, such as ``tcp;ofi_rxm``, is sockets in the end."""
    return any(part in SOCKET_PROVIDERS for part in re.split(r"[;:]", provider.lower()))


def _direct(text: str) -> bool:
    return all("GDRDMA" in match[2] for match in _VIA.finditer(text))


def judge_transport(exam: Examination, transport: Transport, fabric: Fabric) -> None:
    """Judge the transport that was chosen, on a node with this *fabric*; what forces sockets beside one is named."""
    if not transport.kind:
        text = "the library did not say which transport it uses: was NCCL_DEBUG=INFO overridden by nccl.conf?"
        exam.unknown("job.transport", text)
        return
    by = tuple(
        f"{name}={value}"
        for name, value in forcing({**dict(transport.forced), **exam.machine.environ}, fabric)
    )
    message = f"{transport.version or 'the library'} joins nodes by {transport.network}"
    message += f" ({transport.provider})" if transport.provider else ""
    message += f" over {some(transport.devices)}" if transport.devices else ""
    reason = f"{message}, although there is {fabric.text}: " + (
        f"{', '.join(by)} forces it, unset it" if by else f"see NCCL_DEBUG=INFO; {_why(transport, fabric)}"
    )
    if not exam.judge("job.transport", weight(fabric) if transport.kind == "sockets" else 0, reason):
        exam.info(message, rule="job.transport")


def _why(transport: Transport, fabric: Fabric) -> str:
    if fabric.slingshot:
        return f"is the plug-in for Slingshot (aws-ofi-nccl) loaded? {transport.plugin}".strip()
    return (
        "are /dev/infiniband and libibverbs in the container, and are its ports the right ones (NCCL_IB_HCA)?"
    )


def weight(fabric: Fabric) -> int:
    """Return how bad sockets are here: 2 beside a fabric of its own, 1 where Ethernet could do RoCE, else 0."""
    return 2 if fabric.own else 1 if fabric.ethernet else 0


def forcing(environ: Mapping[str, str], fabric: Fabric) -> Tuple[Tuple[str, str], ...]:
    """Return the variables, with their values, that keep libraries from using *fabric*.

    Source: NCCL user guide, Environment Variables; fabric(7), FI_PROVIDER.
    """
    found: List[Tuple[str, str]] = []
    verbs = (*fabric.verbs, *fabric.ethernet)

    def note(name: str, *, bad: bool) -> None:
        if bad:
            found.append((name, environ[name]))

    value = {name: text.strip() for name, text in environ.items()}
    note("NCCL_IB_DISABLE", bad=bool(verbs) and value.get("NCCL_IB_DISABLE", "0") not in {"", "0"})
    note("NCCL_NET", bad=value.get("NCCL_NET", "").lower() == "socket" and weight(fabric) > 0)
    hca = value.get("NCCL_IB_HCA", "")
    note("NCCL_IB_HCA", bad=bool(verbs) and bool(hca) and not any(fits(hca, name) for name in verbs))
    if fabric.slingshot:
        note("NCCL_NET_PLUGIN", bad=value.get("NCCL_NET_PLUGIN", "").lower() == "none")
        only = re.split(r"[,;]", value.get("FI_PROVIDER", "").lower())
        note("FI_PROVIDER", bad=bool(only[0]) and not only[0].startswith("^") and "cxi" not in only)
    return tuple(found)


def fits(wanted: str, name: str) -> bool:
    """Return whether NCCL takes device or interface *name* by a list such as ``mlx5,=ib0:1`` or ``^docker``.

    The forms hold for NCCL_IB_HCA and NCCL_SOCKET_IFNAME: prefixes, ``=`` for whole names, ``^`` for all others; a port
    behind a colon is not looked at here.
    """
    without = wanted.startswith("^")
    rest = wanted[1:] if without else wanted
    exact = rest.startswith("=")
    rest = rest[1:] if exact else rest
    message = [word.partition(":")[0] for word in rest.split(",") if word]
    hit = any(name == word if exact else name.startswith(word) for word in message)
    return hit != without


#: Names of NCCL's and RCCL's plug-ins for libfabric. Source: NCCL user guide, NCCL_NET_PLUGIN; aws-ofi-nccl; aws-ofi-rccl.
PLUGINS = ("libnccl-net*.so*", "librccl-net*.so*")


def _judge_ahead(exam: Examination) -> str:
    """Look at variables first, then at what is missing."""
    if len(exam.context.hosts) == 1:
        return "one node sends over no network"
    fabric = fabric_of(exam.machine)
    names = [f"{name}={value}" for name, value in forcing(exam.machine.environ, fabric)]
    text = f"{', '.join(names)} keeps NCCL from {fabric.text}: it would send by sockets; unset it"
    exam.judge("job.transport", weight(fabric) if names else 0, text)
    _judge_interfaces(exam)
    _judge_files(exam, fabric)
    return f"nothing keeps libraries from {fabric.text or 'sockets'}"


def _judge_interfaces(exam: Examination) -> None:
    there = [path.rpartition("/")[2] for path in exam.machine.names("/sys/class/net/*")]
    wrong: List[str] = []
    nccl = exam.machine.environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and there and not any(fits(nccl, name) for name in there):
        wrong.append(f"NCCL_SOCKET_IFNAME={nccl}")
    gloo = exam.machine.environ.get("GLOO_SOCKET_IFNAME", "")
    if gloo and there and not all(word.strip() in there for word in gloo.split(",")):
        wrong.append(f"GLOO_SOCKET_IFNAME={gloo}")
    text = f"{', '.join(wrong)}: this node has {', '.join(there[:12])}; name one of them"
    exam.judge("job.interface_missing", len(wrong), text)


def _judge_files(exam: Examination, fabric: Fabric) -> None:
    """Judge device files, and NCCL's plug-in for Slingshot."""
    machine, missing = exam.machine, []
    if fabric.verbs and not machine.names("/dev/infiniband/uverbs*"):
        missing.append("/dev/infiniband/uverbs*")
    missing += [f"/dev/{name}" for name in fabric.slingshot if not machine.exists(f"/dev/{name}")]
    text = f"{', '.join(missing)} is missing, so that {fabric.text} cannot be used: give it to the container"
    exam.judge("job.fabric_devices", len(missing), text)
    wanted = bool(fabric.slingshot) and exam.wanted.accelerator in {"cuda", "rocm", "auto"}
    there = wanted and any(
        machine.names(f"{folder}/{name}") for folder in library_folders(machine) for name in PLUGINS
    )
    text = (
        "NCCL's plug-in for Slingshot (aws-ofi-nccl) is neither on LD_LIBRARY_PATH nor where libraries lie: "
        "load its module; set NCCL_NET='AWS Libfabric' so that NCCL stops rather than sends by sockets"
    )
    exam.judge("job.plugin_missing", int(wanted and not there), text)


CHECKS = (
    Check.named("job_names", _judge_names),
    Check.named("job_transport", _judge_ahead),
)
