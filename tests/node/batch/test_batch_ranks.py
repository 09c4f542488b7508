"""What ranks say and how they end: only the first trouble counts."""

import pytest

from pytest_mlhpc.node.batch.ranks import LAUNCHER, LauncherOutput, RankBook
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE


def book(ranks=2):
    run = RunPlan("run-1", "nonce", 0, "resnet50", {}, 1, ranks, 1, "cpu", "torchrun", 5.0, 10, 0)
    made = RankBook(run)
    for number in range(ranks):
        assert made.greet(hello(number), 100 + number)
    return made


def hello(rank):
    return {"rank": rank, "purpose": "messages"}


def trouble(made):
    assert made.trouble is not None
    assert made.trouble.outcome in FAILURES
    return made.trouble.outcome, made.trouble.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank": 2}, ("foreign_result", "rank 2 connected, but the run has 2 ranks")),
        ({"rank": 1}, ("duplicate_result", "two processes say that they are rank 1")),
    ],
    ids=["beyond the plan", "there twice"],
)
def test_a_process_that_is_no_rank_of_the_run_is_not_greeted(changes, expected):
    made = book()
    assert not made.greet({**hello(0), **changes}, 1)
    assert trouble(made) == expected


def test_progress_is_the_slowest_ranks_step_and_all_ranks_samples_once_a_second():
    made, reported = book(), []
    for rank, step, rate, when in ((0, 4, 2.0, 100.0), (1, 3, 3.0, 100.5), (0, 5, 2.0, 101.5)):
        reported.append(made.say(rank, "progress", {"step": step, "steps": 10, "samples_per_s": rate}, when))
    assert (reported[0] is None, reported[1]) == (False, None)
    assert reported[2] == ("progress", {"step": 3, "steps": 10, "samples_per_s": 5.0})


def test_nonsense_as_progress_is_no_failure():
    made = book()
    for rate in (float("nan"), float("inf"), "fast", None):
        assert made.say(0, "progress", {"step": 1, "steps": 2, "samples_per_s": rate}, 0.0) is None
    assert made.trouble is None


#: What a rank says whose node has two processors, of which a busy loop has one.
CROWDED = {"busy_cores": 2.0, "own_cores": 0.5, "cores": 2.0, "elapsed_s": 7.0, "usual_s": 1.0}


def late(made, rank, figures=CROWDED):
    body = {"step": 3, "steps": 10, "samples_per_s": 1.0, "late": figures}
    made.say(rank, "progress", body, 0.0)
    return made.trouble


def test_a_run_ends_as_infrastructure_error_once_all_ranks_of_a_crowded_node_are_late():
    made = book()
    assert late(made, 0) is None
    ended = late(made, 1)
    assert ended.outcome in INFRASTRUCTURE
    text = (
        "on this node other programs used 1 cores beside the run's 1; steps that usually take 1 s were not over after 7 s, so the "
        "run was ended and nothing of it counts; run it again when the node is idle, or have it for this run alone"
    )
    assert (ended.outcome, ended.text) == ("machine_busy", text)


def test_ranks_of_another_node_are_not_waited_for():
    made = RankBook(book().run, ["node1", "node2"])
    assert all(made.greet(hello(number), 100 + number) for number in range(2))
    assert late(made, 1).text.startswith("on node2 other programs used 1.5 cores")


def test_a_rank_that_has_caught_up_is_late_no_more():
    made = book()
    late(made, 0)
    made.say(0, "progress", {"step": 4, "steps": 10, "samples_per_s": 1.0}, 0.0)
    assert late(made, 1) is None


@pytest.mark.parametrize(
    "figures", ["late", [1], {"busy_cores": "2"}, {**CROWDED, "cores": 10**400}, {**CROWDED, "own_cores": float("nan")}, {}]
)  # fmt: skip
def test_nonsense_as_figures_ends_no_run(figures):
    assert late(book(1), 0, figures) is None


def test_torchruns_table_names_the_rank():
    made = book()
    table = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)\n  error_file: <N/A>\n"
    made.launcher_ended(1, table, is_rank=False)
    assert trouble(made)[1].startswith("rank 1 was killed by SIGKILL")
    assert made.exits(1) == [1, -9]


def test_a_program_may_print_messages_like_its_launchers_and_succeed():
    made, words = book(), LauncherOutput()
    words.feed(b"srun: error: node1: task 0: Killed\nsrun: error: Node failure on node1\n")
    made.launcher_ended(0, "", is_rank=False, launcher_output=words)
    assert made.trouble is None


@pytest.mark.parametrize(
    ("node", "outcome"), [("node2", "node_failure"), ("node7", "worker_exit")], ids=["its own", "another's"]
)
def test_only_a_node_of_the_run_is_believed_to_have_failed_in_it(node, outcome):
    made, words = RankBook(book().run, ["node1", "node2"]), LauncherOutput()
    words.feed(f"srun: error: Node failure on {node}\n".encode())
    made.launcher_ended(1, "", is_rank=False, launcher_output=words)
    assert made.trouble.outcome == outcome


