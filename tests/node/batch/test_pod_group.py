"""Several pods' agents and their runs: together, in order, and every way in which a run may fail."""

import os
import re
import signal
from pathlib import Path

import pytest
from pods import bash, both, run_plan
from running_suites import wait_for

pytestmark = pytest.mark.servers

P1 = "p-1 (node node1)"

#: A little more than is stored of what a program prints, 16 MiB.
FLOOD = 17_000_000

#: Rank 0 appends and ends; rank 1 appends when rank 0 is gone.
LATE = 'if [ $RANK = 0 ]; then echo $$ > {mark}.pid; else while [ ! -s {mark}.pid ] || kill -0 $(cat {mark}.pid); do sleep 0.1; done; fi 2>/dev/null; echo "first $RANK" >> {mark}'

#: Rank 0 ends badly when rank 1 has begun, which SIGTERM does not end.
HERE = "if [ $RANK = 1 ]; then trap '' TERM; touch {mark}.other; sleep 600; fi; while [ ! -e {mark}.other ]; do sleep 0.1; done; exit 5"


def fails(how, name):
    """Return a run whose rank on the other pod fails, while the first goes on for ever."""
    return both(f"[ $RANK = 0 ] && exec sleep 600; echo my last word; {how}", name)


@pytest.fixture(scope="module")
def group(module_pods, tmp_path_factory):
    """Return two pods that have done many runs, one after the other."""
    folder = tmp_path_factory.mktemp("shared")
    mark = folder / "marks"
    program = folder / "program"
    program.write_text("no program")
    made = module_pods(
        both("echo $RANK $LOCAL_RANK $WORLD_SIZE $MLHPC_NODE $MASTER_ADDR $OMP_NUM_THREADS $PWD", "places", ranks=4),
        both(LATE.format(mark=mark), "late"),
        both(f'echo "second $RANK" >> {mark}', "second"),
        bash("echo $MLHPC_NODE", "alone"),
        both("for i in $(seq 2000); do echo $RANK-$RANK-$RANK-$RANK; done", "mixed"),
        both("echo $RANK:$DEVICES:$ASKED", "devices", variables={"ASKED": "yes"}),
        fails("exit 3", "exit"),
        fails("kill -9 $$", "kill"),
        fails("kill -SEGV $$", "segv"),
        both(HERE.format(mark=mark), "here"),
        run_plan("no-program", nodes=2, ranks=2, launcher="podrun", argv=(str(program),)),
        both("sleep 600", "limit", time_limit_s=0.5),
        both("echo $RANK runs; exec sleep 600", "podrun"),
        both(f"[ $RANK = 0 ] || yes {'x' * 98} | head -c {FLOOD}", "flood"),
        pods=2,
    )  # fmt: skip
    made.start(0, DEVICES="here")
    made.start(1, DEVICES="there", RANK="9", WORLD_SIZE="10", MASTER_ADDR="of an operator")
    wait_for(lambda: b"1 runs" in made.log(1) and b"0 runs" in made.log(0))
    os.kill(podrun_of(made.agents[0].pid), signal.SIGKILL)
    made.codes = made.ends()
    made.marks = mark.read_text().splitlines()
    return made


def podrun_of(agent):
    """Return the process of podrun that an agent has started."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if b"pytest_mlhpc.node.batch.podrun" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("there is no podrun")


def test_all_runs_come_to_their_end_in_order(group):
    assert group.codes == {0: 0, 1: 0}
    runs = [run.run_id for run in group.plan.runs]
    assert [run for run, kind in group.kinds() if kind == "end"] == runs
    assert [run for run, kind in group.kinds() if kind == "started"] == runs
    failed = [run for run, kind in group.kinds() if kind == "failed"]
    assert failed == ["exit", "kill", "segv", "here", "no-program", "limit", "podrun"]
    assert group.messages(1) == []


def test_each_pod_starts_its_share_and_knows_its_place(group):
    places = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert sorted(group.output("places", "launcher").read_text().splitlines()) == [
        f"{rank} {local} 4 p-{pod} (node node{pod}) 127.0.0.1 1 {group.work(pod) / 'places'}"
        for rank, local, pod in places
    ]


def test_the_next_run_begins_when_the_former_has_ended_on_all_pods(group):
    assert group.marks[:2] == ["first 0", "first 1"]
    assert sorted(group.marks[2:]) == ["second 0", "second 1"]


def test_a_run_of_one_node_is_done_on_the_first_pod_alone(group):
    assert group.output("alone", "rank0").read_text() == "p-0 (node node0)\n"


def test_every_pod_shows_what_its_own_processes_print(group):
    assert b"[devices pod1 0] 1: 1:there:yes\n" in group.log(1)
    assert group.output("devices", "pod1", 1).read_text() == "1: 1:there:yes\n"  # with its rank before it


def test_lines_of_several_pods_do_not_mix(group):
    lines = group.output("mixed", "launcher").read_text().splitlines()
    assert sorted(set(lines)) == ["0-0-0-0", "1-1-1-1"]
    assert len(lines) == 4000


def test_variables_of_a_pod_stay_its_own_and_those_of_the_run_reach_it(group):
    lines = sorted(group.output("devices", "launcher").read_text().splitlines())
    assert lines == ["0:here:yes", "1:there:yes"]


@pytest.mark.parametrize(("name", "pod"), [("launcher", 0), ("pod1", 1)])
def test_a_flood_from_another_pod_is_cut_and_does_not_stop_it(group, name, pod):
    stored = group.output("flood", name, pod).read_bytes()
    # Labels of three bytes a line count as well.
    assert re.search(rb"\n\[73\d{4} more bytes were dropped\]\n$", stored), stored[-100:]


@pytest.mark.parametrize(
    ("run", "outcome", "start", "end"),
    [
        ("exit", "worker_exit", f"rank 1 on {P1} ended with exit code 3", "my last word"),
        ("kill", "worker_killed", f"rank 1 on {P1} was killed by SIGKILL", "my last word"),
        ("segv", "worker_killed", f"rank 1 on {P1} was killed by SIGSEGV", "my last word"),
        ("here", "worker_exit", "rank 0 on p-0 (node node0) ended with exit code 5", ""),
        ("no-program", "command_not_found", "", ""),
        ("limit", "time_limit", "", ""),
        ("podrun", "worker_killed", "", ""),
    ],
)
def test_a_run_that_fails_on_one_pod_ends_on_all_and_names_the_cause(group, run, outcome, start, end):
    failure = group.failure(run)
    assert failure["outcome"] == outcome
    assert re.fullmatch(f"{re.escape(start)}.*{end}", failure["text"], re.DOTALL)
