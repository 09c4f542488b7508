"""Credentials that are read again lead to where the old ones did, or nowhere."""

from __future__ import annotations

import io

import pytest

from pytest_mlhpc.provision.kubernetes.errors import Call, Unauthorized
from pytest_mlhpc.provision.kubernetes.login import Access, Login

CALL = Call("list", "pods", "", "ns", "https://one.test")


def access(server: str = "https://one.test", authority: str = "a") -> Access:
    return Access(io.BytesIO(), server, "ns", authority)


def test_new_credentials_of_the_same_server_are_taken():
    old, new = access(), access()
    login = Login(iter((old, new)).__next__)
    login.renew(old, CALL, OSError("401"))
    assert login.access is new


@pytest.mark.parametrize(
    "other", [access("https://two.test"), access(authority="b")], ids=["server", "authority"]
)
def test_credentials_of_another_cluster_are_none_of_ours(other):
    old = access()
    login = Login(iter((old, other)).__next__)
    with pytest.raises(Unauthorized, match=r"the kubeconfig leads to another cluster, https://.*, now"):
        login.renew(old, CALL, OSError("401"))
    assert login.access is old