def test_a_step_that_somebody_else_cancelled_is_an_error_by_that_name():
    made, words = book(), LauncherOutput()
    words.feed(b"slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-25T12:00:00 ***\n")
    made.launcher_ended(143, "", is_rank=False, launcher_output=words)
    assert made.trouble.outcome == "cancelled_outside"


def test_a_launcher_that_fails_with_nothing_known_of_ranks_is_named_itself():
    made = book()
    made.launcher_ended(2, "no idea", is_rank=False)
    assert trouble(made) == ("worker_exit", "the launcher ended with exit code 2")
    assert made.trouble.rank == LAUNCHER


def test_ranks_that_never_came_are_named():
    made = RankBook(book(4).run)
    made.greet(hello(2), 1)
    made.reports()
    assert trouble(made) == ("too_few_ranks", "of 4 ranks these never reported: 0, 1, 3")


def test_a_report_of_another_rank_is_foreign():
    made = book()
    made.say(0, "report", {"rank": "x"}, 0.0)
    assert trouble(made)[0] == "truncated_result"


PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:1234"


def says(made, rank, text):
    made.say(rank, "failed", {"outcome": "worker_exit", "text": text}, 0.0)


def test_who_lost_a_peer_is_not_named_before_the_peer():
    made = book(3)
    says(made, 2, PEER_GONE)
    assert made.trouble is None
    made.ranks[2].exit = 1
    made.ended(2)  # for want of its peer
    made.ranks[0].exit = -9
    made.ended(0)
    text = "rank 0 was killed by SIGKILL (the kernel does that when memory runs out)"
    assert trouble(made) == ("worker_killed", text)


def test_a_report_of_a_lost_peer_counts_where_no_peer_has_ended():
    made = book(3)
    says(made, 2, PEER_GONE)
    says(made, 1, PEER_GONE)
    made.settle()
    assert trouble(made) == ("worker_exit", f"rank 2: {PEER_GONE}")


@pytest.mark.parametrize("first", ["the connection breaks", "a peer says so"])
def test_a_rank_whose_connection_broke_is_named_and_not_a_peer_whose_exit_code_comes_first(first):
    """On a busy machine srun reports that peers ended, and has not heard yet that a rank was killed on another node."""
    made = book(3)
    events = [lambda: made.lost(1, None), lambda: says(made, 0, PEER_GONE)]
    for event in events if first == "the connection breaks" else reversed(events):
        event()
    made.lost(0, None)
    output = LauncherOutput()
    output.feed(b"srun: error: node1: task 0: Exited with exit code 1\n")
    made.launcher_ended(0, "", is_rank=False, launcher_output=output)
    assert trouble(made) == ("worker_exit", "rank 1 ended without a message")


def test_a_rank_that_ran_out_of_memory_is_named_though_srun_names_its_peers_alone():
    made = book(3)
    made.lost(1, None)
    says(made, 0, PEER_GONE)
    output = LauncherOutput()
    output.feed(
        b"slurmstepd-node2: error: Detected 1 oom-kill event(s) in StepId=4.0. Some processes were killed.\n"
    )
    output.feed(b"srun: error: node1: task 0: Exited with exit code 1\n")
    made.launcher_ended(0, "", is_rank=False, launcher_output=output)
    assert trouble(made) == ("out_of_memory", "rank 1 used more memory than it may and was killed")


def test_another_error_is_named_at_once():
    made = book(3)
    says(made, 2, PEER_GONE)
    says(made, 1, "RuntimeError: the device caught fire")
    assert trouble(made) == ("worker_exit", "rank 1: RuntimeError: the device caught fire")


def test_a_launcher_that_only_says_that_it_failed_does_not_hide_the_ranks_report():
    made = book(3)
    says(made, 2, PEER_GONE)
    made.launcher_ended(1, "", is_rank=False)
    assert trouble(made) == ("worker_exit", f"rank 2: {PEER_GONE}")


@pytest.mark.parametrize(("killed", "outcome"), [(True, "out_of_memory"), (False, "worker_killed")])
def test_what_is_killed_while_the_kernel_kills_for_memory_ran_out_of_it(killed, outcome):
    made = book()
    made.memory = lambda: killed
    made.ranks[1].exit = -9
    made.ended(1)
    assert trouble(made)[0] == outcome


@pytest.mark.parametrize(("killed", "outcome"), [(True, "out_of_memory"), (False, "worker_killed")])
def test_a_launcher_that_is_killed_while_the_kernel_kills_for_memory_ran_out_of_it(killed, outcome):
    made = RankBook(book().run)
    made.memory = lambda: killed
    made.launcher_ended(-9, "", is_rank=True)
    assert trouble(made)[0] == outcome


@pytest.mark.parametrize(("at_limit", "outcome"), [(True, "out_of_memory"), (False, "worker_killed")])
def test_a_kill_of_which_slurm_does_not_say_why_is_one_for_memory_where_the_job_met_its_limit(
    at_limit, outcome
):
    made, words = book(), LauncherOutput()
    made.memory = lambda: at_limit
    words.feed(b"srun: error: node1: task 0: Killed\n")
    made.launcher_ended(137, "", is_rank=False, launcher_output=words)
    assert trouble(made)[0] == outcome
