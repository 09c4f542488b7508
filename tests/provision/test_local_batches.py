"""Batches that do further plans on this machine: which plan goes to which of them, and what ends them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_allocations import is_alive, python_path, wait_until

from pytest_mlhpc.node.processes import descendants
from pytest_mlhpc.provision.guardian import processes_with, reap_session, socket_base, socket_prefix
from pytest_mlhpc.provision.local import MOST_WAITING

pytestmark = pytest.mark.servers

#: Where the workload lies whose ranks write down what they find (tests/node/batch/nosy_workload.py).
WORKLOAD = str(Path(__file__).parents[1] / "node" / "batch")


def nosy(local, *acts, warm=True, **variables):
    """Return a run whose rank looks about itself and then does *acts*."""
    variables = {"MLHPC_WORKLOAD_MODULE": "nosy_workload", "PYTHONPATH": WORKLOAD, **variables}
    return local.run(
        workload="nosy", data_source="none", parameters={"acts": list(acts)}, variables=variables, warm=warm
    )


def facts(local, run):
    """Let *run* be done and return what its rank found."""
    handle = local.batch(run)
    report = local.wait(handle)
    assert report.error is None
    assert report.kinds()[-2:] == ["failed", "end"]
    return json.loads((handle.directory / run.run_id / "facts.json").read_text())


def batches(local):
    """The batches of this session that live."""
    return [
        pid for pid in processes_with(f"MLHPC_SESSION={local.session}".encode()) if "--more" in command(pid)
    ]


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def sockets(session):
    return list(Path(socket_base()).glob(f"{socket_prefix(session)}*"))


def test_plans_of_one_environment_go_to_one_batch(local):
    found = [facts(local, nosy(local, act)) for act in ("mess", "die", "say")]
    assert len({one["warm"] for one in found}) == 1
    assert all(one["folder"] for one in found)
    assert len(batches(local)) == 1


def test_a_run_that_is_not_warm_has_a_batch_that_ends_with_it(local):
    assert facts(local, nosy(local, warm=False))["warm"] is None
    assert processes_with(f"MLHPC_SESSION={local.session}".encode()) == []


def test_another_environment_has_another_batch_and_the_oldest_one_ends(local):
    found = [facts(local, nosy(local, MINE=str(number))) for number in range(MOST_WAITING + 1)]
    assert len({one["warm"] for one in found}) == MOST_WAITING + 1
    assert len(batches(local)) == len(sockets(local.session)) == MOST_WAITING


def test_a_batch_that_died_while_it_waited_is_replaced(local):
    first = facts(local, nosy(local))["warm"]
    (batch,) = batches(local)
    os.kill(batch, signal.SIGKILL)
    wait_until(lambda: not is_alive(batch))
    wait_until(lambda: not is_alive(first))
    second = facts(local, nosy(local))["warm"]
    assert second not in (None, first)


def test_a_cancelled_run_takes_its_batch_with_it_and_the_next_has_a_new_one(local):
    first = facts(local, nosy(local))["warm"]
    run = nosy(local, "stay")
    handle = local.batch(run)
    wait_until((handle.directory / run.run_id / "staying").exists)
    below = [*batches(local), *descendants(batches(local)[0])]
    local.provisioner.cancel([handle])
    wait_until(lambda: not [pid for pid in below if is_alive(pid)])
    assert facts(local, nosy(local))["warm"] not in (None, first)


def test_a_time_limit_ends_the_rank_and_the_warm_process_goes_on(local):
    first = facts(local, nosy(local))["warm"]
    run = nosy(local, "stay")
    report = local.wait(local.batch(local.run(**{**vars(run), "time_limit_s": 8.0})))
    assert report.failure[0] == "time_limit"
    assert facts(local, nosy(local))["warm"] == first


def test_nothing_is_left_when_the_session_closes(local):
    facts(local, nosy(local))
    local.provisioner.close()
    wait_until(lambda: not processes_with(f"MLHPC_SESSION={local.session}".encode()))
    assert sockets(local.session) == []


#: A session that lets one run be done and goes away without a word while its batch waits for the next plan.
SESSION = """
import sys, time
from pathlib import Path
from local_allocations import Local
from test_local_batches import facts, nosy
local = Local(Path(sys.argv[1]), Path(sys.argv[1]), sys.argv[2])
print(facts(local, nosy(local))["warm"], local.provisioner._guardian.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("guarded", [True, False], ids=["guardian lives", "guardian is killed first"])
def test_a_session_that_is_killed_while_its_batch_waits_leaves_nothing(tmp_path, guarded):
    session = f"session-{os.getpid()}-{tmp_path.name}"
    environ = {
        **os.environ,
        "PYTHONPATH": python_path(tmp_path, Path(__file__).parent, Path(__file__).parents[1]),
    }
    argv = [sys.executable, "-c", SESSION, str(tmp_path), session]
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
            warm, guardian = map(int, process.stdout.readline().split())
            assert is_alive(warm)
            if not guarded:
                os.kill(guardian, signal.SIGKILL)
            process.kill()
        wait_until(lambda: not processes_with(f"MLHPC_SESSION={session}".encode()) and not is_alive(warm))
        if not guarded:
            reap_session(session)  # as the next session does
        wait_until(lambda: sockets(session) == [])
    finally:
        reap_session(session)
