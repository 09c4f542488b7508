"""The agent of an allocation of one pod: runs, output, ends, and every way in which its output is not taken."""

import hashlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from pods import Pods, bash, messages_of, run_plan
from running_suites import wait_for

from pytest_mlhpc.node.batch import pod
from pytest_mlhpc.node.batch.pod_hub import place_of
from pytest_mlhpc.node.protocol.lines import Fault
from pytest_mlhpc.node.protocol.plan import MetricPattern
from pytest_mlhpc.provision import payload

RUN, NEXT = "run-0001", "run-0002"

#: What is looked for in a program's output; that it is, makes its output a part of its result.
RATE = {"rate": MetricPattern("steps/s", "higher", r"rate: (\S+)")}

#: More than the 16 MiB that are stored of what a program prints.
FLOOD = 17_000_000


@pytest.fixture(scope="module")
def group(module_pods):
    """Return a pod that has done many runs, one after the other."""
    made = module_pods(
        bash("echo one; echo two >&2; exec 2>&-", "order"),
        bash("printf 'no newline'", "printf"),
        bash("echo the last word; exit 3", "exit"),
        run_plan("no-program", argv=("/no/such/program",)),
        bash(f"yes {'x' * 98} | head -c {FLOOD}; echo rate: 5", "flood"),
        bash("echo rate: 4", "short", metrics=RATE),
        bash("yes 0123456789 | head -c 3000000; echo rate: 4", "loud", metrics=RATE),
        bash("echo rate: 6", "end", metrics=RATE),
    )
    made.start()
    assert made.ends() == {0: 0}
    return made


@pytest.mark.servers
def test_runs_are_done_in_order_whatever_becomes_of_each(group):
    failed = {"exit", "no-program"}
    assert group.kinds() == [
        (run.run_id, kind)
        for run in group.plan.runs
        for kind in ("started", *(["failed"] if run.run_id in failed else []), "end")
    ]


@pytest.mark.servers
def test_output_is_rebuilt(group):
    printed = [group.output(run, "rank0").read_text() for run in ("printf", "short")]
    assert printed == ["no newline", "rate: 4\n"]
    assert sorted(group.output("order", "rank0").read_text().split()) == ["one", "two"]


@pytest.mark.servers
def test_a_program_that_fails_is_a_failure_and_the_agent_has_done_its_work(group):
    text = "rank 0 ended with exit code 3; its last lines:\nthe last word"
    failure = {"outcome": "worker_exit", "text": text, "log": str(group.output("exit", "rank0"))}
    assert group.failure("exit").items() >= failure.items()


@pytest.mark.servers
def test_a_program_that_does_not_exist_is_named(group):
    assert group.failure("no-program")["outcome"] == "command_not_found"
    assert "/no/such/program" in group.failure("no-program")["text"]


@pytest.mark.servers
def test_what_is_printed_beyond_a_limit_is_cut_and_counted(group):
    stored = group.output("flood", "rank0").read_bytes()
    printed = FLOOD + len("rate: 5\n")
    assert stored[16 << 20 :] == f"\n[{printed - (16 << 20)} more bytes were dropped]\n".encode()
    inside = (group.work(0) / "flood" / "rank0.log").read_bytes()
    assert hashlib.sha256(stored).digest() == hashlib.sha256(inside).digest()


@pytest.mark.servers
def test_short_outputs_before_a_long_one_are_found_in_a_log_whose_beginning_is_gone(group, tmp_path):
    plan = replace(group.plan, directory=str(tmp_path / "controller"))
    rotated = messages_of(plan, group.log()[group.log().index(b"0123456789") + 1_000_000 :])
    assert [(item.run_id, item.kind) for item in rotated if item.run_id and item.kind in {"failed", "end"}][-4:] == [
        ("short", "end"), ("loud", "failed"), ("loud", "end"), ("end", "end"),
    ]  # fmt: skip
    (cut,) = (item for item in rotated if (item.run_id, item.kind) == ("loud", "failed"))
    assert cut.body["outcome"] == "truncated_result"
    assert (tmp_path / "controller" / "short" / "rank0.log").read_text() == "rate: 4\n"


