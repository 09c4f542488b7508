"""Reports out of order, repeated, late or missing: an allocation ends once, with the right error."""

import re
import threading

import pytest
from local_allocations import HANG_S
from pod_worlds import CALL, ID, POD, SERVER, pod_of, raises, silent, source

from pytest_mlhpc.errors import NodeFault, ProvisionError
from pytest_mlhpc.jobs.provisioner import LineArrived
from pytest_mlhpc.provision.kubernetes import event_router
from pytest_mlhpc.provision.kubernetes.allocation import DEFER_LAST_S, DEFER_S
from pytest_mlhpc.provision.kubernetes.errors import Forbidden, NotFound, Unauthorized
from pytest_mlhpc.provision.kubernetes.event_router import EventRouter
from pytest_mlhpc.provision.kubernetes.log_follower import LogFailing, LogLine
from pytest_mlhpc.provision.kubernetes.objects import JOB, ObjectRef
from pytest_mlhpc.provision.kubernetes.verdict import LOG_LIMIT_S
from pytest_mlhpc.provision.kubernetes.watch import ListSynced, ObjectChanged, WatchFailing, WatchRecovered

FORBIDDEN = Forbidden(CALL, "may not", status=403)
LOG = ObjectRef(POD, "ns", "x", "pod-1")


@pytest.fixture
def running(world):
    """A pod runs."""
    world.submitted().job()
    world.pod(running=True)
    world.follow(1.0)
    return world


# --- results, and the pod that they came from


@pytest.mark.parametrize(
    ("first", "seconds", "then"),
    [
        pytest.param(
            lambda world: (world.print("started"), world.vanish(running=True)),
            20,
            lambda world: (world.print("end", start=1), world.log_over()),
            id="though its pod was deleted before the last lines came",
        ),
        pytest.param(
            lambda world: world.pod(exit=0),
            60,
            lambda world: world.print("started", "end"),
            id="though its container ended before its log was read",
        ),
        pytest.param(
            lambda world: world.trouble(Unauthorized(CALL, "who are you", status=401)),
            500,
            lambda world: (world.put(WatchRecovered(source(POD))), world.print("started", "end")),
            id="though credentials had to be renewed, for which there is patience",
        ),
        pytest.param(
            lambda world: (world.api.on.update(delete=raises(silent())), world.print("started", "end")),
            30,
            lambda world: world.api.on.clear(),
            id="and is reported after the deletion was taken",
        ),
    ],
)
def test_a_result_counts(running, first, seconds, then):
    first(running)
    assert running.follow(seconds) == []
    then(running)
    end = running.end(5)
    assert (end.error, end.unsure, running.lines()) == (None, False, ["started", "end"])


@pytest.mark.parametrize(
    ("happens", "quiet", "seconds", "outcome", "words"),
    [
        pytest.param(
            lambda world: world.vanish(running=True),
            20,
            200,
            "cancelled_outside",
            "on n1",
            id="a pod that vanishes and whose log never ends",
        ),
        pytest.param(
            lambda world: (world.pod(exit=143, deleting=True), world.log_over()),
            0,
            3,
            "cancelled_outside",
            "",
            id="a pod that ends while somebody deletes it",
        ),
        pytest.param(
            lambda world: (world.pod(exit=0), world.log_over(complete=False, error=silent("nobody there"))),
            0,
            3,
            "truncated_result",
            "could not be read.*nobody there",
            id="a log that cannot be read",
        ),
        pytest.param(
            lambda world: (
                world.api.on.update(get=raises(NotFound(CALL, "no node", status=404))),
                world.vanish(running=True),
                world.log_over(),
            ),
            0,
            3,
            "node_failure",
            "the node n1 is no longer in the cluster",
            id="a pod that is gone with its node",
        ),
        pytest.param(
            lambda world: world.put(LogFailing(LOG, "worker", FORBIDDEN, 0.0)),
            0,
            2,
            "forbidden",
            "",
            id="forbidden logs are reported at once",
        ),
        pytest.param(
            lambda world: world.trouble(FORBIDDEN),
            60,
            60,
            "forbidden",
            "",
            id="a right that was lost is reported after a while",
        ),
    ],
)
def test_the_cause_of_an_allocations_end_is_reported(running, happens, quiet, seconds, *, outcome, words):
    happens(running)
    assert running.follow(quiet) == []
    error = running.end(seconds).error
    assert error.outcome == outcome
    assert re.search(words, str(error))


