"""The agent of an allocation of one pod: runs, output, ends, and every way in which its output is not taken."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from pods import Pods, messages_of, run_plan

from pytest_mlhpc.batch.plan import MetricPattern
from pytest_mlhpc.batch.pod_place import place_of
from pytest_mlhpc.results.lines import Fault

pytestmark = pytest.mark.servers

RUN = "run-0001"

#: What is looked for in a program's output; that it is, makes its output a part of its result.
RATE = {"rate": MetricPattern("steps/s", "higher", r"rate: (\S+)")}


def bash(script: str, name: str = RUN, **changes):
    return run_plan(name, argv=("bash", "-c", script), **changes)


@pytest.fixture
def pods(tmp_path):
    made: list[Pods] = []

    def make(*runs, **changes) -> Pods:
        made.append(Pods(tmp_path, *runs, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_runs_are_done_in_order_and_their_output_is_rebuilt(pods, tmp_path):
    group = pods(bash("echo one; echo two >&2; exec 2>&-"), bash("printf 'no newline'", "run-0002"))
    group.start()
    assert group.ends() == {0: 0}
    assert group.told() == [
        (RUN, "started"),
        (RUN, "end"),
        ("run-0002", "started"),
        ("run-0002", "end"),
    ]
    assert sorted((tmp_path / "controller" / RUN / "rank0.log").read_text().split()) == ["one", "two"]
    assert (tmp_path / "controller" / "run-0002" / "rank0.log").read_text() == "no newline"


def test_a_program_that_fails_is_a_failure_and_the_agent_has_done_its_work(pods):
    group = pods(bash("echo the last word; exit 3"), bash("true", "run-0002"))
    group.start()
    assert group.ends() == {0: 0}
    failure = group.failure()
    assert failure["outcome"] == "worker_exit"
    assert failure["text"] == "rank 0 ended with exit code 3; its last lines:\nthe last word"
    assert failure["log"] == str(group.folder / "controller" / RUN / "rank0.log")
    assert group.told()[-1] == ("run-0002", "end")


def test_a_program_that_does_not_exist_is_named(pods):
    group = pods(run_plan(argv=("/no/such/program",)))
    group.start()
    assert group.ends() == {0: 0}
    assert group.failure()["outcome"] == "command_not_found"
    assert "/no/such/program" in group.failure()["text"]


def test_the_log_says_at_its_end_what_it_has_said_before(pods):
    group = pods(bash("echo hello; exit 3"))
    group.start()
    group.ends()
    lines = group.log().splitlines(keepends=True)
    tail = lines[-5:]
    assert [item.kind for item in messages_of(group.plan, b"".join(tail))] == ["started", "failed", "end"]
    assert tail[-1] == b'\x1e{"pod":"over","exit":0}\n'


def test_short_outputs_before_a_long_one_are_found_in_a_log_whose_beginning_is_gone(pods):
    first = bash("echo rate: 4", metrics=RATE)
    loud = bash("yes 0123456789 | head -c 3000000; echo rate: 4", "run-0002", metrics=RATE)
    group = pods(first, loud, bash("echo rate: 4", "run-0003", metrics=RATE))
    group.start()
    assert group.ends() == {0: 0}
    rotated = group.log()[1_000_000:]
    found = [message for message in messages_of(group.plan, rotated) if message.kind in {"failed", "end"}]
    assert [(message.run_id, message.kind) for message in found] == [
        (RUN, "end"), ("run-0002", "failed"), ("run-0002", "end"), ("run-0003", "end"),
    ]  # fmt: skip
    assert found[1].body["outcome"] == "truncated_result"
    assert (group.folder / "controller" / RUN / "rank0.log").read_text() == "rate: 4\n"


def test_outputs_of_a_short_log_are_not_repeated(pods):
    group = pods(bash("echo rate: 4"))
    group.start()
    assert group.ends() == {0: 0}
    assert group.log().count(b"] rate: 4\n") == 1


def test_fifty_megabytes_are_cut_at_sixteen_and_the_rest_is_counted(pods, tmp_path):
    group = pods(bash("head -c 50000000 /dev/zero | tr '\\0' 'x' | fold -w 99; echo metric: 5"))
    group.start()
    assert group.ends() == {0: 0}
    assert group.told() == [(RUN, "started"), (RUN, "end")]
    kept = (tmp_path / "controller" / RUN / "rank0.log").read_bytes()
    printed = 50_000_000 + 50_000_000 // 99 + len("metric: 5\n")
    assert kept[16 << 20 :] == f"\n[{printed - (16 << 20)} more bytes were not kept]\n".encode()
    inside = (group.work(0) / RUN / "rank0.log").read_bytes()
    assert hashlib.sha256(kept).digest() == hashlib.sha256(inside).digest()


def test_sigterm_ends_everything_and_says_what_was_printed_so_far(pods):
    group = pods(bash("trap '' TERM; echo I have begun; sleep 300 & sleep 300"))
    group.start()
    group.await_(lambda: b"I have begun" in group.log())
    group.agents[0].send_signal(signal.SIGTERM)
    assert group.ends(30) == {0: 143}
    assert group.log().endswith(b'\x1e{"pod":"over","exit":143}\n')


def test_an_agent_whose_output_nobody_takes_goes_on_and_its_results_wait(pods, tmp_path):
    done = tmp_path / "done"
    group = pods(bash(f"head -c 3000000 /dev/zero | tr '\\0' 'x'; touch {done}"), bash("echo hi", "run-0002"))
    reading, writing = os.pipe()  # holds 64 KiB
    group.start_into(writing)
    os.close(writing)
    group.await_(done.exists)
    group.await_((group.work(0) / "run-0002").exists)
    data = b""
    while piece := os.read(reading, 1 << 16):
        data += piece
    os.close(reading)
    assert group.ends() == {0: 0}, group.words()
    assert [item.kind for item in messages_of(group.plan, data)] == ["started", "end", "started", "end"]
    assert (tmp_path / "controller" / RUN / "rank0.log").stat().st_size == 3_000_000


def test_an_agent_whose_output_is_closed_ends_all_and_says_so(pods):
    group = pods(bash("while sleep 0.1; do echo x; done"), bash("sleep 100", "run-0002"))
    group.plan = replace(group.plan, runs=(replace(group.plan.runs[0], time_limit_s=2.0), group.plan.runs[1]))
    reading, writing = os.pipe()
    group.start_into(writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert group.ends(30) == {0: 74}
    assert "worker lines of the allocation a cannot be written: Broken pipe" in group.words()


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"MLHPC_PODS": "x"}, "MLHPC_PODS='x' is no number"),
        ({"MLHPC_PODS": "2", "MLHPC_POD_RANK": "2"}, "contradict each other"),
        ({"MLHPC_PODS": "2", "MLHPC_POD_RANK": ""}, "MLHPC_POD_RANK is not set, but there are 2 pods"),
        ({"MLHPC_PORT": "70000"}, "MLHPC_PORT=70000 is no port"),
    ],
)
def test_a_manifest_that_tells_nonsense_is_refused(pods, environ, says):
    group = pods(run_plan())
    group.start(0, **environ)
    assert group.ends() == {0: 2}
    assert says in group.words()


def test_a_plan_that_wants_to_hold_nodes_is_refused(pods):
    group = pods(run_plan(workload="nodes", argv=()))
    group.start()
    assert group.ends() == {0: 2}
    assert "a pod cannot hold nodes for a test" in group.words()


def test_the_rank_is_looked_up_where_kubernetes_left_the_reference_to_it(tmp_path):
    plan = Pods(tmp_path, run_plan()).plan
    environ = {"MLHPC_PODS": "4", "MLHPC_POD_RANK": "$(JOB_COMPLETION_INDEX)", "JOB_COMPLETION_INDEX": "3"}
    assert place_of(environ, plan).rank == 3


def test_a_process_that_the_kernel_kills_for_memory_is_told_apart(tmp_path, monkeypatch):
    from pytest_mlhpc.batch.pod_memory import Watch

    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 1\noom_kill 1\n")
    watch = Watch((str(tmp_path / "none"), str(counter)))
    assert not watch.grown()
    counter.write_text("low 0\noom 2\noom_kill 2\n")
    assert watch.grown()


def test_the_agent_needs_nothing_but_its_payload(tmp_path):
    from pytest_mlhpc import payload

    built = payload.build(tmp_path)
    group = Pods(tmp_path, bash("echo bare"))
    group.plan = replace(group.plan, payload_sha256=built.sha256)
    home = tmp_path / "pod0"
    group.write(0)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import runpy; runpy.run_module('pytest_mlhpc.batch.pod', run_name='__main__')"
    argv = [sys.executable, "-I", "-S", "-c", code, str(built.path), str(home / "plan.json")]
    done = subprocess.run(argv, capture_output=True, env=group.environment(0), check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    found = messages_of(group.plan, done.stdout)
    assert not any(isinstance(item, Fault) for item in found)
    assert found[0].body["payload_sha256"] == built.sha256
