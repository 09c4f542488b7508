"""How the agents of several pods meet, whom they refuse, and what becomes of the others when one of them goes."""

import contextlib
import json
import re
import signal
import socket
from dataclasses import replace

import pytest
from pods import HANG_S, both, run_plan
from running_suites import wait_for

from pytest_mlhpc.node.agents.hub import greeting
from pytest_mlhpc.node.agents.wire import Wire, greet, key_of, proof
from pytest_mlhpc.node.batch.podrun import share_of
from pytest_mlhpc.node.batch.ranks import LauncherOutput

pytestmark = pytest.mark.servers

RUN, NEXT = "run-0001", "run-0002"
P1 = "p-1 (node node1)"
RUNS = "echo $RANK runs; sleep 600"


@pytest.fixture
def running(pods):
    """Start two pods with runs, and wait until the first is under way on both."""

    def start(*runs, **environ):
        group = pods(*runs, pods=2, **environ)
        group.start()
        wait_for(lambda: b"1 runs" in group.log(1))
        return group

    return start


@pytest.fixture(scope="module")
def connect():
    """Connect to a hub as a stranger does, who stays until the end; return whether somebody listens there."""
    with contextlib.ExitStack() as strangers:

        def visit(port, data=b""):
            try:
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S))
            except OSError:
                return False
            with contextlib.suppress(OSError):  # it may be cut off
                stranger.sendall(data)
            return True

        yield visit


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100_000,
    b'{"kind":7}\n',
    b'{"kind":"hello"}\n',
    b"[" * 5000,
]


@pytest.fixture(scope="module")
def crowded(module_pods, connect, tmp_path_factory):
    """Return two pods whose hub was visited by strangers, and whose second agent came twice."""
    go = tmp_path_factory.mktemp("crowded") / "go"
    group = module_pods(both(f"while [ ! -e {go} ]; do sleep 0.1; done"), pods=2, MLHPC_LEADER="")
    group.start(1)
    group.start(0)
    wait_for(lambda: connect(group.port))
    for data in [*STRANGERS, *[b'{"kind":"hello","hello":"{}","mac":"0"}\n'] * 200]:
        connect(group.port, data)
    info = group.folder / "pod1" / "info" / "annotations"
    info.write_text('a="b"\npytest-mlhpc/leader="127.0.0.1"\nz="\\"x\\""\n')
    wait_for((group.work(1) / RUN).exists)
    first = group.agents[1]
    group.start(1, MLHPC_LEADER="127.0.0.1")
    group.second = group.agents[1].wait(HANG_S)
    group.agents[1] = first
    go.touch()
    group.codes = group.ends()
    return group


def test_a_slow_agent_learns_the_address_from_its_annotations_and_strangers_do_not_hurt(crowded):
    assert (crowded.codes, crowded.kinds()) == ({0: 0, 1: 0}, [(RUN, "started"), (RUN, "end")])


def test_a_second_agent_of_the_same_rank_is_refused(crowded):
    assert crowded.second == 2
    assert f"the first pod refuses it: pod 1 ({P1}) has come before" in crowded.errors(1)


def test_pods_that_never_come_are_named_after_the_limit(pods):
    group = pods(both("true"), pods=2, MLHPC_MEET_S="1")
    group.start(0)
    assert group.ends() == {0: 71}
    text = "of 2 pods these did not come to p-0 (node node0) within 1 s: 1"
    assert group.failure().items() >= {"outcome": "launch_failed", "text": text}.items()
    assert group.kinds() == [(RUN, "failed"), (RUN, "end")]


def test_a_pod_that_nobody_tells_where_the_first_is_says_so(pods):
    group = pods(both("true"), pods=2, MLHPC_MEET_S="0", MLHPC_LEADER="")
    group.start(1)
    assert group.ends() == {1: 71}
    text = "the first pod was not found within 0 s: its address is missing"
    assert f"pod 1 ({P1}): {text}" in group.errors(1)


