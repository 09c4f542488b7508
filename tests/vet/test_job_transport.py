"""What NCCL, RCCL and gloo print is understood; sockets beside a fabric are blamed on what forces them."""

import pytest

from pytest_mlhpc.vet.finding import Origin, Severity
from pytest_mlhpc.vet.job_fabric import Fabric
from pytest_mlhpc.vet.job_transport import Transport, fits, forcing, judge, parse
from pytest_mlhpc.vet.policy import built_in

# Lines of public logs; hosts and addresses are shortened. Each names where it is from.
ROCE = """\
d3:2152176:2152299 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
NCCL version 2.19.3+cuda12.3
d3:2152176:2152299 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.0.1<0>
d3:2152176:2152299 [0] NCCL INFO Using non-device net plugin version 0
d3:2152176:2152299 [0] NCCL INFO Using network IB
"""  # nccl-tests issue 185
INFINIBAND = """\
c19:5330:5330 [3] NCCL INFO Bootstrap : Using [0]eth0:10.100.62.64<0>
c19:5330:5330 [3] NCCL INFO NET/IB : Using [0]mlx5_1:1/IB [1]mlx5_3:1/IB [2]mlx5_2:1/RoCE ; OOB eth0:10.100.62.64<0>
c19:5330:5499 [3] NCCL INFO Using network IB
g148:14937:69361 [0] NCCL INFO Channel 01/1 : 0[0] -> 8[0] [send] via NET/IB/9/GDRDMA/Shared
"""  # nccl issues 302 and 1589
SHARP = """\
q19:49360:49416 [6] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [RO]; OOB ibp25s0:10.20.0.119<0>
q19:49360:49416 [6] NCCL INFO Using network IBext
"""  # nccl issue 1357
SOCKETS = """\
NCCL INFO NET/IB : No device found.
NCCL INFO NET/Socket : Using [0]eth0:10.140.0.7<0> [1]eth1:10.0.26.164<0>
NCCL INFO Using network Socket
"""  # nccl issues 226 and 224
RCCL_SOCKETS = """\
z292:58192:58192 [0] NCCL INFO NET/Plugin: No plugin found (librccl-net.so)
RCCL version : 2.21.5-HEAD:9a0e6a1
z292:58192:58200 [2] NCCL INFO Failed to open libibverbs.so[.1]
z292:58192:58200 [2] NCCL INFO NET/Socket : Using [0]eno2np1:192.168.2.194<0>
z292:58192:58200 [2] NCCL INFO Using network Socket
"""  # rccl-tests issue 163
RCCL_INFINIBAND = """\
e05:929:929 [2] NCCL INFO NET/IB : Using [0]mlx5_3:1/IB [1]mlx5_2:1/IB ; OOB ib0:11.5.5.50<0>
e05:929:929 [2] NCCL INFO Using network IB
"""  # rccl issue 419
SLINGSHOT = """\
[0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.6.0
[0] NCCL INFO NET/OFI Selected Provider is cxi (found 8 nics)
[0] NCCL INFO Using network AWS Libfabric
"""  # aws-ofi-nccl issue 801
SLINGSHOT_BY_TCP = """\
NCCL INFO NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/8 (found 2 nics)
NCCL INFO Using network AWS Libfabric
"""  # aws-ofi-nccl, src/nccl_ofi_net.c: the same network, whatever the provider
EFA = """\
algo-1:462:462 [0] NCCL INFO NET/OFI Selected Provider is efa
algo-1:462:462 [0] NCCL INFO Using network AWS Libfabric
"""  # aws-ofi-nccl issue 161
NEWER = """\
NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
NCCL INFO Assigned NET plugin Socket to comm
"""  # NCCL, src/plugin/net.cc, since 2.27
ROUTES_ONLY = "g1072:1263985:1264007 [0] NCCL INFO Channel 02/0 : 1[c6000] -> 4[c1000] [receive] via NET/Socket/1 comm 0x95cdeb0\n"  # rccl issue 1026
GLOO = (
    "[W ProcessGroupGloo.cpp:721] Warning: Unable to resolve hostname to a (local) address. "
    "Using the loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME.\n"
)  # torch, GlooDeviceFactory.cpp

INFINIBAND_NODE = Fabric(verbs=("mlx5_0", "mlx5_1"))
SLINGSHOT_NODE = Fabric(slingshot=("cxi0",))
POLICY = built_in()


