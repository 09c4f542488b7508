"""Credentials that are read again lead to where the old ones did, or nowhere."""

from __future__ import annotations

import contextlib
import io

import pytest

from pytest_mlhpc.provision.kubernetes.errors import Call, Unauthorized
from pytest_mlhpc.provision.kubernetes.login import Access, Login

CALL = Call("list", "pods", "", "ns", "https://one.test")


def access(server="https://one.test", authority="a"):
    return Access(io.BytesIO(), server, "ns", authority)


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        pytest.param(access(), True, id="of the same server"),
        pytest.param(access("https://two.test"), False, id="of another server"),
        pytest.param(access(authority="b"), False, id="of another authority"),
    ],
)
def test_only_credentials_of_the_same_cluster_are_taken(other, taken):
    old = access()
    login = Login(iter((old, other)).__next__)
    text = r"the kubeconfig leads to another cluster, https://.*, now"
    with contextlib.nullcontext() if taken else pytest.raises(Unauthorized, match=text):
        login.renew(old, CALL, OSError("401"))
    assert login.access is (other if taken else old)
