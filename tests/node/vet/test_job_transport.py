"""What NCCL, RCCL and gloo print is understood; sockets beside a fabric are blamed on what forces them."""

from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.checks.job_network import Transport, fits, forcing, judge_transport, parse
from pytest_mlhpc.node.vet.checks.network import Fabric
from pytest_mlhpc.node.vet.finding import Origin, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import built_in

LOGS = yaml.safe_load(Path(__file__).with_name("data").joinpath("transport_logs.yaml").read_text())


def log(name):
    return LOGS[name]["log"]


INFINIBAND_NODE = Fabric(verbs=("mlx5_0", "mlx5_1"))
SLINGSHOT_NODE = Fabric(slingshot=("cxi0",))


def judged(seen, fabric, environ=None):
    """Return what is found on a transport beside this fabric."""
    exam = Examination("job_transport", Machine(environ=environ or {}), Context(built_in()), Origin.USER)
    judge_transport(exam, seen, fabric)
    return exam.findings


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("roce", "roce", ("mlx5_10:1", "mlx5_11:1")),
        ("infiniband", "infiniband", ("mlx5_1:1", "mlx5_3:1", "mlx5_2:1")),
        ("sharp", "infiniband", ("mlx5_0:1", "mlx5_1:1")),
        ("sockets", "sockets", ("eth0", "eth1")),
        ("rccl_sockets", "sockets", ("eno2np1",)),
        ("rccl_infiniband", "infiniband", ("mlx5_3:1", "mlx5_2:1")),
        ("slingshot", "libfabric", ()),
        ("slingshot_by_tcp", "sockets", ()),
        ("efa", "libfabric", ()),
        ("newer", "sockets", ("eth0",)),
        ("routes_only", "sockets", ()),
    ],
)
def test_the_transport_is_read_from_what_the_library_prints(name, kind, devices):
    found = parse(log(name))
    assert (found.kind, found.devices) == (kind, devices)


def test_nothing_and_a_plug_in_that_we_do_not_know_are_distinguished():
    assert (parse("").kind, parse("NCCL INFO Using network Frobnicator\n").kind) == ("", "other")


def test_the_slowest_of_several_ranks_counts():
    assert parse(log("infiniband") + log("sockets")).kind == "sockets"
    assert parse(log("slingshot") + log("slingshot_by_tcp")).kind == "sockets"


def test_version_provider_and_direct_reads_are_reported():
    assert parse(log("roce")).version == "NCCL 2.19.3"
    assert parse(log("rccl_sockets")).version == "RCCL 2.21.5-HEAD:9a0e6a1"
    assert parse(log("slingshot")).provider == "cxi"
    direct = [parse(log(name)).direct for name in ("infiniband", "routes_only", "roce")]
    assert direct == [True, False, None]
    assert parse(log("gloo")).loopback


FORCED = "n1:1:1 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n" + log("sockets")


@pytest.mark.parametrize(
    ("text", "fabric", "environ", "words"),
    [
        (
            FORCED,
            INFINIBAND_NODE,
            {},
            ["Socket over eth0, eth1", "InfiniBand (mlx5_0, mlx5_1)", "NCCL_IB_DISABLE=1 forces it"],
        ),
        (log("sockets"), INFINIBAND_NODE, {}, ["/dev/infiniband and libibverbs"]),
        (log("rccl_sockets"), SLINGSHOT_NODE, {}, ["aws-ofi-nccl", "librccl-net.so"]),
        (log("slingshot_by_tcp"), SLINGSHOT_NODE, {"FI_PROVIDER": "tcp"}, ["FI_PROVIDER=tcp forces it"]),
    ],
    ids=[
        "forced by a variable",
        "nothing forces it in a container",
        "nothing forces it without a plug-in",
        "a fabric's plug-in that sends by TCP",
    ],
)
def test_sockets_where_there_is_a_fabric_are_critical_and_name_what_forces_them(text, fabric, environ, words):
    [finding] = judged(parse(text), fabric, environ)
    verdict = finding.severity, finding.rule, finding.origin
    assert verdict == (Severity.CRITICAL, "job.transport", Origin.USER)
    assert [each for each in words if each not in finding.reason] == []


@pytest.mark.parametrize(
    ("text", "fabric", "severity"),
    [
        (log("infiniband"), INFINIBAND_NODE, Severity.INFO),
        (log("slingshot"), SLINGSHOT_NODE, Severity.INFO),
        (log("sockets"), Fabric(), Severity.INFO),
        (log("sockets"), Fabric(ethernet=("mlx5_0",)), Severity.WARNING),
        ("", INFINIBAND_NODE, Severity.UNKNOWN),
    ],
)
def test_each_transport_gets_its_severity(text, fabric, severity):
    [finding] = judged(parse(text), fabric)
    assert finding.severity is severity


@pytest.mark.parametrize(
    ("wanted", "name", "taken"),
    [
        ("mlx5", "mlx5_0", True),
        ("=mlx5", "mlx5_0", False),
        ("=mlx5_0:1,mlx5_1:1", "mlx5_1", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^=eth0", "eth01", True),
        ("eth,ib", "ib0", True),
    ],
)
def test_lists_of_devices_mean_what_nccl_says(wanted, name, taken):
    assert fits(wanted, name) is taken


@pytest.mark.parametrize(
    ("environ", "fabric"),
    [
        (
            {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "cxi"},
            INFINIBAND_NODE,
        ),
        ({"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}, Fabric()),
        ({"FI_PROVIDER": "^tcp"}, SLINGSHOT_NODE),
    ],
)
def test_variables_that_force_nothing_are_not_named(environ, fabric):
    assert forcing(environ, fabric) == ()


@pytest.mark.parametrize(
    "text", ["[0]" * 10**5, "NET/IB : Using " + "[0]a:1/IB " * 20_000, "via NET/" * 50_000, "\0"]
)
def test_no_text_breaks_the_parser(text):
    assert isinstance(parse(text), Transport)
