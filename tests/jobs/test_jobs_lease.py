"""Who lives, and until when a lease is good."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from pytest_mlhpc.jobs.ledger_files import BEAT_S, DEAD_S, Lease, Owner, process_start, shared_now_ns


def test_a_process_that_ended_and_was_not_waited_for_is_dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
    assert process_start(process.pid) is None
    process.wait()


@pytest.mark.parametrize("silent_s", [-3600.0, 0.0, DEAD_S - 1])
def test_an_owner_elsewhere_lives_until_it_was_silent_for_too_long(silent_s):
    elsewhere = replace(Owner.me(), host="login2", start=1)
    assert elsewhere.alive(silent_s)
    assert not elsewhere.alive(DEAD_S)


def test_owners_may_miss_several_beats():
    assert DEAD_S / BEAT_S >= 10


@pytest.mark.parametrize(
    ("lease", "now_ns", "state"),
    [
        ({"alive": True}, 0, "held"),
        ({"alive": False}, 0, "expired"),
        ({"alive": True, "until_ns": 10}, 9, "detached"),
        ({"alive": True, "until_ns": 10}, 10, "expired"),
    ],
)
def test_a_lease_lasts_while_its_owner_lives_and_ends_at_its_time(lease, now_ns, state):
    assert Lease(Owner.me(), **lease).state(now_ns) == state


def test_the_time_of_a_folder_is_its_servers_and_leaves_nothing_behind(tmp_path, monkeypatch):
    before = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    now_ns = shared_now_ns(tmp_path)
    assert abs(now_ns - before) < 60 * 10**9
    assert list(tmp_path.iterdir()) == []