@pytest.mark.parametrize("seconds", [3, DEFER_LAST_S - 2])
def test_memory_that_ran_out_explains_a_run_that_seemed_to_be_killed(running, seconds):
    running.print("started", "failed", "end")
    assert running.follow(seconds) == []
    running.pod(exit=137, why="OOMKilled")
    running.follow()
    (failed,) = [one.message for one in running.all_of(LineArrived) if one.message.kind == "failed"]
    assert failed.body["outcome"] == "out_of_memory"


@pytest.mark.parametrize(("last", "limit_s"), [((), DEFER_S), (("end",), DEFER_LAST_S)])
def test_a_failure_that_no_containers_end_explains_is_reported_after_a_while(running, last, limit_s):
    running.print("started", "failed", *last)
    running.follow(limit_s - 2)
    assert "failed" not in running.lines()
    running.follow(4)
    assert "failed" in running.lines()


def test_a_log_that_goes_on_to_come_is_waited_for_however_long_that_takes(running):
    running.print("started")
    running.pod(exit=0)
    for _ in range(3):
        assert running.follow(LOG_LIMIT_S - 20) == []
        running.put(LogLine(LOG, "worker", b"other"))
    error = running.end(LOG_LIMIT_S + 3).error
    assert (error.outcome, "nothing of it has come for 120 s" in str(error)) == ("truncated_result", True)


# --- pods that controllers make anew


def test_a_pod_that_is_made_anew_is_never_listened_to(running):
    running.print("started")
    running.pod(unready=True, deleting=True)
    running.pod("pod-2", "-y", running=True, node="n2", born="2026-01-02T00:00:00Z")
    running.print("started", "end", uid="pod-2")
    error = running.end().error
    assert (type(error), error.nodes) == (NodeFault, ("n1",))
    assert running.lines() == ["started"]


def test_the_first_of_two_pods_is_known_by_its_creation_time_not_by_the_order_of_a_list(world):
    world.submitted()
    world.pod("pod-2", "-a", running=True, node="n2", born="2026-01-02T00:00:00Z")
    world.pod("pod-1", "-b", unready=True, deleting=True)
    world.print("started", uid="pod-2")
    world.follow()
    assert world.lines() == []
    assert [one.close.called for one in world.followers if one.ref.uid == "pod-2"] == [True]


# --- silence


def test_one_watch_that_goes_on_says_nothing_of_another(running):
    running.put(WatchFailing(silent(), 0.0, source(JOB)))
    running.trouble()
    running.put(WatchRecovered(source(JOB)))
    running.pod(blocked=True)
    assert running.follow(1000) == []


def test_nothing_is_overdue_while_nothing_is_heard_nor_at_once_when_it_is_again(world_of):
    world = world_of(patience={"unschedulable": 60.0}).submitted()
    world.job()
    world.pod(blocked=True)
    world.follow(1.0)
    world.trouble()
    assert world.follow(500) == []
    world.put(WatchRecovered(source(POD)))
    assert world.follow(1.0) == []
    world.pod(running=True)
    assert world.follow(100) == []


def test_a_server_that_never_comes_back_is_given_up_some_time_and_what_is_there_stays_in_the_ledger(running):
    running.trouble(silent("gone for good"))
    running.api.on["delete"] = raises(silent())
    end = running.end(4000)
    assert (end.error.outcome, end.unsure) == ("channel_broken", True)
    assert "gone for good" in str(end.error)


def test_a_missing_right_is_reported_at_once(world):
    world.submit()
    world.trouble(FORBIDDEN)
    assert world.end(2).error.outcome == "forbidden"


