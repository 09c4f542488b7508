"""What comes in another order than it happened, twice, late or never: an allocation ends once, with what is true."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pod_worlds import CALL, ID, POD, World, pod_of, silent, source

from pytest_mlhpc.errors import NodeFault, ProvisionError
from pytest_mlhpc.provision.kubernetes import intake
from pytest_mlhpc.provision.kubernetes.errors import Forbidden, NotFound, Unauthorized
from pytest_mlhpc.provision.kubernetes.intake import Intake
from pytest_mlhpc.provision.kubernetes.logs import LogLine, LogTrouble
from pytest_mlhpc.provision.kubernetes.resources import JOB, ObjectRef
from pytest_mlhpc.provision.kubernetes.watch import Healed, Seen, Synced, Trouble
from pytest_mlhpc.provision.kubernetes.where import read


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


@pytest.fixture
def running(world):
    """A pod runs."""
    world.submit()
    world.sync()
    world.job()
    world.pod(running=True)
    world.follow(1.0)
    return world


# --- results, and the pod that they came from


def test_a_result_counts_though_its_pod_was_seen_to_vanish_before_the_last_lines_came(running):
    running.say("started")
    running.gone(running.pod(running=True))
    assert running.follow(20) == []
    running.say("end", start=1)
    running.log_over()
    (end,) = running.follow()
    assert end.error is None
    assert running.lines() == ["started", "end"]


def test_a_pod_that_vanishes_and_whose_log_never_ends_is_told_in_the_end(running):
    running.gone(running.pod(running=True))
    (end,) = running.follow(200)
    assert isinstance(end.error, ProvisionError)
    assert end.error.outcome == "cancelled_outside"
    assert "on n1" in str(end.error)


def test_a_container_that_ended_is_not_judged_before_its_log_was_read(running):
    running.pod(exit=0)
    assert running.follow(60) == []
    running.say("started", "end")
    (end,) = running.follow()
    assert end.error is None


def test_memory_that_ran_out_is_told_of_a_run_that_seemed_to_be_killed_by_anybody(running):
    running.say("started", "failed", "end")
    assert running.follow(3) == []
    running.pod(exit=137, why="OOMKilled")
    running.follow()
    failed = next(event.message for event in running.events if getattr(event, "message", None) and event.message.kind == "failed")  # fmt: skip
    assert failed.body["outcome"] == "out_of_memory"


def test_a_pod_that_ends_while_somebody_deletes_it_was_deleted_rather_than_killed_by_itself(running):
    running.pod(exit=143, deleting=True)
    running.log_over()
    (end,) = running.follow()
    assert end.error.outcome == "cancelled_outside"


def test_a_log_that_cannot_be_read_is_told_with_the_reason(running):
    running.pod(exit=0)
    running.log_over(complete=False, error=silent("nobody there"))
    (end,) = running.follow()
    assert end.error.outcome == "truncated_result"
    assert "could not be read" in str(end.error)
    assert "nobody there" in str(end.error)


def test_a_pod_that_is_gone_with_its_node_is_told_as_that(running):
    def nobody(_kind):
        raise NotFound(CALL, "no node", status=404)

    running.api.on["get"] = nobody
    running.gone(running.pod(running=True))
    running.log_over()
    (end,) = running.follow()
    assert isinstance(end.error, NodeFault)
    assert "the node n1 is no longer in the cluster" in str(end.error)


# --- pods that controllers make anew


def test_a_pod_that_is_made_anew_is_never_listened_to(running):
    running.say("started")
    running.pod("pod-1", unready=True, deleting=True)
    running.pod("pod-2", name=f"mlhpc-{ID}-y", running=True, node="n2", born="2026-01-02T00:00:00Z")
    running.say("started", "end", uid="pod-2")
    (end,) = running.follow()
    assert isinstance(end.error, NodeFault)
    assert end.error.nodes == ("n1",)
    assert running.lines() == ["started"]


def test_which_pod_was_first_is_told_by_the_server_not_by_the_order_of_a_list(world):
    world.submit()
    world.sync()
    world.pod("pod-2", name=f"mlhpc-{ID}-a", running=True, node="n2", born="2026-01-02T00:00:00Z")
    world.pod("pod-1", name=f"mlhpc-{ID}-b", unready=True, deleting=True)
    world.say("started", uid="pod-2", start=0)
    world.follow()
    assert world.lines() == []
    assert [follower.closed for follower in world.followers if follower.ref.uid == "pod-2"] == [True]


# --- silence


def test_one_watch_that_goes_on_says_nothing_of_another(running):
    running.put(Trouble(silent(), 0.0, source(JOB)), Trouble(silent(), 0.0, source(POD)), Healed(source(JOB)))
    running.pod(blocked=True)
    assert running.follow(1000) == []


def test_nothing_is_overdue_while_nothing_is_heard_nor_at_once_when_it_is_again(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, patience={"unschedulable": 60.0})
    world.submit()
    world.sync()
    world.job()
    world.pod(blocked=True)
    world.follow(1.0)
    world.put(Trouble(silent(), 0.0, source(POD)))
    assert world.follow(500) == []
    world.put(Healed(source(POD)))
    assert world.follow(1.0) == []
    world.pod(running=True)
    assert world.follow(100) == []


def test_a_server_that_never_comes_back_is_given_up_some_time_and_what_is_there_stays_in_the_ledger(running):
    running.put(Trouble(silent("gone for good"), 0.0, source(POD)))
    running.api.on["delete"] = raises(silent())
    (end,) = running.follow(4000)
    assert (end.error.outcome, end.unsure) == ("channel_broken", True)
    assert "gone for good" in str(end.error)


def test_a_right_that_was_never_there_is_told_at_once_and_one_that_was_lost_after_a_while(world):
    world.submit()
    world.put(Trouble(Forbidden(CALL, "may not watch", status=403), 0.0, source(POD)))
    (end,) = world.follow(2)
    assert end.error.outcome == "forbidden"


def test_a_right_that_was_lost_is_told_after_a_while(running):
    running.put(Trouble(Forbidden(CALL, "may not watch", status=403), 0.0, source(POD)))
    assert running.follow(60) == []
    (end,) = running.follow(60)
    assert end.error.outcome == "forbidden"


def test_credentials_may_be_renewed_within_the_patience_for_it(running):
    running.put(Trouble(Unauthorized(CALL, "who are you", status=401), 0.0, source(POD)))
    assert running.follow(500) == []
    running.put(Healed(source(POD)))
    running.say("started", "end")
    (end,) = running.follow()
    assert end.error is None


def test_logs_that_may_not_be_read_are_told_at_once(running):
    ref = ObjectRef(POD, "ns", "x", "pod-1")
    running.put(LogTrouble(ref, "worker", Forbidden(CALL, "may not read logs", status=403), 0.0))
    (end,) = running.follow(2)
    assert end.error.outcome == "forbidden"


# --- beginning and ending without answers


def raises(error):
    def act(*_words):
        raise error

    return act


def test_what_is_refused_is_raised_once_nothing_is_left_of_it(world):
    world.api.on["create"] = lambda kind: (
        raises(Forbidden(CALL, "no", status=403))() if kind == "Job" else None
    )
    with pytest.raises(ProvisionError, match="forbidden"):
        world.submit()
    assert world.api.objects == {}


def test_what_is_refused_and_cannot_be_deleted_is_not_forgotten(world):
    world.api.on["create"] = lambda kind: (
        raises(Forbidden(CALL, "no", status=403))() if kind == "Job" else None
    )
    world.api.on["list"] = world.api.on["delete"] = raises(silent())
    world.submit()
    assert world.follow(30) == []
    del world.api.on["list"], world.api.on["delete"]
    (end,) = world.follow(10)
    assert (end.error.outcome, end.unsure) == ("forbidden", False)
    assert world.api.objects == {}


def test_what_was_created_without_an_answer_is_deleted_with_the_rest_and_not_sure_to_be_all(world):
    def lost(kind):
        if kind == "Job":
            world.api.put(JOB, {"metadata": {"name": f"mlhpc-{ID}"}}, "ns")
            raise silent()

    world.api.on["create"] = lost
    plan = world.submit()
    (handle,) = [one.handle for one in world.provisioner._allocations.values()]
    assert world.provisioner.cancel([handle]) == [handle]
    assert world.api.objects == {}
    assert plan.allocation_id == handle.id


def test_cancelling_is_tried_again_while_the_server_is_away(running):
    calls = iter([silent(), silent(), None])

    def answer(_kind):
        error = next(calls, None)
        if error is not None:
            raise error

    running.api.on["list"] = answer
    handles = [one.handle for one in running.provisioner._allocations.values()]
    running.pod(exit=143)
    assert running.provisioner.cancel(handles) == []
    assert running.api.objects == {}


def test_cancelling_waits_for_no_collector_where_a_job_has_pods_that_run(running):
    handles = [one.handle for one in running.provisioner._allocations.values()]
    running.pod(exit=143)
    assert running.provisioner.cancel(handles) == []
    assert [said for said in running.api.said if said.startswith("delete")][-1] == "delete Pod"


def test_an_end_leaves_nothing_for_a_collector_that_stands_still(running):
    running.api.collects = False
    assert sorted(kind for kind, _ in running.api.objects) == ["ConfigMap", "Job"]
    running.say("started", "end")
    running.pod(exit=0)
    running.log_over()
    assert len(running.follow()) == 1
    assert running.api.objects == {}


def test_cancelling_gives_up_where_nobody_ever_answers(running):
    running.api.on["list"] = raises(silent())
    handles = [one.handle for one in running.provisioner._allocations.values()]
    assert running.provisioner.cancel(handles) == handles


def test_an_end_is_told_after_the_deletion_was_taken(running):
    running.api.on["delete"] = raises(silent())
    running.say("started", "end")
    assert running.follow(30) == []
    del running.api.on["delete"]
    (end,) = running.follow(5)
    assert (end.error, end.unsure) == (None, False)


def test_what_is_gone_is_forgotten(running):
    running.say("started", "end")
    running.follow()
    running.pod(exit=0)
    running.follow()
    assert not running.provisioner._leaving._allocations
    assert not running.provisioner._intake._owners
    assert all(follower.closed for follower in running.followers)


# --- adoption


def test_nothing_is_decided_of_an_adopted_allocation_before_all_lists_have_come(world):
    plan = world.submit()
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}")
    world.put(Synced(source(POD)))
    assert world.follow(100) == []
    world.job()
    world.put(Synced(source(JOB)))
    world.pod(running=True)
    world.say("started", "end")
    (end,) = world.follow()
    assert end.error is None
    assert world.api.objects == {}, "what was not its workload's own is deleted too"


def test_an_adopted_allocation_that_is_gone_is_told_and_its_rest_deleted(world):
    plan = world.submit()
    del world.api.objects["Job", f"mlhpc-{ID}"]
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}")
    world.sync()
    (end,) = world.follow()
    assert end.error.outcome == "cancelled_outside"
    assert world.api.objects == {}


def test_an_allocation_that_was_never_created_whole_is_created_by_who_adopts_it(world):
    plan = world.submit()
    del world.api.objects["Job", f"mlhpc-{ID}"]
    world.session()
    world.provisioner.adopt(plan, "")
    world.sync()
    assert world.follow(5) == []
    assert ("Job", f"mlhpc-{ID}") in world.api.objects


def test_pods_of_an_earlier_round_say_nothing_in_a_later_one(world):
    world.submit()
    world.sync()
    first = world.pod(unfit="its GPU does not answer")
    world.follow(2)
    assert ("Job", f"mlhpc-{ID}-r1") in world.api.objects
    world.pod(unfit="its GPU does not answer", deleting=True)
    world.gone(first)
    assert world.follow(5) == []
    assert ("Job", f"mlhpc-{ID}-r2") not in world.api.objects
    world.pod("pod-2", name=f"mlhpc-{ID}-r1-x", running=True)
    world.say("started", "end", uid="pod-2")
    (end,) = world.follow()
    assert end.error is None


def test_who_adopts_a_later_round_knows_that_it_is_one(world):
    plan = world.submit()
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}-r1")
    world.pod(unfit="old", deleting=True)
    world.job("uid-9", f"mlhpc-{ID}-r1")
    world.pod("pod-2", name=f"mlhpc-{ID}-r1-x", running=True)
    world.sync()
    world.say("started", "end", uid="pod-2")
    (end,) = world.follow()
    assert end.error is None


def test_nodes_are_found_unfit_a_limited_number_of_times(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, reprovision=1)
    world.submit()
    world.sync()
    world.pod(unfit="dead")
    world.follow(2)
    world.pod("pod-2", name=f"mlhpc-{ID}-r1-x", unfit="dead too", node="n2")
    (end,) = world.follow()
    assert end.error.outcome == "unfit_nodes"
    assert "n2: dead too, before that n1; provisioned 2 times" in str(end.error)


def test_an_allocation_of_another_cluster_stays_in_the_ledger(world):
    plan = world.submit()
    where = read(Path(plan.directory))
    assert where is not None
    world.api.server = "https://elsewhere.test"
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}")
    (end,) = world.follow()
    assert end.unsure
    assert f"it is in {where.server}, and the kubeconfig leads to https://elsewhere.test now" in str(
        end.error
    )
    assert world.api.objects


def test_another_cluster_is_known_by_its_certificates_where_its_url_is_the_same(world):
    plan = world.submit()
    world.api.authority = "5678"
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}")
    (end,) = world.follow()
    assert end.unsure
    assert "(with other certificates) now" in str(end.error)


def test_what_was_heard_to_its_end_is_told_again_though_its_pods_are_deleted(running):
    running.say("started", "end")
    running.follow()
    plan = running.plan()
    running.api.put(JOB, {"metadata": {"name": f"mlhpc-{ID}"}}, "ns")
    running.events.clear()
    running.session()
    running.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}")
    (end,) = running.follow()
    assert (end.error, end.unsure) == (None, False)
    assert running.lines() == ["started", "end"]
    assert running.events[0].nodes == ("n1",)
    assert running.api.objects == {}, "a deletion that was not taken is made good"


# --- threads


def test_a_wish_for_attention_is_heard_among_thousands_of_lines(running):
    ref = ObjectRef(POD, "ns", "x", "pod-1")
    for _ in range(100):
        running.put(LogLine(ref, "worker", b"noise"))
    running.provisioner.wake()
    for _ in range(100):
        running.put(LogLine(ref, "worker", b"noise"))
    before = running.clock.now
    running.provisioner.events([], 60.0)
    assert running.clock.now == before


def test_who_reads_a_log_waits_for_one_who_cannot_keep_up_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(intake, "MOST_WAITING", 10)
    monkeypatch.setattr(intake, "ROOM_S", 60.0)
    taken = Intake({}, lambda: 0.0)
    ref = ObjectRef(POD, "ns", "x", "pod-1")
    lines = [LogLine(ref, "worker", b"%d" % number) for number in range(200)]
    reader = threading.Thread(target=lambda: [taken.put_line(line) for line in lines])
    reader.start()
    most = 0
    while reader.is_alive() or not taken.queue.empty():
        most = max(most, taken.queue.qsize())
        taken.take(taken.queue.get(timeout=60))
    reader.join()
    assert most <= 11


def test_a_limit_that_has_passed_is_no_reason_to_look_all_the_time(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, patience={"unschedulable": 1.0})
    world.submit()
    world.sync()
    world.pod(blocked=True)
    world.follow(0.5)
    world.put(Trouble(silent(), 0.0, source(POD)))
    looks = 0
    until = world.clock.now + 100
    while world.clock.now < until:
        world.provisioner.events([], 1.0)
        looks += 1
    assert looks <= 101


def test_a_pod_of_nobody_we_know_is_remembered_no_longer_than_it_lives(world):
    other = pod_of("pod-9", "mlhpc-other-x")
    other["metadata"]["labels"]["pytest-mlhpc/allocation"] = "other"
    world.submit()
    world.put(Seen(POD, other, source(POD)))
    world.follow(1)
    assert set(world.provisioner._intake.unclaimed) == {"pod-9"}
    world.gone(other)
    world.follow(1)
    assert not world.provisioner._intake.unclaimed


def test_a_single_pod_that_was_given_back_and_made_again_was_not_taken_by_anybody(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, kind="pods")
    world.submit()
    world.sync()
    world.gone(world.pod("uid-0", name=f"mlhpc-{ID}-0"))
    world.pod("uid-2", name=f"mlhpc-{ID}-0", running=True)
    assert world.follow() == []
    world.say("started", "end", uid="uid-2")
    (end,) = world.follow()
    assert end.error is None
