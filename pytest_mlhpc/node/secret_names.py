"""PAYLOAD, standard library only. Which variables may hold secrets: the values of these are in no record and no verdict."""

from __future__ import annotations

import re

#: Parts of names, as a guess on the safe side.
_SECRET = re.compile(r"TOKEN|SECRET|PASS|_PWD|KEY|CRED|AUTH|BEARER|COOKIE|PRIVATE", re.IGNORECASE)


def may_be_secret(name: str) -> bool:
    """Return whether the variable of this name may hold a secret."""
    return bool(_SECRET.search(name))
