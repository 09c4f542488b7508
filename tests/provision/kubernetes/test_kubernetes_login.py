"""Credentials that are read again lead to where the old ones did, or nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mlhpc.provision.kubernetes.errors import Call, Unauthorized
from pytest_mlhpc.provision.kubernetes.login import Access, Login

CALL = Call("list", "pods", "", "ns", "https://one.test")


class Client:
    closed = False

    def close(self) -> None:
        self.closed = True


def login(*found: Access) -> Login:
    left = list(found)
    return Login(lambda: left.pop(0))


def access(server: str = "https://one.test", authority: str = "a") -> Access:
    client: Any = Client()
    return Access(client, server, "ns", authority)


def test_new_credentials_of_the_same_server_are_taken():
    old, new = access(), access()
    one = login(old, new)
    one.renew(old, CALL, OSError("401"))
    assert one.access is new


@pytest.mark.parametrize(
    "other", [access("https://two.test"), access(authority="b")], ids=["server", "authority"]
)
def test_credentials_of_another_cluster_are_none_of_ours(other):
    old = access()
    one = login(old, other)
    with pytest.raises(Unauthorized, match=r"the kubeconfig leads to another cluster, https://.*, now"):
        one.renew(old, CALL, OSError("401"))
    assert one.access is old
