"""A rendezvous is looked for by name and by TCP, and trouble is said in words."""

import socket

import pytest

from pytest_mlhpc.vet.job_rendezvous import addresses, is_loopback
from pytest_mlhpc.vet.machine import Done, Machine, Unreadable


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_system_s_own_resolver_is_asked():
    assert is_loopback(addresses(Machine(), "localhost"))


def test_no_address_at_all_is_the_node_itself():
    assert is_loopback(("0.0.0.0",))  # noqa: S104 - nothing is bound
    assert not is_loopback(("127.0.0.1", "10.1.0.1"))
    assert not is_loopback(())


def test_an_unknown_name_has_no_addresses():
    assert addresses(Machine(), "no-such-node.invalid") == ()


def test_names_that_are_options_or_commands_are_never_handed_on():
    machine = Machine(commands={"getent": Done(0, "10.0.0.1 STREAM x\n", "")})
    for name in ("--help", "a b", "$(id)", "", "a;b", "-"):
        assert addresses(machine, name) == ()


def test_an_address_needs_no_resolver():
    assert addresses(Machine(commands={}), "10.1.2.3") == ("10.1.2.3",)


def test_a_resolver_that_breaks_is_not_an_unknown_name():
    with pytest.raises(Unreadable, match="getent ahosts n1 failed: no memory"):
        addresses(Machine(commands={"getent": Done(1, "", "no memory")}), "n1")


def test_who_listens_is_reached(listener):
    assert Machine().connect("127.0.0.1", listener, 2.0)


def test_a_refusal_is_an_answer():
    assert not Machine().connect("127.0.0.1", closed_port(), 2.0)


def test_who_cannot_be_reached_is_told_in_words():
    with pytest.raises(Unreadable, match=r"255\.255\.255\.255 cannot be reached: \w+"):
        Machine().connect("255.255.255.255", 9, 1.0)