# --- beginning and ending without answers


def test_what_is_refused_is_raised_once_nothing_is_left_of_it(world):
    world.api.on["create"] = raises(FORBIDDEN, "Job")
    with pytest.raises(ProvisionError, match="forbidden"):
        world.submit()
    assert world.api.objects == {}


def test_what_is_refused_and_cannot_be_deleted_is_not_forgotten(world):
    world.api.on.update(create=raises(FORBIDDEN, "Job"), list=raises(silent()), delete=raises(silent()))
    world.submit()
    assert world.follow(30) == []
    world.api.on.clear()
    end = world.end(10)
    assert (end.error.outcome, end.unsure, world.api.objects) == ("forbidden", False, {})


def test_what_was_created_without_an_answer_is_deleted_with_the_rest_and_not_sure_to_be_all(world):
    def lost(kind):
        if kind == "Job":
            world.api.put(JOB, {"metadata": {"name": f"mlhpc-{ID}"}}, "ns")
            raise silent()

    world.api.on["create"] = lost
    world.submit()
    (handle,) = world.running_handles()
    assert world.provisioner.cancel([handle]) == [handle]
    assert (handle.id, world.api.objects) == (ID, {})


def test_cancelling_is_tried_again_while_the_server_is_away(running):
    failures = [silent(), silent()]
    running.api.on["list"] = lambda kind: raises(failures.pop())(kind) if failures else None
    running.pod(exit=143)
    assert running.provisioner.cancel(running.running_handles()) == []
    assert (failures, running.api.objects) == ([], {})


def test_cancelling_waits_for_no_collector_where_a_job_has_pods_that_run(running):
    running.pod(exit=143)
    assert running.provisioner.cancel(running.running_handles()) == []
    assert [call for call in running.api.calls if call.startswith("delete")][-1] == "delete Pod"


def test_an_end_leaves_nothing_for_a_collector_that_stands_still(running):
    running.api.collects = False
    assert sorted(kind for kind, _ in running.api.objects) == ["Job", "Secret"]
    running.print("started", "end")
    running.pod(exit=0)
    running.log_over()
    assert running.end()
    assert running.api.objects == {}


def test_cancelling_gives_up_if_the_server_never_answers(running):
    running.api.on["list"] = raises(silent())
    handles = running.running_handles()
    assert running.provisioner.cancel(handles) == handles


def test_what_is_gone_is_forgotten(running):
    running.print("started", "end")
    running.follow()
    running.pod(exit=0)
    running.follow()
    assert not [*running.provisioner._reconciler.deleting, *running.provisioner._router._owners]
    assert all(follower.close.called for follower in running.followers)


# --- adoption


def test_nothing_is_decided_of_an_adopted_allocation_before_all_lists_have_come(world):
    world.adopt(world.submit())
    world.put(ListSynced(source(POD)))
    assert world.follow(100) == []
    world.job()
    world.put(ListSynced(source(JOB)))
    world.pod(running=True)
    world.print("started", "end")
    assert world.end().error is None
    assert world.api.objects == {}, "what was not its workload's own is deleted too"


@pytest.fixture
def jobless(world):
    """The Job of a submitted allocation is not there."""
    world.submit()
    del world.api.objects["Job", f"mlhpc-{ID}"]
    return world


def test_an_adopted_allocation_that_is_gone_is_reported_and_its_rest_deleted(jobless):
    jobless.adopt(jobless.plan())
    jobless.sync()
    assert (jobless.end().error.outcome, jobless.api.objects) == ("cancelled_outside", {})


def test_an_allocation_that_was_never_created_whole_is_created_by_who_adopts_it(jobless):
    jobless.adopt(jobless.plan(), native_id="")
    jobless.sync()
    assert (jobless.follow(5), jobless.jobs()) == ([], [""])


