"""Vetting as its users see it: several processes on this machine as nodes, with scripted checks and children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vet_agents import Vetting

pytestmark = pytest.mark.servers


def alive(cookie: str) -> list[int]:
    """Return the pids of what a test has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"MLHPC_TEST={cookie}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if int(entry.name) != os.getpid() and state != "Z":
                    found.append(int(entry.name))
    return found


def wait_until(check, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


# --- one node


def test_one_node_without_load_is_fit_when_its_checks_pass(tmp_path):
    vetting = Vetting(tmp_path, settings={"no_load": True})
    vetting.start(0)
    ended = vetting.end()
    assert (ended.codes, ended.errors) == ({0: 0}, {0: ""})
    assert ended.last_line.startswith("GO 1/1 node")
    assert {one["check"] for one in ended.findings("node0")} >= {"first", "second", "third", "watch"}


def test_a_check_that_is_critical_makes_it_unfit(tmp_path):
    vetting = Vetting(tmp_path, settings={"no_load": True}, script={"all": {"says": {"second": "CRITICAL"}}})
    vetting.start(0)
    ended = vetting.end()
    assert ended.codes == {0: 1}
    assert ended.last_line.startswith("NO-GO: 0/1 node")


@pytest.mark.parametrize(
    ("what", "severity", "rule", "words"),
    [
        ("hang", "CRITICAL", "hung", "the check second did not end within 5 s"),
        ("hang_in_c", "CRITICAL", "hung", "the check second did not end within 5 s"),
        ("die", "UNKNOWN", "died", "in the check second its process was killed by SIGSEGV"),
        ("defect", "UNKNOWN", "defect", "RuntimeError: so much for that"),
        ("unreadable", "UNKNOWN", "unreadable", "/proc/nothing cannot be read"),
    ],
)
def test_a_check_that_hangs_dies_or_fails_is_named_and_the_others_go_on(
    tmp_path, what, severity, rule, words
):
    vetting = Vetting(tmp_path, settings={"no_load": True}, script={"all": {what: "second"}})
    vetting.start(0)
    ended = vetting.end()
    assert ended.codes == {0: 1 if severity == "CRITICAL" else 3}
    (bad,) = [one for one in ended.findings("node0") if one["check"] == "second"]
    assert (bad["severity"], bad["rule"]) == (severity, rule)
    assert words in bad["reason"]
    passed = {one["check"] for one in ended.findings("node0", "PASS")}
    assert passed >= {"first", "third", "watch"}


@pytest.mark.parametrize("when", ["begin", "sample", "end"])
def test_a_watch_that_hangs_is_named(tmp_path, when):
    vetting = Vetting(tmp_path, script={"all": {"hang": when, "takes": 0.7}})
    vetting.start(0)
    ended = vetting.end()
    (bad,) = [one for one in ended.findings("node0") if one["check"] == "watch"]
    assert (bad["severity"], bad["rule"]) == ("CRITICAL", "hung")


def test_a_process_for_checks_that_does_not_start_says_why(tmp_path):
    vetting = Vetting(tmp_path, settings={"no_load": True}, script={"all": {"no_start": True}})
    vetting.start(0)
    ended = vetting.end()
    assert ended.codes == {0: 3}
    (bad,) = ended.findings("node0", "UNKNOWN")
    assert "ended with exit code 1: this node's Python is broken" in bad["reason"]


def test_without_torch_nothing_is_known_and_nothing_passes(tmp_path):
    vetting = Vetting(tmp_path, script={"all": {"no_torch": True}})
    vetting.start(0)
    ended = vetting.end()
    assert ended.codes == {0: 3}
    (bad,) = ended.findings("node0", "UNKNOWN")
    assert bad["reason"] == "nothing can be computed: torch cannot be imported: there is none"


# --- several nodes


def test_equal_nodes_are_all_fit(tmp_path):
    vetting = Vetting(tmp_path, nodes=5)
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes == dict.fromkeys(range(5), 0), ended.errors
    assert ended.last_line.startswith("GO 5/5 nodes")
    assert (vetting.out / "nodelist.txt").read_text().split() == vetting.hosts
    assert not (vetting.out / ".leader.json").exists()


def test_one_node_of_six_that_is_slow_is_found_alone(tmp_path):
    vetting = Vetting(tmp_path, nodes=6, script={"node3": {"speed": 0.8}}, settings={"need": 5})
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes == dict.fromkeys(range(6), 0)
    assert [host for host, fitness in ended.fitness().items() if fitness != "fit"] == ["node3"]
    assert (vetting.out / "exclude.txt").read_text() == "node3\n"


def test_a_first_node_that_is_slow_is_not_where_the_others_meet(tmp_path):
    vetting = Vetting(tmp_path, nodes=5, script={"node0": {"slow": {"gemm": 0.8}}}, settings={"need": 4})
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes[0] == 0
    assert ended.fitness()["node0"] == "unfit"
    assert "MLHPC_MASTER_ADDR=node1" in (vetting.out / "env.sh").read_text()


def test_a_node_that_never_comes_is_named(tmp_path):
    vetting = Vetting(tmp_path, nodes=5, settings={"need": 4, "budget_s": 10.0})
    vetting.start_all(2)
    ended = vetting.end()
    assert ended.codes == {0: 0, 1: 0, 3: 0, 4: 0}
    assert ended.fitness() == {
        "node0": "fit",
        "node1": "fit",
        "node2": "unfit",
        "node3": "fit",
        "node4": "fit",
    }
    assert "it never came: no word from it within 3 s" in ended.findings("node2")[0]["reason"]


def test_a_child_that_hangs_is_named_with_its_command(tmp_path):
    vetting = Vetting(
        tmp_path, nodes=5, script={"node1": {"child_hang": "memory"}}, settings={"need": 4, "budget_s": 40.0}
    )
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes[0] == 0
    assert {host for host, fitness in ended.fitness().items() if fitness != "fit"} == {"node1"}
    bad = ended.findings("node1", "CRITICAL")[0]
    assert (bad["check"], bad["rule"]) == ("memory", "hung")
    assert "memory part one: did not end within 10 s" in bad["reason"]


def test_a_child_that_dies_is_named_with_its_signal(tmp_path):
    vetting = Vetting(tmp_path, nodes=5, script={"node1": {"child_die": "gemm"}}, settings={"need": 4})
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes[0] == 0
    assert {host for host, fitness in ended.fitness().items() if fitness != "fit"} == {"node1"}
    assert "its process was killed by SIGSEGV" in ended.findings("node1", "CRITICAL")[0]["reason"]


@pytest.mark.slow
def test_a_child_that_hangs_in_an_exchange_is_named_and_no_partner_is_blamed(tmp_path):
    vetting = Vetting(
        tmp_path, nodes=6, script={"node4": {"child_hang": "pair"}}, settings={"need": 5, "budget_s": 60.0}
    )
    vetting.start_all()
    ended = vetting.end(90)
    assert {host for host, fitness in ended.fitness().items() if fitness != "fit"} == {"node4"}
    assert ended.codes[0] == 0


def test_an_agent_that_is_killed_is_named_and_takes_its_processes_along(tmp_path):
    vetting = Vetting(tmp_path, nodes=5, script={"node3": {"child_stop_agent": "gemm"}}, settings={"need": 4})
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes[3] == -signal.SIGKILL
    assert ended.codes[0] == 0
    assert ended.fitness()["node3"] == "unfit"
    assert "its agent was lost" in ended.findings("node3")[0]["reason"]


@pytest.mark.slow
def test_a_node_that_freezes_is_named_with_what_it_had_begun(tmp_path):
    vetting = Vetting(
        tmp_path,
        nodes=5,
        script={"node2": {"child_freeze_agent": "memory"}},
        settings={"need": 4, "budget_s": 50.0},
    )
    vetting.start_all()
    try:
        processes = [vetting.processes.pop(2)]
        ended = vetting.end()
    finally:
        processes[0].kill()
        processes[0].communicate()
    assert ended.codes == {0: 0, 1: 0, 3: 0, 4: 0}
    assert {host for host, fitness in ended.fitness().items() if fitness != "fit"} == {"node2"}
    reason = ended.findings("node2")[0]["reason"]
    assert "no sign of life for 15 s" in reason or "it hung in memory" in reason
    assert "memory" in reason


def test_a_deep_vetting_names_a_slow_link_between_good_nodes(tmp_path):
    script = {"all": {"links": {"node1-node4": 0.5}}}
    vetting = Vetting(tmp_path, nodes=6, script=script, settings={"level": "deep", "budget_s": 60.0})
    vetting.start_all()
    ended = vetting.end(90)
    assert ended.codes[0] == 0, ended.output[0]
    assert set(ended.fitness().values()) == {"fit"}
    assert [{link["first"], link["second"]} for link in ended.verdict["links"]] == [{"node1", "node4"}]


def test_nodes_of_one_machine_take_turns(tmp_path):
    (tmp_path / "turns").mkdir()
    vetting = Vetting(
        tmp_path,
        nodes=4,
        script={"all": {"boot_id": "one", "takes": 0.2}},
        environ={"MLHPC_SCRIPT_FOLDER": str(tmp_path / "turns")},
    )
    vetting.start_all()
    assert vetting.end().codes[0] == 0
    assert {path.name for path in (tmp_path / "turns").iterdir()} == {"one"}


def test_a_leader_that_hangs_in_a_file_server_ends_at_the_deadline_with_exit_code_four(tmp_path):
    stuck = {"MLHPC_SCRIPT_STUCK": "files"}
    vetting = Vetting(tmp_path, nodes=2, settings={"budget_s": 5.0, "no_load": True}, environ=stuck)
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes == {0: 4, 1: 0}
    assert f"did not come to an end in time, preparing the folder {vetting.out}" in ended.errors[0]


def test_a_memory_that_does_not_answer_is_said_and_changes_nothing(tmp_path):
    stuck = {"MLHPC_SCRIPT_STUCK": "memory"}
    vetting = Vetting(tmp_path, nodes=2, settings={"budget_s": 10.0, "no_load": True}, environ=stuck)
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes == {0: 0, 1: 0}
    assert "what earlier vettings found could not be read within 2 s" in ended.errors[0]
    assert "the verdict could not be kept, or acted upon, within 0.5 s" in ended.errors[0]


def test_a_folder_that_cannot_be_used_is_a_usage_error_and_the_others_hear_that_it_is_over(tmp_path):
    (tmp_path / "vet").write_text("a file")
    vetting = Vetting(tmp_path, nodes=3)
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes == {0: 2, 1: 0, 2: 0}
    assert (ended.errors[1], ended.errors[2]) == ("", "")
    assert f"--out {vetting.out}: cannot be used" in ended.errors[0]


def test_a_budget_that_ends_in_the_middle_is_a_verdict_with_names(tmp_path):
    vetting = Vetting(
        tmp_path, nodes=4, script={"all": {"boot_id": "one", "takes": 2.0}}, settings={"budget_s": 12.0}
    )
    begun = time.monotonic()
    vetting.start_all()
    ended = vetting.end()
    assert ended.codes[0] == 3
    assert "time for vetting was over" in str(ended.verdict)
    assert ended.verdict["seconds"] < 12.0
    assert time.monotonic() - begun < 60.0


# --- who may come, and how they find each other


def test_a_name_that_does_not_resolve_is_that_nodes_problem_alone(tmp_path):
    vetting = Vetting(tmp_path, nodes=4, settings={"need": 3})
    vetting.start_all(2)
    vetting.start(2, MLHPC_VET_LEADER="no-such-host.invalid")
    ended = vetting.end()
    assert ended.codes == dict.fromkeys(range(4), 0)
    assert {host for host, fitness in ended.fitness().items() if fitness != "fit"} == {"node2"}
    bad = ended.findings("node2", "CRITICAL")[0]
    assert "the name no-such-host.invalid of the first node does not resolve here" in bad["reason"]


def test_who_finds_nobody_ends_without_spoiling_the_exit_code(tmp_path):
    vetting = Vetting(tmp_path, nodes=2, settings={"budget_s": 5.0, "out": ""})
    vetting.start(1)
    ended = vetting.end()
    assert ended.codes == {1: 0}
    assert "node0 was not reached within 5 s" in ended.errors[1]


def test_garbage_at_the_port_does_no_harm(tmp_path):
    from pytest_mlhpc.vet.rendezvous import key_of, ports_of

    vetting = Vetting(tmp_path, nodes=3, settings={"need": 3}, script={"all": {"boot_id": "one"}})
    (port, *_) = ports_of(key_of({"MLHPC_VET_KEY": vetting._key}))
    vetting.start(0)
    wait_until((vetting.out / ".leader.json").exists)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall(
                [b"\0" * 100_000, b'{"kind": "hello"}\n', b"[" * 4000 + b"\n", b"GET / HTTP/1.0\r\n\r\n"][
                    number % 4
                ]
            )
    vetting.start(1)
    vetting.start(2)
    ended = vetting.end()
    for stranger in strangers:
        stranger.close()
    assert set(ended.fitness()) == {"node0", "node1", "node2"}
    assert all("never came" not in str(node) for node in ended.verdict["nodes"])


def test_a_second_process_with_the_same_place_is_refused(tmp_path):
    # The first node hangs for some seconds, so that the vetting is not over before the later of both has come.
    script = {"all": {"boot_id": "one"}, "node0": {"hang": "second"}}
    vetting = Vetting(tmp_path, nodes=2, settings={"no_load": True, "need": 1}, script=script)
    vetting.start(1)
    first = vetting.processes.pop(1)
    vetting.start(1)
    vetting.start(0)
    vetting.processes[2] = first
    ended = vetting.end()
    assert ended.codes == {0: 0, 1: 0, 2: 0}
    assert [("has come before" in text) for text in ended.errors.values()].count(True) == 1


def test_many_agents_report_to_one_leader():
    """256 of them are in benchmarks/vet.py; here as many as a busy machine starts in a moment."""
    argv = [sys.executable, Path(__file__).with_name("many_agents.py"), "64"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["reported"], found["troubles"]) == (64, [])


# --- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_is_ended_takes_all_its_processes_along(tmp_path, number, rank):
    script = {"all": {"hang": "first", "child_hang": "start"}}
    vetting = Vetting(tmp_path, nodes=2, script=script, settings={"budget_s": 8.0})
    vetting.start_all()
    cookie = os.environ["MLHPC_TEST"]
    wait_until(
        lambda: len(alive(cookie)) >= 10
    )  # two agents, and of each checks and child with their keepers
    vetting.processes[rank].send_signal(number)
    if rank == 0:
        ended = vetting.end()
        assert ended.codes[0] == (-9 if number == signal.SIGKILL else 128 + number)
        assert ("the leader on node0 is gone" in ended.errors[1]) or (
            "node0 was not reached" in ended.errors[1]
        )
        assert ended.codes[1] == 0
    else:
        vetting.processes[1].wait(20)
        vetting.processes[0].send_signal(signal.SIGTERM)
        vetting.end()
    wait_until(lambda: not alive(cookie))
    assert not (vetting.out / "verdict.json").exists()