@pytest.mark.servers
def test_a_short_log_says_at_its_end_what_it_has_said_before_but_no_output_twice(pods):
    group = pods(bash("echo rate: 4; exit 3"))
    group.start()
    assert group.ends() == {0: 0}
    tail = group.log().splitlines(keepends=True)[-5:]
    assert [item.kind for item in messages_of(group.plan, b"".join(tail))] == ["started", "failed", "end"]
    assert tail[-1] == b'\x1e{"pod":"over","exit":0}\n'
    assert group.log().count(b"] rate: 4\n") == 1


@pytest.mark.servers
def test_sigterm_ends_everything_and_says_what_was_printed_so_far(pods):
    group = pods(bash("trap '' TERM; echo I have begun; sleep 600 & sleep 600"))
    group.start()
    wait_for(lambda: b"I have begun" in group.log())
    group.agents[0].send_signal(signal.SIGTERM)
    assert group.ends() == {0: 143}
    assert group.log().endswith(b'\x1e{"pod":"over","exit":143}\n')


@pytest.mark.servers
def test_an_agent_whose_output_nobody_takes_goes_on_and_its_results_wait(pods, tmp_path):
    done = tmp_path / "done"
    group = pods(bash(f"head -c 3000000 /dev/zero | tr '\\0' 'x'; touch {done}"), bash("echo hi", NEXT))
    reading, writing = os.pipe()  # holds 64 KiB
    group.start_into(writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        wait_for(done.exists)
        wait_for((group.work(0) / NEXT).exists)
        data = output.read()
    assert group.ends() == {0: 0}, group.errors()
    assert [item.kind for item in messages_of(group.plan, data)] == ["started", "end", "started", "end"]
    assert (tmp_path / "controller" / RUN / "rank0.log").stat().st_size == 3_000_000


@pytest.mark.servers
def test_an_agent_whose_output_is_closed_ends_all_and_says_so(pods):
    group = pods(bash("while sleep 0.1; do echo x; done", time_limit_s=1.0), bash("sleep 600", NEXT))
    reading, writing = os.pipe()
    group.start_into(writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert group.ends() == {0: 74}
    assert "worker lines of the allocation a cannot be written: Broken pipe" in group.errors()


@pytest.mark.parametrize(
    ("run", "environ", "says"),
    [
        ({}, {"MLHPC_PODS": "x"}, "MLHPC_PODS='x' is no number"),
        ({}, {"MLHPC_PODS": "2", "MLHPC_POD_RANK": "2"}, "contradict each other"),
        ({}, {"MLHPC_PODS": "2", "MLHPC_POD_RANK": ""}, "MLHPC_POD_RANK is not set, but there are 2 pods"),
        ({}, {"MLHPC_PORT": "70000"}, "MLHPC_PORT=70000 is no port"),
        ({"workload": "nodes", "argv": ()}, {}, "a pod cannot hold nodes for a test"),
    ],
)
def test_what_an_agent_cannot_do_is_refused(tmp_path, capfd, run, environ, says):
    group = Pods(tmp_path, run_plan(**run))
    path = group.write(0) / "plan.json"
    assert pod.main([str(path)], group.environment(0, **environ)) == 2
    assert says in capfd.readouterr().err


def test_the_rank_is_looked_up_where_kubernetes_left_the_reference_to_it(tmp_path):
    plan = Pods(tmp_path, run_plan()).plan
    environ = {"MLHPC_PODS": "4", "MLHPC_POD_RANK": "$(JOB_COMPLETION_INDEX)", "JOB_COMPLETION_INDEX": "3"}
    assert place_of(environ, plan).rank == 3


@pytest.mark.servers
def test_the_agent_needs_nothing_but_its_payload(tmp_path):
    built = payload.build(tmp_path)
    group = Pods(tmp_path, bash("echo bare"))
    group.plan = replace(group.plan, payload_sha256=built.sha256)
    run = "import runpy; runpy.run_module('pytest_mlhpc.node.batch.pod', run_name='__main__')"
    code = f"import sys; sys.path.insert(0, sys.argv.pop(1)); {run}"
    argv = [sys.executable, "-I", "-S", "-c", code, str(built.path), str(group.write(0) / "plan.json")]
    done = subprocess.run(argv, capture_output=True, env=group.environment(0), check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    found = messages_of(group.plan, done.stdout)
    assert not any(isinstance(item, Fault) for item in found)
    assert found[0].body["payload_sha256"] == built.sha256
