"""What NCCL's log says of the transport, and what is thought of it beside the node's fabric."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import yaml
from child_driver import Child

from pytest_mlhpc.vet.child import nccl_log, transport
from pytest_mlhpc.vet.child.nccl_log import Chosen, parse
from pytest_mlhpc.vet.child.protocol import Failed
from pytest_mlhpc.vet.finding import Origin, Severity
from pytest_mlhpc.vet.job_fabric import Fabric
from pytest_mlhpc.vet.machine import Machine

LOGS = yaml.safe_load(Path(__file__).with_name("data").joinpath("transport_logs.yaml").read_text())
INFINIBAND, SOCKETS, LIBFABRIC, LIBFABRIC_TCP = (
    LOGS[f"child_{name}"]["log"] for name in ("infiniband", "sockets", "libfabric", "libfabric_tcp")
)


def test_infiniband_is_read_from_the_log() -> None:
    chosen = parse(INFINIBAND, "nccl")
    assert (chosen.network, chosen.interfaces) == ("IB", ("mlx5_0:1", "mlx5_1:1"))
    assert (chosen.inside, chosen.version, chosen.nvls) == (("P2P/CUMEM/read",), "2.20.5+cuda12.4", True)
    assert not chosen.sockets


def test_sockets_are_read_from_the_log() -> None:
    chosen = parse(SOCKETS, "rccl")
    assert (chosen.network, chosen.interfaces) == ("Socket", ("eth0", "hsn0"))
    assert chosen.inside == ("SHM/direct/direct",)
    assert chosen.sockets


def test_a_plugin_that_itself_uses_sockets_is_one_of_them() -> None:
    assert (parse(LIBFABRIC, "nccl").provider, parse(LIBFABRIC, "nccl").sockets) == ("cxi", False)
    assert parse(LIBFABRIC_TCP, "nccl").sockets


def test_a_log_of_anything_else_says_nothing() -> None:
    for text in ("", "\x00\xff garbage", "NET/IB : No device found.\n" * 100):
        assert parse(text, "nccl") == Chosen("nccl")


def test_the_log_is_memory_that_only_this_process_reads() -> None:
    environ: dict[str, str] = {"NCCL_DEBUG_FILE": "/home/somebody/log", "NCCL_SOCKET_IFNAME": "ib0"}
    nccl_log.prepare(environ)
    try:
        assert environ["NCCL_SOCKET_IFNAME"] == "ib0"
        assert environ["NCCL_DEBUG"] == "INFO"
        Path(environ["NCCL_DEBUG_FILE"]).write_text(
            SOCKETS
        )  # as NCCL opens it: by its path, from the beginning
        assert nccl_log.text(environ) == SOCKETS
        assert parse(nccl_log.text(environ), "nccl").sockets
        assert "(deleted)" in str(Path(environ["NCCL_DEBUG_FILE"]).readlink())
    finally:
        os.close(int(environ["NCCL_DEBUG_FILE"].rpartition("/")[2]))
    assert nccl_log.text(environ) == ""


@pytest.mark.parametrize(
    ("log", "fabric", "severity"),
    [
        (SOCKETS, Fabric(verbs=("mlx5_0",)), Severity.CRITICAL),
        (SOCKETS, Fabric(slingshot=("cxi0",)), Severity.CRITICAL),
        (SOCKETS, Fabric(ethernet=("mlx5_0",)), Severity.WARNING),
        (SOCKETS, Fabric(), Severity.INFO),
        (INFINIBAND, Fabric(verbs=("mlx5_0",)), Severity.INFO),
        (LIBFABRIC, Fabric(slingshot=("cxi0",)), Severity.INFO),
        (LIBFABRIC_TCP, Fabric(slingshot=("cxi0",)), Severity.CRITICAL),
    ],
)
def test_sockets_beside_a_fabric_are_the_users_to_mend(
    tmp_path: Path, log: str, fabric: Fabric, severity: Severity
) -> None:
    (finding,) = transport.judge(parse(log, "nccl"), fabric, Machine(root=tmp_path))
    assert (finding.severity, finding.origin, finding.rule) == (severity, Origin.USER, "job.transport")
    if severity is Severity.CRITICAL:
        assert "although there is" in finding.reason
        assert "NCCL_DEBUG=INFO" in finding.reason


@pytest.mark.parametrize(
    ("interface", "severity"), [("eth0", Severity.WARNING), ("ib0", Severity.INFO), ("hsn0", Severity.INFO)]
)
def test_gloo_should_use_the_fabrics_interface(tmp_path: Path, interface: str, severity: Severity) -> None:
    for name, kind in (("eth0", "1"), ("ib0", "32")):
        (tmp_path / f"sys/class/net/{name}").mkdir(parents=True)
        (tmp_path / f"sys/class/net/{name}/type").write_text(kind)
    chosen = transport.of_gloo({"GLOO_SOCKET_IFNAME": interface}, "n1")
    (finding,) = transport.judge(chosen, Fabric(verbs=("mlx5_0",)), Machine(root=tmp_path))
    assert finding.severity is severity
    assert f"gloo joins nodes by TCP ({interface})" in finding.reason


def test_gloo_binds_to_the_address_of_the_hosts_name() -> None:
    assert transport.of_gloo({}, "localhost").interfaces == ("lo",)
    assert transport.of_gloo({}, "no-such-host.invalid").interfaces == ("lo",)
    assert transport.interface_of("::1") in ("lo", None)  # None: a kernel without IPv6
    with pytest.raises(Failed, match=r"stands for 192\.0\.2\.7, which is none of its addresses"):
        transport.of_gloo({}, "192.0.2.7")


def test_addresses_lead_to_their_interfaces() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        assert transport.interface_of(probe.getsockname()[0]) == "lo"


def test_what_was_chosen_is_compared_between_nodes() -> None:
    facts = transport.facts(parse(INFINIBAND, "nccl"))
    assert {fact.name: fact.value for fact in facts} == {
        "nccl network": "IB",
        "nccl interfaces": "mlx5_0:1 mlx5_1:1",
        "nccl version": "2.20.5+cuda12.4",
    }


@pytest.mark.servers
def test_a_child_without_devices_tells_of_gloo(child: Child) -> None:
    outcome = child.outcome("transport")
    assert len(outcome.findings) == 1
    assert {fact.name for fact in outcome.facts} == {"gloo network", "gloo interfaces"}
