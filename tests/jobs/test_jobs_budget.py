import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from queue_world import failure_of, outcome_of
from running_suites import wait_for

from pytest_mlhpc.jobs.budget import (
    RERUNS_PER_JOB,
    Budget,
    BudgetLimit,
    budget_refusal,
    cost_text,
    max_hours,
    parse_limit,
    total_bound,
    upper_bound,
)
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.judge.fence import RERUNS
from pytest_mlhpc.session.preflight import Spending


@pytest.fixture
def job(declare):
    """Make a spec of so many nodes and seconds on an account; its allocation has 60 s more, and 30 s to die."""

    def make(name, *, nodes=1, seconds=3600 - 90, account="acc", judged=("epoch",), scheduler="slurm"):
        spec = declare(node_id=f"t.py::{name}")
        options = {"account": account} if account else {}
        partition = replace(spec.target.partition, scheduler=scheduler, scheduler_options=options)
        target = replace(spec.target, partition=partition)
        return replace(spec, nodes=nodes, time_limit_s=float(seconds), judged=judged, target=target)

    return make


def test_an_attempt_costs_at_most_its_nodes_until_slurm_has_killed_it(job):
    assert max_hours(job("a", nodes=4, seconds=60)) == pytest.approx(4 * (120 + 30) / 3600)
    assert max_hours(job("a", seconds=61)) == pytest.approx((180 + 30) / 3600)  # whole minutes


def test_devices_and_cores_are_counted_by_node(job):
    spec = job("a", nodes=2, seconds=60)
    assert max_hours(spec, "core") == pytest.approx(8 * max_hours(spec))
    assert max_hours(spec, "device") == pytest.approx(max_hours(spec))  # no accelerators: a node is one


def test_the_bound_holds_the_dearest_reruns_that_are_possible(job):
    specs = [job("s", seconds=60), job("l", nodes=4, seconds=60), job("n", nodes=8, judged=())]
    one, four, eight = map(max_hours, specs)
    reruns = [total_bound(specs, most) - (one + four + eight) for most in (0, 2, 10, 99)]
    assert reruns == pytest.approx([0, 2 * four, 8 * four + 2 * one, 8 * four + 8 * one])
    assert RERUNS_PER_JOB == 2 * RERUNS


def test_each_account_is_bound_by_its_own_dearest_reruns(job):
    ours, theirs = job("a", seconds=60), job("b", nodes=2, seconds=60, account="other")
    nobodys = job("c", seconds=60, account="")
    expected = {"sys:acc": ours, "sys:other": theirs, "sys:part (default account)": nobodys}
    bounds = upper_bound([ours, theirs, nobodys], 1)
    assert bounds == pytest.approx({account: 2 * max_hours(spec) for account, spec in expected.items()})


def test_runs_on_this_machine_cost_nobody_anything(job):
    local = [job("a", scheduler="local")]
    assert upper_bound(local, 12) == {}
    assert cost_text(local, 12) == budget_refusal(local, BudgetLimit(0.0)) == ""


def test_the_bound_is_reported_for_each_account(job):
    specs = [job("a", seconds=60), job("b", nodes=2, seconds=60, account="other")]
    assert cost_text(specs, 1) == (
        "this session costs at most 0.0833 node-hours of sys:acc, 0.167 node-hours of sys:other "
        "(2 runs, 1 re-run, all at their time limits)"
    )


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("20nh", BudgetLimit(20, "node")),
        ("0.5 nh", BudgetLimit(0.5, "node")),
        ("8dh", BudgetLimit(8, "device")),
        ("100ch", BudgetLimit(100, "core")),
        ("20 node-hours", BudgetLimit(20, "node")),
        ("1 core-hour", BudgetLimit(1, "core")),
    ],
)
def test_budgets_are_read_short_and_long(text, limit):
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["20", "nh", "-1nh", "20 hours", "1e3nh", "", None, 20])
def test_what_is_no_budget_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write it like '20 node-hours', or short: 20nh"):
        parse_limit(text)


def test_a_session_beyond_its_budget_is_refused_and_the_dearest_tests_are_named(job):
    specs = [job(f"n{nodes}", nodes=nodes, seconds=3600) for nodes in range(1, 8)]
    text = budget_refusal(specs, BudgetLimit(20, "node", "budget of sys:part"))
    assert text.startswith(
        "7 tests may take 28.7 node-hours at their time limits, re-runs aside; the budget is 20 node-hours (budget of "
        "sys:part). The dearest: t.py::n7 7.17, t.py::n6 6.15, t.py::n5 5.12, t.py::n4 4.1"
    )
    assert ", and 2 more. Select fewer" in text
    assert budget_refusal(specs, BudgetLimit(28.8)) == budget_refusal(specs, None) == ""


