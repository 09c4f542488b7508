"""What NCCL's log says of the transport, and what is thought of it beside the node's fabric."""

import os
from pathlib import Path

import pytest
import yaml
from child_driver import Child

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.checks.network import Fabric
from pytest_mlhpc.node.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.node.vet.load import collectives, node_facts
from pytest_mlhpc.node.vet.load.arguments import Failed
from pytest_mlhpc.node.vet.load.node_facts import parse_log
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import built_in

#: The network is read by job_transport.py, which test_job_transport.py is about.
LOGS = yaml.safe_load(Path(__file__).with_name("data").joinpath("transport_logs.yaml").read_text())


INFINIBAND, SOCKETS = (LOGS[f"child_{name}"]["log"] for name in ("infiniband", "sockets"))


@pytest.mark.parametrize(
    ("log", "chosen"),
    [
        (INFINIBAND, ("IB", ("mlx5_0:1", "mlx5_1:1"), ("P2P/CUMEM/read",), "2.20.5+cuda12.4", True, False)),
        (SOCKETS, ("Socket", ("eth0", "hsn0"), ("SHM/direct/direct",), "", False, True)),
        ("\x00\xff garbage", ("", (), (), "", False, False)),
    ],
    ids=["InfiniBand", "sockets", "anything else"],
)
def test_what_was_chosen_is_read_from_the_log(log: str, chosen: tuple[object, ...]) -> None:
    found = parse_log(log, "nccl")
    assert (found.network, found.interfaces, found.inside) == chosen[:3]
    assert (found.version, found.nvls, found.sockets) == chosen[3:]


def test_the_log_is_memory_that_only_this_process_reads() -> None:
    environ: dict[str, str] = {"NCCL_DEBUG_FILE": "/home/somebody/log", "NCCL_SOCKET_IFNAME": "ib0"}
    node_facts.prepare(environ)
    log = Path(environ["NCCL_DEBUG_FILE"])
    try:
        assert (environ["NCCL_SOCKET_IFNAME"], environ["NCCL_DEBUG"]) == ("ib0", "INFO")
        log.write_text(SOCKETS)  # as NCCL opens it: by its path, from the beginning
        assert node_facts.log_text(environ) == SOCKETS
        assert "(deleted)" in str(log.readlink())
    finally:
        os.close(int(log.name))
    assert node_facts.log_text(environ) == ""


def judged(root: Path, chosen: node_facts.ChosenTransport) -> Finding:
    """Return the one finding on a transport beside InfiniBand."""
    exam = Examination("transport", Machine(root=root), Context(built_in()), Origin.USER)
    collectives.judge_choice(exam, chosen, Fabric(verbs=("mlx5_0",)))
    (finding,) = exam.findings
    return finding


def test_sockets_where_there_is_a_fabric_are_the_users_to_correct(tmp_path: Path) -> None:
    finding = judged(tmp_path, parse_log(SOCKETS, "nccl"))
    verdict = finding.check, finding.severity, finding.origin, finding.rule
    assert verdict == ("transport", Severity.CRITICAL, Origin.USER, "job.transport")
    assert "although there is" in finding.reason
    assert "NCCL_DEBUG=INFO" in finding.reason


@pytest.mark.parametrize(
    ("interface", "severity"), [("eth0", Severity.WARNING), ("ib0", Severity.INFO), ("hsn0", Severity.INFO)]
)
def test_gloo_should_use_the_fabrics_interface(tmp_path: Path, interface: str, severity: Severity) -> None:
    for name, kind in (("eth0", "1"), ("ib0", "32")):
        (tmp_path / f"sys/class/net/{name}").mkdir(parents=True)
        (tmp_path / f"sys/class/net/{name}/type").write_text(kind)
    chosen = collectives.of_gloo({"GLOO_SOCKET_IFNAME": interface}, "n1")
    finding = judged(tmp_path, chosen)
    assert finding.severity is severity
    assert f"gloo joins nodes by TCP ({interface})" in finding.reason


def test_gloo_binds_to_the_address_of_the_hosts_name() -> None:
    assert collectives.of_gloo({}, "localhost").interfaces == ("lo",)
    assert collectives.of_gloo({}, "no-such-host.invalid").interfaces == ("lo",)
    assert collectives.interface_of("::1") in ("lo", None)  # None: a kernel without IPv6
    with pytest.raises(Failed, match=r"stands for 192\.0\.2\.7, which is none of its addresses"):
        collectives.of_gloo({}, "192.0.2.7")


def test_what_was_chosen_is_compared_between_nodes(tmp_path: Path) -> None:
    exam = Examination("transport", Machine(root=tmp_path), Context(built_in()), Origin.USER)
    collectives.tell_choice(exam, parse_log(INFINIBAND, "nccl"))
    assert {fact.name: fact.value for fact in exam.facts} == {
        "nccl network": "IB",
        "nccl interfaces": "mlx5_0:1 mlx5_1:1",
        "nccl version": "2.20.5+cuda12.4",
    }


@pytest.mark.servers
def test_a_child_without_devices_tells_of_gloo(child: Child) -> None:
    outcome = child.outcome("transport")
    assert len(outcome.findings) == 1
    assert {fact.name for fact in outcome.facts} == {"gloo network", "gloo interfaces"}