def test_an_agent_with_another_plan_is_not_let_in(pods):
    group = pods(both("true"), pods=2, MLHPC_MEET_S="2")
    other = replace(group.plan, runs=(replace(group.plan.runs[0], secret="guessed"),))
    group.start(0)
    group.start(1, plan=other)
    assert group.ends() == {0: 71, 1: 71}
    assert group.failure()["text"].endswith("within 2 s: 1")
    assert "the first pod was not found within 2 s" in group.errors(1)


@pytest.fixture
def answered(pods):
    """Let the second pod's agent come to a hub of ours, which answers its challenge; return its group."""

    def answer(replies):
        group = pods(both("true"), pods=2, MLHPC_MEET_S="0")
        with socket.create_server(("127.0.0.1", group.port)) as hub:
            group.start(1)
            peer, _ = hub.accept()
            with peer, peer.makefile("rb") as lines:
                peer.sendall(b'{"kind":"challenge","challenge":"x"}\n')
                reported = replies(group, json.loads(lines.readline())["challenge"])
                peer.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in reported))
                group.ends()
        return group

    return answer


def test_an_agent_does_not_obey_whoever_listens_at_the_leaders_port(answered, tmp_path):
    start = {"kind": "start", "run": RUN, "argv": ["touch", str(tmp_path / "obeyed")]}
    group = answered(lambda _group, _challenge: [{"kind": "welcome", "mac": "x"}, start])
    assert group.ends() == {1: 71}
    assert "the process that listens there does not know the key" in group.errors(1)
    assert not (tmp_path / "obeyed").exists()


def test_what_comes_in_one_piece_with_the_welcome_is_heard(answered):
    def replies(group, challenge):
        welcome = {"kind": "welcome", "mac": proof(key_of(group.plan), "hub", challenge, "x")}
        return [welcome, {"kind": "over", "exit": 7}]

    assert answered(replies).ends() == {1: 7}


def test_an_agent_that_is_refused_ends_and_says_why(answered):
    def replies(group, challenge):
        mac = proof(key_of(group.plan), "hub", challenge, "x")
        return [{"kind": "welcome", "mac": mac, "refused": "there are enough"}]

    group = answered(replies)
    assert group.ends() == {1: 2}
    assert "the first pod refuses it: there are enough" in group.errors(1)


def test_secrets_of_a_run_go_over_no_network_as_each_pod_has_the_plan(pods, connect):
    secrets = {"variables": {"T": "confidential-2"}, "secret": "confidential-1"}
    group = pods(both("true", **secrets), pods=2)
    group.start(0)
    wait_for(lambda: connect(group.port))
    with socket.create_connection(("127.0.0.1", group.port), HANG_S) as theirs:
        wire, said = Wire(theirs), []
        greet(wire, key_of(group.plan), lambda: greeting(1, "p-1", node="node1"), HANG_S)
        wait_for(lambda: said.extend(wire.read()) or [one for one in said if one["kind"] == "start"])
    group.ends()
    assert "confidential" not in json.dumps(said)


def test_each_pod_takes_the_secrets_of_a_run_from_its_plan(pods):
    script = 'test "$T$MLHPC_SECRET" = confidential'
    group = pods(both(script, variables={"T": "confi"}, secret="dential"), pods=2)
    group.start()
    assert (group.ends(), group.kinds()) == ({0: 0, 1: 0}, [(RUN, "started"), (RUN, "end")])


def test_an_agent_that_is_killed_before_a_run_is_reported_in_every_run_and_the_others_end(pods):
    group = pods(both("true"), both("true", NEXT), pods=4, MLHPC_MEET_S="600")
    group.start(0, 1, 3)
    # The first has counted them once they have found it.
    wait_for(lambda: all("found the first pod" in group.errors(rank) for rank in (1, 3)))
    group.agents[1].kill()
    assert group.ends() == {0: 71, 1: -signal.SIGKILL, 3: 71}
    text = group.failure()["text"]
    assert text.startswith("of 4 pods these did not come to p-0 (node node0) within 600 s: 2")
    assert f"{P1} came and went: " in text
    assert group.kinds()[-1] == (NEXT, "end")


