"""A rendezvous is looked for by name and by TCP, and trouble is said in words."""

import socket

import pytest

from pytest_mlhpc.node.vet.checks.job_network import addresses, is_loopback
from pytest_mlhpc.node.vet.machine import Done, Machine, Unreadable


def test_the_system_s_own_resolver_is_asked():
    assert is_loopback(addresses(Machine(), "localhost"))


@pytest.mark.parametrize(
    ("found", "itself"),
    [(("0.0.0.0",), True), (("127.0.0.1", "10.1.0.1"), False), ((), False)],  # noqa: S104 - nothing is bound
)
def test_no_address_at_all_is_the_node_itself(found, itself):
    assert is_loopback(found) is itself


ANSWERS_ALL = Machine(commands={"getent": Done(0, "10.0.0.1 STREAM x\n", "")})


@pytest.mark.parametrize(
    ("machine", "name", "found"),
    [
        (Machine(), "no-such-node.invalid", ()),
        (Machine(commands={}), "10.1.2.3", ("10.1.2.3",)),
        *((ANSWERS_ALL, name, ()) for name in ("--help", "a b", "$(id)", "", "a;b", "-")),
    ],
    ids=lambda value: value or "nothing" if isinstance(value, str) else "",
)
def test_addresses_are_asked_for_only_where_there_is_a_name(machine, name, found):
    assert addresses(machine, name) == found


def test_a_resolver_that_breaks_is_not_an_unknown_name():
    with pytest.raises(Unreadable, match="getent ahosts n1 failed: no memory"):
        addresses(Machine(commands={"getent": Done(1, "", "no memory")}), "n1")


def test_who_listens_is_reached_and_a_refusal_is_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert Machine().connect("127.0.0.1", port, 2.0)
    assert not Machine().connect("127.0.0.1", port, 2.0)


def test_who_cannot_be_reached_is_reported_with_a_message():
    with pytest.raises(Unreadable, match=r"255\.255\.255\.255 cannot be reached: \w+"):
        Machine().connect("255.255.255.255", 9, 1.0)
