"""The queue against a provisioner that does what the test says, when it says so."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.planning import plan_of
from pytest_mlhpc.jobs.queue import Callbacks, Driver
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import AllocationEnded, Handle, StateChanged
from pytest_mlhpc.results.outcome import Outcome

LIMIT_S = 20.0


class Told:
    """A provisioner whose allocations end when the test says so."""

    def __init__(self) -> None:
        self.submitted: queue.Queue[Handle] = queue.Queue()
        self.names: list[str] = []
        self.cancelled: list[str] = []
        self.cancels: list[int] = []  #: of how many allocations, call by call
        self.adopted: list[Handle] = []
        self.skipped: list[str] = []
        self.silent = False
        self.closed = False
        self.refuse = ""
        self._events: queue.Queue = queue.Queue()

    def validate(self, spec):
        return "too big" if spec.name == "big" else ""

    def longest(self):
        return None

    def submit(self, plan):
        if self.refuse:
            raise ProvisionError("rejected", self.refuse)
        handle = Handle(plan.allocation_id, Path(plan.directory))
        self.submitted.put(handle)
        return handle

    def say(self, event):
        self._events.put(event)

    def wake(self):
        self._events.put(None)

    def events(self, handles, timeout_s):
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [event] if event is not None else []

    def adopt(self, plan, native_id):
        handle = Handle(plan.allocation_id, Path(plan.directory), native_id)
        self.adopted.append(handle)
        return handle

    def skip(self, handle, run_ids):
        self.skipped += run_ids

    def cancel(self, handles):
        self.cancels.append(len(handles))
        self.cancelled += [handle.id for handle in handles]
        return [handle for handle in handles if self.silent]

    def close(self):
        self.closed = True

    def next(self) -> Handle:
        return self.submitted.get(timeout=LIMIT_S)


class Bench:
    """A driver with its surroundings; ``judge`` says how many re-runs a job gets."""

    def __init__(
        self,
        tmp_path: Path,
        max_jobs: int,
        pack: bool = False,
        unjudged: Callable[[Job], None] = lambda _: None,
    ) -> None:
        self.provisioner = Told()
        self.ledger: list[tuple[str, str]] = []
        self.reruns: dict[str, int] = {}
        self.concluded: list[str] = []
        self.ours = True
        callbacks = Callbacks(
            plan=lambda specs, excluded: plan_of(specs, tmp_path, "", excluded),
            submitted=lambda specs, plan: self.ledger.append(("submitted", plan.allocation_id)),
            accepted=lambda allocation, native_id: self.ledger.append(("accepted", native_id)),
            concluded=self.concluded.extend,
            ended=lambda allocation: self.ledger.append(("ended", allocation)),
            judge=self.judge,
            beat=lambda: self.ours,
            unjudged=unjudged,
        )
        self.driver = Driver("test", self.provisioner, max_jobs, callbacks, pack=pack)
        self.driver.start()

    def judge(self, job):
        if wanted := self.reruns.pop(job.spec.name, 0):
            return wanted
        first = job.attempts[0]
        failure = first.failure if first.handle is None else None  # it was not taken
        return Outcome(job.spec.node_id, job.spec.benchmark, failure=failure, attempts=len(job.attempts))


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path, max_jobs=2)
    yield made
    made.driver.close()
    made.driver.join(LIMIT_S)
    assert not made.driver.is_alive()
    assert made.provisioner.closed


def ended(job):
    assert job.done.wait(LIMIT_S)
    return job.outcome


def test_max_jobs_are_kept_submitted_in_test_order(bench, command):
    jobs = [Job(command(number)) for number in range(4)]
    bench.driver.add(jobs)
    first, second = bench.provisioner.next(), bench.provisioner.next()
    assert bench.provisioner.submitted.empty()
    assert [job.state for job in jobs[2:]] == [JobState.DECLARED] * 2
    bench.provisioner.say(AllocationEnded(second))
    ended(jobs[1])
    third = bench.provisioner.next()
    assert jobs[2].attempts[0].handle.id == third.id
    bench.provisioner.say(AllocationEnded(first))
    ended(jobs[0])


def test_the_ledger_knows_of_a_job_before_it_is_submitted(bench, command):
    bench.provisioner.refuse = "no such account"
    job = Job(command())
    bench.driver.add([job])
    assert str(ended(job).failure).startswith("rejected: no such account")
    assert [event for event, _ in bench.ledger] == ["submitted", "ended"]
    (attempt,) = job.attempts
    assert bench.concluded == [attempt.run.run_id]  # it has a record, as what ran has
    assert ended(job).failure.log == attempt.directory


def test_a_job_that_can_never_run_is_not_submitted(bench, command):
    job = Job(command(name="big"))
    bench.driver.add([job])
    assert str(ended(job).failure).startswith("rejected: too big")
    assert bench.ledger == []


def test_reruns_go_before_jobs_that_wait(bench, command):
    jobs = [Job(command(number)) for number in range(4)]
    bench.reruns["job0"] = 2
    bench.driver.add(jobs)
    bench.provisioner.say(AllocationEnded(bench.provisioner.next()))
    bench.provisioner.next()
    rerun = bench.provisioner.next()
    assert jobs[0].attempts[1].handle.id == rerun.id
    assert jobs[0].attempts[1].run.run_id != jobs[0].attempts[0].run.run_id
    assert jobs[0].state is JobState.RERUNNING
    bench.provisioner.say(AllocationEnded(rerun))
    bench.provisioner.say(AllocationEnded(bench.provisioner.next()))
    assert ended(jobs[0]).attempts == 3


def test_cancelling_a_running_job_frees_its_place(bench, command):
    jobs = [Job(command(number)) for number in range(3)]
    bench.driver.add(jobs)
    handle = bench.provisioner.next()
    bench.provisioner.next()
    bench.driver.cancel([jobs[0]], "no longer wanted")
    assert ended(jobs[0]).failure.outcome == "cancelled"
    assert bench.provisioner.cancelled == [handle.id]
    assert jobs[2].attempts or bench.provisioner.next()
    bench.provisioner.say(AllocationEnded(handle))  # its late end disturbs nobody
    bench.driver.cancel([jobs[2]], "no longer wanted")
    assert ended(jobs[2]).failure.outcome == "cancelled"


def test_cancelling_a_waiting_job_never_submits_it(bench, command):
    jobs = [Job(command(number)) for number in range(3)]
    bench.driver.add(jobs)
    first = bench.provisioner.next()
    bench.driver.cancel([jobs[2]], "no longer wanted")
    ended(jobs[2])
    bench.provisioner.say(AllocationEnded(first))
    ended(jobs[0])
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert jobs[2].attempts == []


def test_jobs_that_are_given_up_together_are_cancelled_by_one_call(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=8)
    jobs = [Job(command(number)) for number in range(9)]
    bench.driver.add(jobs)
    handles = [bench.provisioner.next() for _ in range(8)]
    bench.driver.cancel(jobs[1:], "the session is about to end")
    assert {ended(job).failure.text for job in jobs[1:]} == {"the session is about to end"}
    assert bench.provisioner.cancels == [7]
    assert bench.provisioner.cancelled == [handle.id for handle in handles[1:]]
    assert not jobs[0].done.is_set()
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancels == [7, 1]


def test_jobs_that_are_given_up_while_others_are_cancelled_follow_by_one_call(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=4)
    jobs = [Job(command(number)) for number in range(4)]
    bench.driver.add(jobs)
    for _ in jobs:
        bench.provisioner.next()
    begun, go, cancel = threading.Event(), threading.Event(), bench.provisioner.cancel

    def slow(handles):
        begun.set()
        assert go.wait(LIMIT_S)
        return cancel(handles)

    bench.provisioner.cancel = slow
    bench.driver.cancel(jobs[:1], "its test is over")
    assert begun.wait(LIMIT_S)
    for job in jobs[1:]:
        bench.driver.cancel([job], f"{job.spec.name} is over")
    bench.driver.cancel(jobs, "the session is about to end")  # the first reason counts
    go.set()
    assert [ended(job).failure.text for job in jobs[1:]] == [f"job{number} is over" for number in (1, 2, 3)]
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancels == [1, 3]
    assert sum(event == "ended" for event, _ in bench.ledger) == 4


def test_of_those_given_up_together_only_what_is_surely_gone_is_forgotten(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=3)
    jobs = [Job(command(number)) for number in range(3)]
    bench.driver.add(jobs)
    handles = [bench.provisioner.next() for _ in jobs]
    cancel = bench.provisioner.cancel
    bench.provisioner.cancel = lambda asked: cancel(asked) + [one for one in asked if one.id == handles[1].id]
    bench.driver.cancel(jobs, "no longer wanted")
    for job in jobs:
        ended(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert {one for event, one in bench.ledger if event == "ended"} == {handles[0].id, handles[2].id}
    assert [handle.id for handle in bench.driver.left] == [handles[1].id]


def test_closing_cancels_all_and_gives_every_job_an_outcome(bench, command):
    jobs = [Job(command(number)) for number in range(4)]
    bench.driver.add(jobs)
    handles = {bench.provisioner.next().id, bench.provisioner.next().id}
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert {ended(job).failure.outcome for job in jobs} == {"cancelled"}
    assert set(bench.provisioner.cancelled) == handles
    assert {i for event, i in bench.ledger if event == "ended"} == handles


def test_an_error_of_our_own_leaves_nothing_running_and_nobody_waiting(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=2)
    bench.judge = None
    jobs = [Job(command(number)) for number in range(3)]
    bench.driver.add(jobs)
    first = bench.provisioner.next()
    second = bench.provisioner.next()
    bench.provisioner.events = lambda *a: (_ for _ in ()).throw(RuntimeError("broken"))
    bench.provisioner.say(StateChanged(first, JobState.RUNNING))
    bench.driver.join(LIMIT_S)
    assert "broken" in bench.driver.crash
    assert set(bench.provisioner.cancelled) == {first.id, second.id}
    assert bench.provisioner.closed
    assert all("internal error" in ended(job).failure.text for job in jobs)


@pytest.mark.parametrize("end", [SystemExit(0), pytest.skip.Exception("by a hook"), KeyboardInterrupt()])
def test_what_would_end_a_thread_in_silence_is_an_error_of_our_own(tmp_path, command, end):
    bench = Bench(tmp_path, max_jobs=1)
    jobs = [Job(command(number)) for number in range(2)]
    bench.driver.add(jobs)
    first = bench.provisioner.next()
    bench.provisioner.events = lambda *a: (_ for _ in ()).throw(end)
    bench.provisioner.say(StateChanged(first, JobState.RUNNING))
    bench.driver.join(LIMIT_S)
    assert type(end).__name__ in bench.driver.crash
    assert {ended(job).failure.outcome for job in jobs} == {"channel_broken"}


def test_a_provisioner_that_fails_to_close_is_an_error_of_our_own(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.driver.add([job])
    bench.provisioner.next()
    bench.provisioner.close = lambda: (_ for _ in ()).throw(RuntimeError("cannot close"))
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert "cannot close" in bench.driver.crash
    assert ended(job).failure.outcome == "cancelled"


def test_waiting_jobs_are_handed_out_from_another_thread(bench, command):
    job = Job(command())
    seen: list[Outcome] = []
    waiter = threading.Thread(target=lambda: seen.append(ended(job)))
    waiter.start()
    bench.driver.add([job])
    bench.provisioner.say(AllocationEnded(bench.provisioner.next()))
    waiter.join(LIMIT_S)
    assert seen == [job.outcome]