def test_pods_of_an_earlier_round_say_nothing_in_a_later_one(world):
    first = world.submitted().pod(unfit="its GPU does not answer")
    world.follow(2)
    assert "-r1" in world.jobs()
    world.pod(unfit="its GPU does not answer", deleting=True)
    world.gone(first)
    assert world.follow(5) == []
    assert "-r2" not in world.jobs()
    world.pod("pod-2", "-r1-x", running=True)
    world.print("started", "end", uid="pod-2")
    assert world.end().error is None


def test_who_adopts_a_later_round_knows_that_it_is_one(world):
    world.adopt(world.submit(), "-r1")
    world.pod(unfit="old", deleting=True)
    world.job("uid-9", "-r1")
    world.pod("pod-2", "-r1-x", running=True)
    world.sync()
    world.print("started", "end", uid="pod-2")
    assert world.end().error is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        pytest.param(
            "server",
            "https://elsewhere.test",
            f"it is in {SERVER}, and the kubeconfig leads to https://elsewhere.test now",
            id="by its URL",
        ),
        pytest.param("authority", "5678", "(with other certificates) now", id="by its certificates"),
    ],
)
def test_an_allocation_of_another_cluster_is_known_and_stays_in_the_ledger(world, name, value, text):
    plan = world.submit()
    setattr(world.api, name, value)
    world.adopt(plan)
    end = world.end()
    assert (end.unsure, text in str(end.error)) == (True, True)
    assert world.api.objects


def test_saved_output_is_reported_again_though_its_pods_are_deleted(running):
    running.print("started", "end")
    running.follow()
    running.api.put(JOB, {"metadata": {"name": f"mlhpc-{ID}"}}, "ns")
    running.events.clear()
    running.adopt(running.plan())
    end = running.end()
    assert (end.error, end.unsure, running.lines()) == (None, False, ["started", "end"])
    assert running.events[0].nodes == ("n1",)
    assert running.api.objects == {}, "a deletion that was not taken is made good"


# --- threads


def test_a_wish_for_attention_is_heard_among_thousands_of_lines(running):
    noise, before = [LogLine(LOG, "worker", b"noise")] * 100, running.clock.now
    running.put(*noise)
    running.provisioner.wake()
    running.put(*noise)
    running.provisioner.events([], 60.0)
    assert running.clock.now == before


def test_who_reads_a_log_waits_for_one_who_cannot_keep_up_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(event_router, "MAX_QUEUED", 10)
    monkeypatch.setattr(event_router, "QUEUE_WAIT_S", HANG_S)
    router = EventRouter({}, lambda: 0.0)
    lines = [LogLine(LOG, "worker", b"%d" % number) for number in range(200)]
    reader = threading.Thread(target=lambda: [router.put_log_report(line) for line in lines])
    reader.start()
    most = 0
    while reader.is_alive() or not router.queue.empty():
        most = max(most, router.queue.qsize())
        router.route(router.queue.get(timeout=HANG_S))
    reader.join()
    assert most <= 11


def test_a_limit_that_has_passed_is_no_reason_to_look_all_the_time(world_of):
    world = world_of(patience={"unschedulable": 1.0}).submitted()
    world.pod(blocked=True)
    world.follow(0.5)
    world.trouble()
    calls, until = 0, world.clock.now + 100
    while world.clock.now < until:
        world.provisioner.events([], 1.0)
        calls += 1
    assert calls <= 101


def test_a_pod_of_an_unknown_allocation_is_remembered_until_it_is_deleted(world):
    other = pod_of("pod-9", "mlhpc-other-x")
    other["metadata"]["labels"]["pytest-mlhpc/allocation"] = "other"
    world.submit()
    world.put(ObjectChanged(POD, other, source(POD)))
    world.follow(1)
    assert set(world.provisioner._router.unclaimed) == {"pod-9"}
    world.gone(other)
    world.follow(1)
    assert not world.provisioner._router.unclaimed


def test_a_single_pod_that_was_given_back_and_made_again_was_not_taken_by_anybody(world_of):
    world = world_of(kind="pods").submitted()
    world.vanish("uid-0", "-0")
    world.pod("uid-2", "-0", running=True)
    assert world.follow() == []
    world.print("started", "end", uid="uid-2")
    assert world.end().error is None
