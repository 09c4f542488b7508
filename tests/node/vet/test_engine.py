"""Vetting as its users see it: several processes on this machine as nodes, with scripted checks and children."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import services
import yaml
from vet_agents import HANG_S, Vetting, vet

from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.place import VetPlace, key_of, ports_of
from pytest_mlhpc.node.vet.policy import built_in
from pytest_mlhpc.node.vet.vetting_run import VettingRun

pytestmark = pytest.mark.servers

NO_LOAD = {"no_load": True}


def wait_until(condition) -> None:
    assert services.wait_until(condition, HANG_S), "it never came true"


# --- checks


@pytest.mark.parametrize(
    ("script", "code", "last_line"),
    [({}, 0, "GO 1/1 node"), ({"says": {"second": "CRITICAL"}}, 1, "NO-GO: 0/1 node")],
    ids=["fit", "unfit"],
)
def test_one_node_ends_with_its_verdict_as_exit_code_and_last_line(tmp_path, script, code, last_line):
    ended = vet(tmp_path, settings=NO_LOAD, script={"all": script})
    assert (ended.codes, ended.errors) == ({0: code}, {0: ""})
    assert ended.last_line.startswith(last_line)
    assert {"first", "second", "third", "watch"} <= {one["check"] for one in ended.findings("node0")}


FAULTS = yaml.safe_load(Path(__file__).with_name("data").joinpath("faults.yaml").read_text(encoding="utf-8"))
CHECK_FAULTS, LOAD_FAULTS = FAULTS["checks"], FAULTS["load"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """One vetting without load, with a node for each fault of a check, and one whose checks do not start."""
    script = {f"node{rank}": {fault: "second"} for rank, fault in enumerate(CHECK_FAULTS, 1)}
    script["node6"] = {"no_start": True}
    return vet(tmp_path_factory.mktemp("checked"), 7, settings={**NO_LOAD, "need": 1}, script=script)


@pytest.mark.parametrize(("rank", "fault"), list(enumerate(CHECK_FAULTS, 1)), ids=CHECK_FAULTS)
def test_a_check_that_hangs_dies_or_fails_is_named_and_the_others_go_on(checked, rank, fault):
    severity, rule, words = CHECK_FAULTS[fault]
    found = {one["check"]: one for one in checked.findings(f"node{rank}")}
    bad = found.pop("second")
    assert (bad["severity"], bad["rule"], words in bad["reason"]) == (severity, rule, True), bad["reason"]
    assert {"first", "third", "watch"} <= {name for name, one in found.items() if one["severity"] == "PASS"}


def test_a_process_for_checks_that_does_not_start_says_why(checked):
    (bad,) = checked.findings("node6", "UNKNOWN")
    assert "ended with exit code 1: this node's Python is broken" in bad["reason"]


def test_faults_of_others_harm_no_node_and_no_exit_code(checked):
    assert checked.codes == dict.fromkeys(range(7), 0)
    assert checked.fitness()["node0"] == "fit"


# --- load


GOOD = [f"node{rank}" for rank in range(len(LOAD_FAULTS), len(LOAD_FAULTS) + 4)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """One vetting under load, with a node for each fault and four good ones."""
    script = {host: fault[0] for host, fault in LOAD_FAULTS.items()}
    folder = tmp_path_factory.mktemp("loaded")
    with Vetting(folder, len(LOAD_FAULTS) + len(GOOD), script=script, settings={"need": 4}) as vetting:
        vetting.start_all(9)
        vetting.start(9, MLHPC_VET_LEADER="no-such-host.invalid")
        return vetting.end()


@pytest.mark.parametrize("host", LOAD_FAULTS)
def test_a_fault_under_load_is_named(loaded, host):
    _, severity, rule, words = LOAD_FAULTS[host]
    found = [(one["rule"], one["reason"]) for one in loaded.findings(host, severity)]
    assert any(one == rule and words in reason for one, reason in found), found


def test_exactly_the_nodes_with_a_fault_are_left_out(loaded):
    assert (loaded.not_fit(), loaded.verdict["good"]) == (set(LOAD_FAULTS), GOOD)


def test_only_an_agent_that_was_killed_ends_otherwise_than_with_nought(loaded):
    assert {rank: code for rank, code in loaded.codes.items() if code} == {4: -signal.SIGKILL}


def test_a_first_node_that_is_unfit_is_not_where_the_others_meet(loaded):
    assert f"MLHPC_MASTER_ADDR={GOOD[0]}" in (loaded.out / "env.sh").read_text()


def test_equal_nodes_of_one_machine_take_turns_and_are_all_fit(tmp_path):
    turns = tmp_path / "turns"
    turns.mkdir()
    script = {"all": {"boot_id": "one", "takes": 0.02}}
    ended = vet(tmp_path, 4, script=script, environ={"MLHPC_SCRIPT_FOLDER": str(turns)})
    assert ended.codes == dict.fromkeys(range(4), 0), ended.errors
    assert ended.last_line.startswith("GO 4/4 nodes")
    assert (ended.out / "nodelist.txt").read_text().split() == [f"node{rank}" for rank in range(4)]
    assert not (ended.out / ".leader.json").exists()
    assert [path.name for path in turns.iterdir()] == ["one"]


@pytest.mark.slow
def test_a_child_that_hangs_in_an_exchange_is_named_and_no_partner_is_blamed(tmp_path):
    ended = vet(tmp_path, 6, script={"node4": {"child_hang": "pair"}}, settings={"need": 5})
    assert ended.not_fit() == {"node4"}
    assert ended.codes[0] == 0


@pytest.mark.slow
def test_a_node_that_freezes_is_named_with_what_it_had_begun(tmp_path):
    script = {"node2": {"child_freeze_agent": "memory"}}
    with Vetting(tmp_path, 5, script=script, settings={"need": 4}) as vetting:
        vetting.start_all()
        frozen = vetting.processes.pop(2)
        try:
            ended = vetting.end()
        finally:
            frozen.kill()
            frozen.communicate()
    assert (ended.codes, ended.not_fit()) == ({0: 0, 1: 0, 3: 0, 4: 0}, {"node2"})
    reason = ended.findings("node2")[0]["reason"]
    assert re.search("no sign of life for 15 s.*memory|it hung in memory", reason), reason


def test_a_deep_vetting_names_a_slow_link_between_good_nodes(tmp_path):
    script = {"all": {"links": {"node1-node4": 0.5}}}
    ended = vet(tmp_path, 5, script=script, settings={"level": "deep"})
    assert (ended.codes[0], ended.not_fit()) == (0, set()), ended.output[0]
    assert [{link["first"], link["second"]} for link in ended.verdict["links"]] == [{"node1", "node4"}]


@pytest.mark.long
def test_a_budget_that_ends_in_the_middle_is_a_verdict_with_names(tmp_path):
    # Three nodes that take turns would need minutes.
    script = {"all": {"boot_id": "one", "takes": 5.0}}
    ended = vet(tmp_path, 3, script=script, settings={"budget_s": 60.0})
    assert ended.codes[0] == 3
    assert "time for vetting was over" in str(ended.verdict)


# --- a first node in trouble


def test_a_leader_that_hangs_in_a_file_server_ends_at_the_deadline_with_exit_code_four(tmp_path):
    ended = vet(tmp_path, settings={"budget_s": 1.0, **NO_LOAD}, environ={"MLHPC_SCRIPT_STUCK": "files"})
    assert ended.codes == {0: 4}
    assert f"did not come to an end in time, preparing the folder {tmp_path / 'vet'}" in ended.errors[0]


def test_a_memory_that_does_not_answer_is_said_and_changes_nothing(tmp_path):
    ended = vet(tmp_path, settings=NO_LOAD, environ={"MLHPC_SCRIPT_STUCK": "memory"})
    assert ended.codes == {0: 0}
    assert "what earlier vettings found could not be read within 0.5 s" in ended.errors[0]
    assert "the verdict could not be stored, or acted upon, within 0.5 s" in ended.errors[0]


def test_a_folder_that_cannot_be_used_is_a_usage_error_and_the_others_hear_that_it_is_over(tmp_path):
    (tmp_path / "vet").write_text("a file")
    ended = vet(tmp_path, 2)
    assert ended.codes == {0: 2, 1: 0}
    assert ended.errors[1] == ""
    assert f"--output {tmp_path / 'vet'}: cannot be used" in ended.errors[0]


# --- who may come, and how they find each other


def test_a_node_that_never_comes_is_named():
    place = VetPlace(0, 2, "node0", ("node0", "node1"), ("127.0.0.1",))
    ours, theirs = socket.socketpair()
    leader, begun = Leader(place, b"key", Wire(ours), None), time.monotonic() - 60.0
    course = VettingRun(leader, VetSettings(budget_s=60.0), built_in(), begun=begun, deadline=begun + 60.0)
    course._gather()
    theirs.close()
    leader.close()
    assert course.report().nodes[1].missing == "it never came: no word from it within 18 s"


def test_who_finds_nobody_ends_without_spoiling_the_exit_code(tmp_path):
    with Vetting(tmp_path, 2, settings={"budget_s": 1.0, "out": ""}) as vetting:
        vetting.start(1)
        ended = vetting.end()
    assert ended.codes == {1: 0}
    assert "node0 was not reached within 1 s" in ended.errors[1]


def test_garbage_at_the_port_does_no_harm(tmp_path):
    garbage = [b"\0" * 100_000, b'{"kind": "hello"}\n', b"[" * 4000 + b"\n", b"GET / HTTP/1.0\r\n\r\n"]
    with Vetting(tmp_path, 2, settings=NO_LOAD) as vetting, contextlib.ExitStack() as strangers:
        (port, *_) = ports_of(key_of({"MLHPC_VET_KEY": vetting.key}))
        vetting.start(0)
        wait_until((vetting.out / ".leader.json").exists)
        for data in garbage * 5:
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                stranger.sendall(data)
        vetting.start(1)
        ended = vetting.end()
    assert ended.fitness() == {"node0": "fit", "node1": "fit"}


def test_a_second_process_with_the_same_place_is_refused(tmp_path):
    # The third node comes last, so that the vetting is not over before the later of both has come.
    with Vetting(tmp_path, 3, settings={**NO_LOAD, "need": 1}) as vetting:
        first = vetting.start(1)
        vetting.processes[3] = first
        second = vetting.start(1)
        vetting.start(0)
        wait_until(lambda: first.poll() is not None or second.poll() is not None)
        vetting.start(2)
        ended = vetting.end()
    assert ended.codes == dict.fromkeys(range(4), 0)
    assert [("has come before" in text) for text in ended.errors.values()].count(True) == 1


def test_many_agents_report_to_one_leader():
    """256 of them are in benchmarks/vet.py; here as many as a busy machine starts in a moment."""
    argv = [sys.executable, Path(__file__).with_name("many_agents.py"), "32"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=True)
    found = json.loads(done.stdout)
    assert (found["reported"], found["troubles"]) == (32, [])


# --- the end


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGTERM), (0, signal.SIGINT), (0, signal.SIGKILL), (1, signal.SIGTERM), (1, signal.SIGKILL)],
)
def test_whoever_is_ended_takes_all_its_processes_along(tmp_path, processes, number, rank):
    script = {"all": {"hang": "first", "child_hang": "start"}}
    with Vetting(tmp_path, 2, script=script, settings={"budget_s": 180.0}) as vetting:
        vetting.start_all()
        # Two agents; and of each the checks and the child, both with their keepers.
        wait_until(lambda: len(processes()) >= 10)
        vetting.processes[rank].send_signal(number)
        if rank == 1:
            vetting.processes[1].wait(HANG_S)
            vetting.processes[0].send_signal(signal.SIGTERM)
        ended = vetting.end()
        wait_until(lambda: not processes())
    assert ended.codes[rank] == (-9 if number == signal.SIGKILL else 128 + number)
    if rank == 0:
        assert re.search("the leader on node0 is gone|node0 was not reached", ended.errors[1])
        assert ended.codes[1] == 0
    assert not (vetting.out / "verdict.json").exists()