@pytest.mark.parametrize(
    ("text", "kind", "devices"),
    [
        pytest.param(ROCE, "roce", ("mlx5_10:1", "mlx5_11:1"), id="roce"),
        pytest.param(
            INFINIBAND, "infiniband", ("mlx5_1:1", "mlx5_3:1", "mlx5_2:1"), id="infiniband and one roce"
        ),
        pytest.param(SHARP, "infiniband", ("mlx5_0:1", "mlx5_1:1"), id="sharp plug-in"),
        pytest.param(SOCKETS, "sockets", ("eth0", "eth1"), id="sockets"),
        pytest.param(RCCL_SOCKETS, "sockets", ("eno2np1",), id="rccl sockets"),
        pytest.param(RCCL_INFINIBAND, "infiniband", ("mlx5_3:1", "mlx5_2:1"), id="rccl infiniband"),
        pytest.param(SLINGSHOT, "libfabric", (), id="slingshot"),
        pytest.param(SLINGSHOT_BY_TCP, "sockets", (), id="slingshot by tcp"),
        pytest.param(EFA, "libfabric", (), id="efa"),
        pytest.param(NEWER, "sockets", ("eth0",), id="since 2.27"),
        pytest.param(ROUTES_ONLY, "sockets", (), id="routes only"),
        pytest.param("", "", (), id="nothing"),
        pytest.param(
            "NCCL INFO Using network Frobnicator\n", "other", (), id="a plug-in that we do not know"
        ),
    ],
)
def test_the_transport_is_read_from_what_the_library_prints(text, kind, devices):
    seen = parse(text)
    assert (seen.kind, seen.devices) == (kind, devices)


def test_the_slowest_of_several_ranks_counts():
    assert parse(INFINIBAND + SOCKETS).kind == "sockets"
    assert parse(SLINGSHOT + SLINGSHOT_BY_TCP).kind == "sockets"


def test_version_provider_and_direct_reads_are_kept():
    assert parse(ROCE).version == "NCCL 2.19.3"
    assert parse(RCCL_SOCKETS).version == "RCCL 2.21.5-HEAD:9a0e6a1"
    assert parse(SLINGSHOT).provider == "cxi"
    assert parse(INFINIBAND).direct is True
    assert parse(ROUTES_ONLY).direct is False
    assert parse(ROCE).direct is None
    assert parse(GLOO).loopback


def test_sockets_beside_infiniband_are_critical_and_name_what_forces_them():
    text = "n1:1:1 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n" + SOCKETS
    [finding] = judge(parse(text), INFINIBAND_NODE, {}, POLICY)
    assert (finding.severity, finding.rule, finding.origin) == (
        Severity.CRITICAL,
        "job.transport",
        Origin.USER,
    )
    assert "Socket over eth0, eth1" in finding.reason
    assert "InfiniBand (mlx5_0, mlx5_1)" in finding.reason
    assert "NCCL_IB_DISABLE=1 forces it" in finding.reason


def test_sockets_that_nothing_forces_point_at_the_container_or_the_plug_in():
    [finding] = judge(parse(SOCKETS), INFINIBAND_NODE, {}, POLICY)
    assert "/dev/infiniband and libibverbs" in finding.reason
    [finding] = judge(parse(RCCL_SOCKETS), SLINGSHOT_NODE, {}, POLICY)
    assert "aws-ofi-nccl" in finding.reason
    assert "librccl-net.so" in finding.reason


def test_a_fabric_s_plug_in_that_sends_by_tcp_is_critical():
    [finding] = judge(parse(SLINGSHOT_BY_TCP), SLINGSHOT_NODE, {"FI_PROVIDER": "tcp"}, POLICY)
    assert finding.severity is Severity.CRITICAL
    assert "FI_PROVIDER=tcp forces it" in finding.reason


@pytest.mark.parametrize(
    ("text", "fabric", "severity"),
    [
        (INFINIBAND, INFINIBAND_NODE, Severity.INFO),
        (SLINGSHOT, SLINGSHOT_NODE, Severity.INFO),
        (SOCKETS, Fabric(), Severity.INFO),
        (SOCKETS, Fabric(ethernet=("mlx5_0",)), Severity.WARNING),
        ("", INFINIBAND_NODE, Severity.UNKNOWN),
    ],
)
def test_each_transport_gets_its_severity(text, fabric, severity):
    [finding] = judge(parse(text), fabric, {}, POLICY)
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


def test_variables_that_force_nothing_are_not_named():
    harmless = {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "cxi"}
    assert forcing(harmless, INFINIBAND_NODE) == ()
    assert forcing({"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}, Fabric()) == ()
    assert forcing({"FI_PROVIDER": "^tcp"}, SLINGSHOT_NODE) == ()


def test_no_text_makes_the_parser_slow_or_break():
    for text in (
        "[0]" * 100_000,
        "NET/IB : Using " + "[0]a:1/IB " * 20_000,
        "via NET/" * 50_000,
        "\0" * 1000,
    ):
        assert isinstance(parse(text), Transport)
