"""Several pods' agents and their runs: together, in order, and every way in which one of them may go."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pods import Pods, run_plan

from pytest_mlhpc.batch.wire import key_of, proof

pytestmark = pytest.mark.servers

RUN, NEXT = "run-0001", "run-0002"
P1 = "p-1 (node node1)"


def both(script: str, name: str = RUN, **changes):
    fields = {"nodes": 2, "ranks": 2, "launcher": "podrun", "argv": ("bash", "-c", script)}
    return run_plan(name, **{**fields, **changes})


@pytest.fixture
def pods(tmp_path):
    made: list[Pods] = []

    def make(*runs, **changes) -> Pods:
        made.append(Pods(tmp_path, *runs, **{"pods": 2, **changes}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_pod_starts_its_share_and_knows_its_place(pods, tmp_path):
    script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MLHPC_NODE $MASTER_ADDR $OMP_NUM_THREADS $PWD"
    group = pods(both(script, ranks=4))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert group.told() == [(RUN, "started"), (RUN, "end")]
    said = sorted(group.output(RUN, "launcher").read_text().splitlines())
    places = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert said == [
        f"{rank} {local} 4 p-{pod} (node node{pod}) 127.0.0.1 1 {group.work(pod) / RUN}"
        for rank, local, pod in places
    ]


def test_the_next_run_begins_when_the_former_has_ended_on_all_pods(pods, tmp_path):
    mark = tmp_path / "marks"
    group = pods(
        both(f'[ $RANK = 1 ] && sleep 1; echo "first $RANK" >> {mark}'),
        both(f'echo "second $RANK" >> {mark}', NEXT),
    )
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert [line.split()[0] for line in mark.read_text().splitlines()] == ["first"] * 2 + ["second"] * 2


def test_a_run_of_one_node_is_done_on_the_first_pod_alone(pods, tmp_path):
    group = pods(run_plan(argv=("bash", "-c", "echo $MLHPC_NODE")), both("true", NEXT))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert group.output(RUN, "rank0").read_text() == "p-0 (node node0)\n"


def test_every_pod_shows_what_its_own_processes_print(pods, tmp_path):
    group = pods(both("echo I am $RANK"))
    group.start()
    group.ends()
    assert f"[{RUN} pod1 0] I am 1\n".encode() in group.log(1)
    assert group.messages(1) == []
    assert group.output(RUN, "pod1", 1).read_text() == "I am 1\n"


def test_lines_of_several_pods_do_not_mix(pods, tmp_path):
    group = pods(both("for i in $(seq 2000); do echo $RANK-$RANK-$RANK-$RANK; done"))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    lines = group.output(RUN, "launcher").read_text().splitlines()
    assert sorted(set(lines)) == ["0-0-0-0", "1-1-1-1"]
    assert len(lines) == 4000


def test_fifty_megabytes_from_another_pod_are_cut_and_do_not_stop_it(pods):
    group = pods(both("[ $RANK = 0 ] || head -c 50000000 /dev/zero | tr '\\0' 'x' | fold -w 99"))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert group.told()[-1] == (RUN, "end")
    for name, pod in (("launcher", 0), ("pod1", 1)):
        kept = group.output(RUN, name, pod).read_bytes()
        assert re.search(rb"\n\[3\d{7} more bytes were not kept\]\n$", kept), kept[-100:]


@pytest.mark.parametrize(
    ("script", "outcome", "says"),
    [
        ("exit 3", "worker_exit", f"rank 1 on {P1} ended with exit code 3"),
        ("kill -9 $$", "worker_killed", f"rank 1 on {P1} was killed by SIGKILL"),
        ("kill -SEGV $$", "worker_killed", f"rank 1 on {P1} was killed by SIGSEGV"),
    ],
)
def test_a_process_that_ends_badly_on_another_pod_is_named_and_ends_the_run(pods, script, outcome, says):
    group = pods(both(f"[ $RANK = 0 ] && exec sleep 300; echo my last word; {script}"), both("true", NEXT))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    failure = group.failure()
    assert failure["outcome"] == outcome
    assert failure["text"].startswith(says)
    assert failure["text"].endswith("my last word")
    assert group.told()[-2:] == [(NEXT, "started"), (NEXT, "end")]


def test_a_process_that_ends_badly_here_ends_the_other_pods(pods, tmp_path):
    script = f"[ $RANK = 0 ] && exit 5; trap '' TERM; touch {tmp_path}/other; sleep 300"
    group = pods(
        both(f"while [ $RANK = 0 -a ! -e {tmp_path}/other ]; do sleep 0.1; done; {script}"),
        both("true", NEXT),
    )
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert group.failure()["text"].startswith("rank 0 on p-0 (node node0) ended with exit code 5")
    assert group.told()[-1] == (NEXT, "end")


def test_a_program_that_only_the_other_pod_lacks_is_named(pods, tmp_path):
    here = group_program(tmp_path)
    group = pods(run_plan(nodes=2, ranks=2, launcher="podrun", argv=("./prog",)))
    group.plan = replace(group.plan, runs=(replace(group.plan.runs[0], argv=(str(here),)),))
    group.start(0)
    group.start(1, MLHPC_TEST_X="1")
    assert group.ends() == {0: 0, 1: 0}
    assert group.failure()["outcome"] == "command_not_found"


def group_program(folder: Path) -> Path:
    path = folder / "program"
    path.write_text("no program")
    return path


def test_the_time_limit_ends_all_pods(pods):
    group = pods(both("sleep 300", time_limit_s=3.0), both("true", NEXT))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert group.failure()["outcome"] == "time_limit"
    assert group.told()[-1] == (NEXT, "end")


def test_pods_that_never_come_are_named_after_the_limit(pods):
    group = pods(both("true", nodes=3, ranks=3), pods=4, MLHPC_MEET_S="3")
    group.start(0, 2)
    codes = group.ends()
    assert codes[0] == 71
    assert group.failure()["outcome"] == "launch_failed"
    assert group.failure()["text"] == "of 4 pods these did not come to p-0 (node node0) within 3 s: 1, 3"
    assert group.told() == [(RUN, "failed"), (RUN, "end")]
    assert codes[2] == 71


def test_a_pod_that_nobody_tells_where_the_first_is_says_so(pods):
    group = pods(both("true"), MLHPC_MEET_S="2", MLHPC_LEADER="")
    group.start(1)
    assert group.ends() == {1: 71}
    assert (
        "pod 1 (p-1 (node node1)): the first pod was not found within 2 s: nobody has told its address"
        in group.words(1)
    )


def test_a_slow_agent_is_awaited_and_learns_the_address_from_its_annotations(pods):
    group = pods(both("true"), MLHPC_LEADER="")
    group.start(1)
    group.start(0)
    time.sleep(1)  # both look for each other meanwhile; nothing tells of that
    info = group.folder / "pod1" / "info" / "annotations"
    info.write_text('a="b"\npytest-mlhpc/leader="127.0.0.1"\nz="\\"x\\""\n')
    assert group.ends() == {0: 0, 1: 0}
    assert group.told() == [(RUN, "started"), (RUN, "end")]


def test_an_agent_with_another_plan_is_not_let_in(pods):
    group = pods(both("true"), MLHPC_MEET_S="4")
    other = replace(group.plan, runs=(replace(group.plan.runs[0], nonce="guessed"),))
    group.start(0)
    group.start(1, plan=other)
    assert group.ends() == {0: 71, 1: 71}
    assert group.failure()["text"].endswith("within 4 s: 1")
    assert "the first pod was not found within 4 s" in group.words(1)


def test_an_agent_does_not_obey_whoever_listens_at_the_leaders_port(pods):
    group = pods(both("true"), MLHPC_MEET_S="3")
    with socket.create_server(("127.0.0.1", group.port)) as impostor:
        impostor.settimeout(30)
        group.start(1)
        peer, _ = impostor.accept()
        with peer:
            peer.sendall(b'{"kind":"challenge","challenge":"x"}\n')
            peer.recv(4096)
            peer.sendall(
                b'{"kind":"welcome","mac":"x"}\n{"kind":"start","run":"run-0001","argv":["touch","/tmp/no"]}\n'
            )
            assert group.ends() == {1: 71}
    assert "whoever listens there does not know our key" in group.words(1) or "no challenge" in group.words(1)


def test_strangers_and_garbage_at_the_port_do_not_hurt(pods):
    group = pods(both("sleep 1"))
    group.start(0)
    knocks = []
    group.await_(lambda: knock(group.port, knocks, b""))
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000,
        b'{"kind":7}\n',
        b'{"kind":"hello"}\n',
        b"[" * 5000,
    ):
        knock(group.port, knocks, words)
    for _ in range(200):
        knock(group.port, knocks, b'{"kind":"hello","hello":"{}","mac":"0"}\n')
    group.start(1)
    assert group.ends() == {0: 0, 1: 0}
    assert group.told() == [(RUN, "started"), (RUN, "end")]
    for one in knocks:
        one.close()


def knock(port: int, knocks: list[socket.socket], words: bytes) -> bool:
    try:
        knocks.append(socket.create_connection(("127.0.0.1", port), 5))
        knocks[-1].sendall(words)
    except OSError:
        return False
    return True


def test_a_second_agent_of_the_same_rank_is_refused(pods, tmp_path):
    group = pods(both(f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"))
    group.start()
    group.await_((group.work(1) / RUN).exists)
    first = group.agents[1]
    group.start(1)
    assert group.agents[1].wait(60) == 2
    (tmp_path / "go").touch()
    assert "the first pod refuses it: pod 1 (p-1 (node node1)) has come before" in group.words(1)
    group.agents[1] = first
    assert group.ends() == {0: 0, 1: 0}


def test_what_comes_in_one_piece_with_the_welcome_is_heard(pods):
    group = pods(both("true"))
    with socket.create_server(("127.0.0.1", group.port)) as hub:
        hub.settimeout(60)
        group.start(1)
        peer, _ = hub.accept()
        with peer, peer.makefile("rb") as lines:
            peer.sendall(b'{"kind":"challenge","challenge":"x"}\n')
            theirs = json.loads(lines.readline())["challenge"]
            welcome = {"kind": "welcome", "mac": proof(key_of(group.plan), "hub", theirs, "x")}
            refused = {"kind": "refused", "text": "there are enough"}
            peer.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in (welcome, refused)))
            assert group.ends() == {1: 2}
    assert "the first pod refuses it: there are enough" in group.words(1)


def test_an_agent_that_is_killed_before_a_run_is_told_of_every_run(pods):
    group = pods(both("true"), both("true", NEXT), pods=3, MLHPC_MEET_S="60")
    group.start(0, 1)
    group.await_(lambda: "found the first pod" in group.words(1))  # which has counted it by then
    group.agents[1].kill()
    assert group.agents[0].wait(60) == 71
    text = group.failure()["text"]
    assert text.startswith("of 3 pods these did not come to p-0 (node node0) within 60 s: 2")
    assert f"{P1} came and went: " in text
    assert group.told()[-1] == (NEXT, "end")


def test_an_agent_that_is_killed_in_a_run_is_a_node_failure_that_names_pod_and_node(pods):
    group = pods(both("echo $RANK runs; sleep 300"), both("true", NEXT), run_plan("run-0003"))
    group.start()
    group.await_(lambda: b"1 runs" in group.log(1))
    group.agents[1].kill()
    assert group.agents[0].wait(60) == 0
    failure = group.failure()
    assert failure["outcome"] == "node_failure"
    assert failure["text"].startswith(f"pod {P1} was lost during the run: ")
    failed = [
        (item.body["outcome"], item.body["nodes"]) for item in group.messages() if item.kind == "failed"
    ]
    assert failed == [("node_failure", ["node1"])] * 2  # the second run as well; the third needs no other pod
    assert group.told()[-2:] == [("run-0003", "started"), ("run-0003", "end")]


def test_a_pod_that_is_deleted_says_so(pods):
    group = pods(both("echo $RANK runs; sleep 300"))
    group.start()
    group.await_(lambda: b"1 runs" in group.log(1))
    group.agents[1].send_signal(signal.SIGTERM)
    assert group.ends() == {0: 0, 1: 143}
    assert f"pod {P1} was lost during the run: its pod is being ended (SIGTERM)" in group.failure()["text"]
    assert group.failure()["nodes"] == []  # no node has done that
    assert group.log(1).endswith(b'{"pod":"over","exit":143}\n')


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_other_pods_end_with_the_first(pods, end):
    group = pods(both("trap '' TERM; echo $RANK runs; sleep 300; sleep 300"))
    group.start()
    group.await_(lambda: b"1 runs" in group.log(1))
    group.agents[0].send_signal(end)
    code = group.agents[1].wait(60)
    if end == signal.SIGKILL:
        assert code == 69
        assert "pod 1 (p-1 (node node1)): the first pod's agent is gone: " in group.words(1)
    else:
        assert (code, group.agents[0].wait(60)) == (143, 143)


def test_sigterm_before_the_others_have_come_ends_the_first(pods):
    group = pods(both("true"))
    group.start(0)
    knocks: list[socket.socket] = []
    group.await_(lambda: knock(group.port, knocks, b""))
    group.agents[0].send_signal(signal.SIGTERM)
    assert group.agents[0].wait(30) == 143
    knocks[0].close()


def test_an_agent_that_stands_still_is_lost_after_a_while(pods):
    group = pods(both("echo $RANK runs; sleep 300", time_limit_s=120.0), MLHPC_SILENCE_S="3")
    group.start()
    group.await_(lambda: b"1 runs" in group.log(1))
    group.agents[1].send_signal(signal.SIGSTOP)
    try:
        assert group.agents[0].wait(60) == 0
    finally:
        group.agents[1].send_signal(signal.SIGCONT)
    assert group.failure()["outcome"] == "node_failure"
    assert "no sign of life for 3 s" in group.failure()["text"]
    assert group.agents[1].wait(60) == 69


def test_a_port_that_is_taken_is_told_with_what_to_do(pods):
    group = pods(both("true"))
    with socket.create_server(("", group.port)):
        group.start(0)
        assert group.ends() == {0: 71}
    assert group.failure()["outcome"] == "launch_failed"
    assert re.search(r"at port \d+: .*; set MLHPC_PORT to a free one", group.failure()["text"])


def test_variables_of_a_pod_stay_its_own_and_those_of_the_run_reach_it(pods, tmp_path):
    run = both("echo $RANK:$DEVICES:$ASKED", variables={"ASKED": "yes"})
    group = pods(run)
    group.start(0, DEVICES="here")
    group.start(1, DEVICES="there", RANK="9", WORLD_SIZE="10", MASTER_ADDR="of an operator")
    assert group.ends() == {0: 0, 1: 0}
    said = sorted(group.output(RUN, "launcher").read_text().splitlines())
    assert said == ["0:here:yes", "1:there:yes"]


def test_podrun_that_is_killed_ends_its_processes_on_all_pods(pods):
    group = pods(both("echo $RANK runs $$; exec sleep 300"), both("true", NEXT))
    group.start()
    group.await_(lambda: b"1 runs" in group.log(1) and b"0 runs" in group.log(0))
    os.kill(podrun_of(group.agents[0].pid), signal.SIGKILL)
    assert group.ends() == {0: 0, 1: 0}
    assert group.failure()["outcome"] == "worker_killed"
    assert group.told()[-1] == (NEXT, "end")


def podrun_of(agent: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == agent and b"pytest_mlhpc.batch.podrun" in command:
                return int(entry.name)
    raise AssertionError("there is no podrun")


def test_podrun_says_what_it_does_not_understand(tmp_path):
    from pytest_mlhpc.batch.podrun import share_of

    with pytest.raises(ValueError, match="not understood"):
        share_of(["run", "2", "1", "--wrong", "--", "true"])
    assert share_of(["run", "2", "3", "--ranks", "--", "a", "--", "b"]).argv == ("a", "--", "b")


def test_what_podrun_says_is_understood_behind_an_unfinished_line():
    from pytest_mlhpc.batch.words import LauncherWords

    words = LauncherWords()
    death = {"death": {"task": 3, "pod": P1, "exit": -9, "memory": True}}
    words.feed(b"50%| half a bar mlhpc-podrun: " + json.dumps(death).encode() + b"\n")
    words.feed(
        b'mlhpc-podrun: {"lost": "p-2", "why": "gone"}\nmlhpc-podrun: {"death": 7}\nmlhpc-podrun: {nonsense}\n'
    )
    assert [(one.task, one.node, one.exit, one.out_of_memory) for one in words.deaths] == [(3, P1, -9, True)]
    words.feed(b'mlhpc-podrun: {"lost": "p-3", "why": "silent", "node": "n3"}\n')
    assert words.lost_pods == [("p-2", "gone", ""), ("p-3", "silent", "n3")]
    assert words.out_of_memory
    assert sys.version_info
