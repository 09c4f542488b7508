"""What the process with the checks makes of a check that cannot tell: whose it is to mend follows from what the check is for."""

from __future__ import annotations

import pytest

from pytest_mlhpc.vet.checks import all_checks
from pytest_mlhpc.vet.finding import Origin, Severity
from pytest_mlhpc.vet.machine import Unreadable
from pytest_mlhpc.vet.passive import attempt

CHECKS, WATCHES = all_checks()


def unreadable():
    raise Unreadable("/proc/nothing cannot be read")


@pytest.mark.parametrize("one", [*CHECKS, *WATCHES], ids=lambda one: one.name)
def test_what_a_check_for_a_job_cannot_read_is_its_users_and_else_the_nodes(one):
    (finding,) = attempt(one, unreadable).findings
    assert (finding.check, finding.severity, finding.rule) == (one.name, Severity.UNKNOWN, "unreadable")
    assert finding.origin is (Origin.USER if one.name.startswith("job_") else Origin.NODE)