def test_reruns_stop_when_the_budget_is_used_up_or_promised():
    budget = Budget(BudgetLimit(10))
    budget.promise("first", 6)
    assert [budget.allows(["a"], 3), budget.allows(["b"], 2)] == [True, False]
    budget.settle("first", 2)  # it was shorter than its limit
    assert budget.left == 5
    assert [budget.allows(["b", "c"], 3), budget.allows(["b", "c"], 2.5)] == [False, True]
    budget.settle("b", 2)
    budget.settle("c", 3)
    budget.give_back(["a", "unknown"])  # never ran
    assert (budget.used, budget.left) == (7, 3)
    why = "3 node-hours of 10 node-hours (mlhpc_budget) are left"
    assert budget.refused_text(4) == f"a re-run of at most 4 node-hours does not fit: {why}"


def test_without_a_limit_all_reruns_are_allowed():
    assert (Budget(None).allows(["a"], 1e9), Budget(None).refused_text(1)) == (True, "")


def test_attempts_without_a_promise_cost_what_they_use_and_give_back_nothing_of_others():
    budget = Budget(BudgetLimit(10))
    budget.promise(("j1", 0), 1)
    budget.promise(("j2", 0), 1)
    for number in range(3):  # an earlier session submitted the re-runs of j1
        budget.settle(("j1", number), 0.5)
    assert budget.left == 10 - 1.5 - 1  # j2's hour is held back still


def test_what_is_settled_twice_is_booked_once():
    budget = Budget(BudgetLimit(10))
    budget.promise("a", 1)
    for _ in range(2):
        budget.settle("a", 0.5)
    assert (budget.used, budget.left) == (0.5, 9.5)


@pytest.fixture
def spending():
    """Make what a session with a budget of so many node-hours may spend on jobs."""
    return lambda hours, *jobs: Spending(jobs, SimpleNamespace(budget=f"{hours}nh", reruns=99))


def test_a_session_gives_back_what_a_job_did_not_need_and_books_what_was_lost(job, spending):
    a, b = job("a"), job("b")
    one = max_hours(a)
    money = spending(6 * one, a, b)
    assert money.refused(a, [1, 2, 3, 4]) == ""
    assert "does not fit: 0 node-hours of" in money.refused(b, [1])
    for run, used in (("run id of one that a node took", one / 2), (0, one), (1, one)):
        money.settle(a, run, used)
    money.over(a)
    money.over(a)
    assert (money.refused(b, [1, 2]), "does not fit" in money.refused(b, [3])) == ("", True)
    money.over(b)  # cancelled before it ran
    assert money.refused(a, [5, 6, 7]) == ""


@pytest.mark.parametrize("name", ["b", "big"], ids=["cancelled before it ran", "refused"])
def test_a_job_that_never_ran_leaves_its_hours_to_the_reruns_of_others(job, spending, start_queue, name):
    kept, unwanted = job("a"), replace(job("b"), name=name)
    money = spending(round(2.1 * max_hours(kept), 3), kept, unwanted)
    assert "does not fit" in money.refused(kept, [1])
    queue = start_queue(2, unjudged=money.ended)
    (ended,) = queue.add(unwanted)
    if name == "b":
        queue.next()
        queue.driver.cancel([ended], "its test is over")
    outcome_of(ended)
    queue.close()
    assert queue.driver.crash == money.refused(kept, [1]) == ""


@pytest.mark.parametrize("how", ["its test is over", "the session ends"])
def test_what_a_cancelled_job_had_used_is_booked_and_only_the_rest_given_back(
    job, spending, start_queue, how
):
    kept, unwanted = job("a"), job("b", nodes=2)
    one = max_hours(kept)
    money = spending(round(3.1 * one, 3), kept, unwanted)
    queue = start_queue(2, unjudged=money.ended)
    (runs,) = queue.add(unwanted)
    an_hour_ago = time.time_ns() - int(one * 3600e9)
    queue.change(queue.next(), JobState.RUNNING, since_ns=an_hour_ago)
    wait_for(lambda: runs.state is JobState.RUNNING)
    if how == "its test is over":
        queue.driver.cancel([runs], how)
    queue.close()
    assert queue.driver.crash == ""
    assert failure_of(runs).outcome == "cancelled"
    assert money._session.used == pytest.approx(2 * one, rel=0.1)
    assert "does not fit" in money.refused(kept, [1])


def test_what_one_budget_refuses_another_does_not_hold_back(job, spending):
    a = job("a")
    small = replace(a, target=replace(a.target, partition=replace(a.target.partition, budget="2 node-hours")))
    money = spending(10, small)
    before = money._session.left
    assert "systems.yaml: sys:part: budget" in money.refused(small, [2, 3])
    assert money._session.left == before


def test_threads_cannot_promise_the_same_hours_twice():
    budget = Budget(BudgetLimit(500))

    def ask(thread):
        return sum(budget.allows([(thread, number)], 1) for number in range(1000))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(ask, range(4))) == 500