def test_an_agent_that_is_killed_in_a_run_is_a_node_failure_that_names_pod_and_node(running):
    group = running(both(RUNS), both("true", NEXT), run_plan("run-0003"))
    group.agents[1].kill()
    assert group.agents[0].wait(HANG_S) == 0
    assert group.failure()["text"].startswith(f"pod {P1} was lost during the run: ")
    failed = [(body["outcome"], body["nodes"]) for body in group.bodies("failed")]
    assert failed == [("node_failure", ["node1"])] * 2  # the second run as well; the third needs no other pod
    assert group.kinds()[-2:] == [("run-0003", "started"), ("run-0003", "end")]


def test_a_pod_that_is_deleted_says_so(running):
    group = running(both(RUNS))
    group.agents[1].send_signal(signal.SIGTERM)
    assert group.ends() == {0: 0, 1: 143}
    assert f"pod {P1} was lost during the run: its pod is being ended (SIGTERM)" in group.failure()["text"]
    assert group.failure()["nodes"] == []  # no node has done that
    assert group.log(1).endswith(b'{"pod":"over","exit":143}\n')


@pytest.mark.parametrize(
    ("end", "codes"), [(signal.SIGKILL, {0: -9, 1: 69}), (signal.SIGTERM, {0: 143, 1: 143})]
)
def test_the_other_pods_end_with_the_first(running, end, codes):
    group = running(both("trap '' TERM; echo $RANK runs; sleep 600; sleep 600"))
    group.agents[0].send_signal(end)
    assert group.ends() == codes
    gone = f"pod 1 ({P1}): the first pod's agent is gone: "
    assert (gone in group.errors(1)) is (end == signal.SIGKILL)


def test_sigterm_before_the_others_have_come_ends_the_first(pods, connect):
    group = pods(both("true"), pods=2)
    group.start(0)
    wait_for(lambda: connect(group.port))
    group.agents[0].send_signal(signal.SIGTERM)
    assert group.ends() == {0: 143}


def test_an_agent_that_stands_still_is_lost_after_a_while(running):
    group = running(both(RUNS, time_limit_s=600.0), MLHPC_SILENCE_S="6")
    group.agents[1].send_signal(signal.SIGSTOP)
    try:
        assert group.agents[0].wait(HANG_S) == 0
    finally:
        group.agents[1].send_signal(signal.SIGCONT)
    failure = group.failure()
    assert (failure["outcome"], "no sign of life for 6 s" in failure["text"]) == ("node_failure", True)
    assert group.agents[1].wait(HANG_S) == 69


def test_a_port_that_is_taken_is_reported_with_what_to_do(pods):
    group = pods(both("true"), pods=2)
    with socket.create_server(("", group.port)):
        group.start(0)
        assert group.ends() == {0: 71}
    assert group.failure()["outcome"] == "launch_failed"
    assert re.search(r"at port \d+: .*; set MLHPC_PORT to a free one", group.failure()["text"])


def test_podrun_says_what_it_does_not_understand():
    with pytest.raises(ValueError, match="not understood"):
        share_of(["run", "2", "1", "--wrong", "--", "true"])
    assert share_of(["run", "2", "3", "--ranks", "--", "a", "--", "b"]).argv == ("a", "--", "b")


def test_what_podrun_says_is_understood_behind_an_unfinished_line():
    words = LauncherOutput()
    death = json.dumps({"death": {"task": 3, "pod": P1, "exit": -9, "memory": True}})
    for line in (
        f"50%| half a bar mlhpc-podrun: {death}",
        'mlhpc-podrun: {"lost": "p-2", "why": "gone"}',
        'mlhpc-podrun: {"death": 7}',
        "mlhpc-podrun: {nonsense}",
        'mlhpc-podrun: {"lost": "p-3", "why": "silent", "node": "n3"}',
    ):
        words.feed(f"{line}\n".encode())
    assert [(one.task, one.node, one.exit, one.out_of_memory) for one in words.deaths] == [(3, P1, -9, True)]
    assert words.lost_pods == [("p-2", "gone", ""), ("p-3", "silent", "n3")]
    assert words.out_of_memory
