"""The benchmark session."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.errors import MlhpcError, StoreError, UsageError
from pytest_mlhpc.jobs.job import AdoptedAllocation, Job, Outcome
from pytest_mlhpc.jobs.partition_queue import Callbacks
from pytest_mlhpc.jobs.queue import Driver
from pytest_mlhpc.jobs.resume import without_user
from pytest_mlhpc.jobs.spec import JobSpec, run_root, uuid7, with_needs
from pytest_mlhpc.judge.baselines import WAITING, recorded_line, written_line
from pytest_mlhpc.options import Settings, state_and_baselines
from pytest_mlhpc.session.ledger_writer import LedgerWriter
from pytest_mlhpc.session.signals import Signals
from pytest_mlhpc.store.record import Failure, SeriesKey, provenance_of
from pytest_mlhpc.store.store import Drill, drill_of
from pytest_mlhpc.store.text import count

if TYPE_CHECKING:
    import pluggy

    from pytest_mlhpc.history.series import Source
    from pytest_mlhpc.node.worker.workloads.definitions import Workload
    from pytest_mlhpc.session.against import Comparison
    from pytest_mlhpc.session.outcome import SessionStores
    from pytest_mlhpc.session.preflight import Spending
    from pytest_mlhpc.session.revision import Revision


#: How often a waiting main thread redraws.
TICK_S = 0.2


class BenchmarkSession:
    """The one session of an invocation; under pytest-xdist it lives in the controller process."""

    def __init__(
        self,
        settings: Settings,
        manager: pluggy.PluginManager,
        workloads: dict[str, Workload],
        root: Path,
        false_alarms: float = 1.0,
    ) -> None:
        self.id = uuid7()
        self.settings = settings
        self.jobs: dict[str, Job] = {}
        self.deselected: list[str] = []  #: lines of tests that no selected target can run
        self.changed_files: tuple[Path, ...] = ()
        #: what to say before anything runs: what it may cost, what was reaped
        self.announcement: list[str] = []
        self.trouble: list[str] = []  #: what went wrong on closing, for the summary
        self.notes: list[str] = []  #: what receivers of records have to say; no fault of this session
        self._manager = manager
        self._root = root
        self._false_alarms = false_alarms
        self._drivers: dict[str, Driver] = {}
        self._books = LedgerWriter(settings, self.id, workloads, self.trouble)
        self._stores: SessionStores | None = None
        self._timer: threading.Timer | None = None
        self._signals = Signals(self._terminate)
        self._detaching = False
        #: node id -> why a build that it needs failed on this machine
        self._unbuilt: Mapping[str, Failure] = {}
        self.terminated = False  #: by SIGTERM or SIGHUP
        self.comparison: Comparison | None = None  #: of A against B
        self.revision: Revision | None = None  #: of B, with its worktrees
        self._closed = False
        self._drill: Drill | None = None  #: of a drill no receiver gets records

    def check_out(self, revision: Revision, targets: Sequence[Target]) -> Revision:
        """Return *revision* with a worktree where nodes of *targets* see it; :meth:`close` removes it.

        Raises:
            StoreError: the ledger cannot be written: a later session could not know that this one lives.
            UsageError: the revision cannot be checked out.
        """
        from pytest_mlhpc.session.revision import check_out

        self._books.start()
        roots = dict.fromkeys(run_root(one.partition, self.settings.state_dir) for one in targets)
        try:
            self.revision = check_out(revision, list(roots), self.id)
        except BaseException:
            self._books.close()
            raise
        return self.revision

    def declare(self, specs: Sequence[JobSpec]) -> None:
        """Take the jobs of all tests that will run, in test order, and start submitting them. The first call counts.

        Raises:
            ConfigError: a baseline file is damaged; nothing was started.
            UsageError: what was asked for is beyond the budget, or cannot be on this system; nothing was started.
        """
        if self.jobs or not specs or self._closed:
            return
        specs = with_needs(specs)
        from pytest_mlhpc.session.outcome import SessionStores, SessionTerms
        from pytest_mlhpc.session.preflight import build_before, check

        jobs = self._jobs_of(specs)
        specs = [job.spec_of(number) for job in jobs for number in range(1, 1 + _runs_of(job))]
        spending = check(specs, self.settings)
        self.announcement += spending.announcement
        unbuilt: Mapping[str, Failure] = {}
        if self.settings.resume is None and any(build.before for spec in specs for build in spec.builds):
            unbuilt, lines = build_before(specs, self.settings.state_dir, self.id, self._books.payload)
            self.announcement += lines
        provenance = self._books.provenance = provenance_of(self._root)
        # `mlhpc` reads baselines of the folder in which it is called; found out now, as tests may change theirs.
        options = state_and_baselines(self.settings, Path.cwd() / "baselines")
        self._drill = self._books.drill = drill_of(self.settings.state_dir)
        terms = SessionTerms(
            self.settings, self.id, provenance, options, self._false_alarms, self.comparison, self._drill
        )
        self._stores = SessionStores(
            terms,
            spending=spending,
            readiness=self._books.readiness,
            publish=self._publish,
            source=self._source_of_history(),
            tell=self.trouble.append,
        )
        self._books.usual = self._stores.book.usual_s
        self._stores.book.problems(sorted({spec.target.partition.system for spec in specs}))
        for job in jobs:
            job.unbuilt = unbuilt.get(job.spec.node_id)
        adopted: Mapping[str, Sequence[AdoptedAllocation]] = {}
        self._signals.catch()  # what is taken over keeps its lease if this session is signalled to end now
        try:
            recovered, messages = self._books.take_over(jobs)
            self.announcement += messages
            adopted = recovered.adopted
        except StoreError as error:  # no submission can be written down either: each says so
            self.trouble.append(str(error))
        for job, previous in zip(jobs[1:], jobs, strict=False):
            job.previous = previous
        self.jobs = {job.spec.node_id: job for job in jobs}
        for job in jobs:
            job.needs = {name: self.jobs[one.node_id] for name, one in job.spec.needs.items()}
        self._begin_records()
        self._make_drivers(adopted, spending)
        self._books.note({"node_hours_at_most": spending.bounds, "budget": self.settings.budget})
        self._start()

    def _jobs_of(self, specs: Sequence[JobSpec]) -> list[Job]:
        """Return a job for each of *specs*, with both sides where A is compared with B.

        Raises:
            UsageError: a test has no second side, or the budget is too small.
        """
        if self.settings.against is None:
            return [Job(spec) for spec in specs]
        from pytest_mlhpc.session.against import Comparison, announcement, opponents

        jobs, runs = opponents(specs, self.settings, self.id)
        metrics = sum(len(job.spec.judged) for job in jobs)
        self.comparison = Comparison(self.settings.against, metrics, self.revision)
        self.announcement += announcement(self.comparison, jobs, runs)
        return jobs

    def _source_of_history(self) -> Source | None:
        """Return where the judge reads history if not in the local store.

        Raises:
            UsageError: how to reach it is not said.
        """
        if self.settings.history != "influx":
            return None
        from pytest_mlhpc.influx.source import influx_source

        return influx_source(os.environ)

    def _make_drivers(self, adopted: Mapping[str, Sequence[AdoptedAllocation]], spending: Spending) -> None:
        going_on = {id(job) for some in adopted.values() for one in some for job, _ in one.runs.values()}
        if going_on:
            self.announcement.append(f"going on with {count(len(going_on), 'run')} of an earlier session")
        for partition, jobs in _by_partition(self.jobs.values()):
            self._drivers[partition.id] = driver = self._driver(partition, spending)
            driver.adopt(adopted.get(partition.id, ()))
            unneeded = without_user(jobs, going_on)
            for job in unneeded:
                job.fail("cancelled", "all runs that need it are those of an earlier session")
                spending.ended(job)
            new = [job for job in jobs if id(job) not in going_on and job not in unneeded]
            if self.settings.resume is None:
                driver.add(new)
            for job in new if self.settings.resume is not None else ():
                job.fail(
                    "cancelled", "no earlier session left anything of it, and --mlhpc-resume submits nothing"
                )
                spending.ended(job)

    def _start(self) -> None:
        for driver in self._drivers.values():
            driver.start()
        if self.settings.wait_s == 0:
            for driver in self._drivers.values():
                while not driver.settled.wait(TICK_S) and driver.is_alive():
                    pass
            self.detach()
        elif self.settings.wait_s is not None:
            self._timer = threading.Timer(self.settings.wait_s, self.detach)
            self._timer.daemon = True
            self._timer.start()

    def detach(self) -> None:
        """Leave all that has not ended to a later session; tests that wait for it are skipped. From any thread."""
        self._detaching = True
        self._lease()  # first: from here on this session may be killed
        for driver in self._drivers.values():
            driver.close(detach=driver.durable)

    def _lease(self) -> None:
        try:
            self._books.lease()
        except StoreError as error:
            self.trouble.append(str(error))

    @property
    def queued(self) -> list[Job]:
        """Jobs that were left to a later session."""
        return [
            job
            for job in self.jobs.values()
            if job.outcome and job.outcome.failure and job.outcome.failure.outcome == "detached"
        ]

    def wait(self, node_id: str, tick: Callable[[Job], None] | None = None) -> Outcome:
        """Block until the job of *node_id* has ended and return its outcome; a signal's exception interrupts it.

        Raises:
            UsageError: nothing was submitted for *node_id*.
        """
        job = self.jobs.get(node_id)
        if job is None:
            raise UsageError(
                f"{node_id}: nothing was submitted for this test, as its skip or xfail marks said after collection that it "
                "would not run; do not change what they depend on while tests run"
            )
        while not job.done.wait(TICK_S if tick else None):
            if tick:
                tick(job)
        assert job.outcome is not None  # noqa: S101 - `done` is set after it
        job.take()
        return job.outcome

    def lost(self, node_id: str) -> Failure | None:
        """Return why the nodes that the test of *node_id* holds are gone; None while they are there."""
        attempt = self.jobs[node_id].attempts[-1]
        if not attempt.over:
            return None
        return attempt.failure or Failure("cancelled", "they were given back")

    def test_over(self, node_id: str) -> None:
        """Cancel the job of a test that ended without taking its result; give back nodes that it held."""
        job = self.jobs.get(node_id)
        if job is not None and job.granted:
            self._drivers[job.spec.target.partition.id].release(job)
        elif job is not None and not job.taken and not job.done.is_set():
            self._drivers[job.spec.target.partition.id].cancel(
                self._without(job), "its test ended without taking the result"
            )

    def _without(self, job: Job) -> list[Job]:
        """Return *job*, and the jobs that no other unfinished one needs without it."""
        found = [job]
        for one in found:  # it grows
            found += [
                need
                for need in one.needs.values()
                if not need.done.is_set()
                and need not in found
                and all(
                    user in found or user.done.is_set()
                    for user in self.jobs.values()
                    if need in user.needs.values()
                )
            ]
        return found

    def stop(self, reason: str) -> None:
        """Cancel everything that no test has taken: the session is about to end."""
        left = [job for job in self.jobs.values() if not job.taken and not job.done.is_set()]
        for partition, jobs in _by_partition(left):
            self._drivers[partition.id].cancel(jobs, reason)

    def close(self) -> None:
        """Cancel what has not ended, write baselines, give everything back. Idempotent.

        What cannot be written is added to ``trouble``.
        """
        if self._closed:
            return
        with self._signals.closing():
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._detaching:
                self._lease()
            hurry = self.terminated
            try:
                self._close_drivers()
                self._await_drivers()
            except KeyboardInterrupt:  # the second: what is left is named, and not waited for
                hurry = True
                self._close_drivers()  # it may have come before all were notified
            with self._signals.uninterrupted():
                self._finish()
            self._end_records(hurry=hurry)

    def _close_drivers(self) -> None:
        """Ask all drivers to end; a Ctrl-C meanwhile is raised once all are asked, so that none goes on."""
        interrupt = None
        for driver in self._drivers.values():
            for _ in range(2):
                try:
                    driver.close(detach=self._detaching and driver.durable)
                    break
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _await_drivers(self) -> None:
        for driver in self._drivers.values():
            if driver.ident is None:
                driver.run()  # never started, as another could not be made: it only closes
            else:
                driver.join()
            if driver.crash:
                self.trouble.append(f"internal error in {driver.name}:\n{driver.crash}")

    @property
    def crashed(self) -> bool:
        """Whether a queue stopped by an error of our own."""
        return any(driver.crash for driver in self._drivers.values())

    def measured(self) -> bool:
        """Whether any test took a measurement, a verdict on nodes, or nodes of its own."""
        outcomes = [(job.outcome, job.granted) for job in self.jobs.values() if job.taken and job.outcome]
        return any(outcome.measurement or outcome.vetting or lent for outcome, lent in outcomes)

    def unused_baselines(self) -> tuple[str, ...]:
        """Return baseline entries that no test asked for, as ``benchmark: metric``."""
        if self._stores is None:
            return ()
        return tuple(f"{key.benchmark}: {key.metric}" for key in self._stores.book.unused())

    def accepted_series(self) -> tuple[SeriesKey, ...]:
        """Return all series that have an accepted value in the files of the systems that were used."""
        if self._stores is None:
            return ()
        book = self._stores.book
        systems = dict.fromkeys(job.spec.target.partition.system for job in self.jobs.values())
        return tuple(key for system in systems for key in book.entries(system))

    def baseline_files(self) -> tuple[str, ...]:
        """Return the systems of which there is a file of accepted values."""
        return self._stores.book.systems() if self._stores is not None else ()

    def unaccepted(self) -> frozenset[str]:
        """Return what was judged without an accepted baseline, as ``benchmark: metric``."""
        if self._stores is None:
            return frozenset()
        return frozenset(
            f"{self.jobs[node_id].spec.benchmark}: {metric}"
            for (node_id, metric), standing in self._stores.standings.items()
            if standing in WAITING and node_id in self.jobs
        )

    def history_line(self) -> str:
        """Return how many nights the judge was given, and from which store; empty where it asked for none.

        That a store is empty is of use to know only where another one was meant: of InfluxDB, or on a runner of CI.
        """
        if self._stores is None or not self._stores.past.was_asked:
            return ""
        from pytest_mlhpc.influx.credentials import store_text

        past = self._stores.past
        source = self.settings.history if past.all_from_source else "local"
        if not past.night_count and self.settings.history != "influx" and not os.environ.get("CI"):
            return ""
        return (
            f"history: {count(past.night_count, 'night')} from {store_text(source, self.settings.state_dir)}"
        )

    def baseline_line(self) -> str:
        """Return the one line about baselines that wait to be accepted, or were written; empty if there is none."""
        stores = self._stores
        if stores is None:
            return ""
        if self.settings.baseline == "update":
            files = [os.path.relpath(path) for path in self.changed_files]
            return written_line(stores.standings, stores.epochs, files)
        options, apart = stores.terms.accept_options, stores.terms.apart
        return recorded_line(stores.standings, stores.epochs, self.id, options, apart=apart)

    def _finish(self) -> None:
        if self._stores is not None:
            try:
                self.changed_files = self._stores.close()
            except MlhpcError as error:
                self.trouble.append(str(error))
        if self.revision is not None:
            from pytest_mlhpc.session.revision import remove_own

            self.trouble += remove_own(self.revision)
        resumable = {handle.id for driver in self._drivers.values() for handle in driver.resumable}
        left = [
            one for driver in self._drivers.values() for one in driver.remaining if one.id not in resumable
        ]
        jobs = [one for driver in self._drivers.values() if driver.durable for one in driver.remaining]
        if (unsure := [one for one in jobs if one.id not in resumable]) and not self._detaching:
            names = ", ".join(handle.native_id or handle.id for handle in unsure)
            self.trouble.append(
                f"these jobs may still be running: {names}; the next session or `mlhpc reap` ends them"
            )
        try:
            if self._detaching:
                self._books.detach()
            else:
                self._books.close(resumable, {handle.id for handle in left})
        except StoreError as error:
            self.trouble.append(str(error))

    def _driver(self, partition: Partition, spending: Spending) -> Driver:
        root = run_root(partition, self.settings.state_dir)
        provisioner = self._manager.hook.mlhpc_provisioner(
            partition=partition, state_dir=root, session_id=self.id
        )
        if provisioner is None:
            raise pytest.UsageError(
                f"{partition.id}: no installed provisioner serves scheduler {partition.scheduler!r}"
            )
        from pytest_mlhpc.session.outcome import conclude

        assert self._stores is not None  # noqa: S101 - declare() made it
        books = self._books
        callbacks = Callbacks(
            plan=books.plan,
            submitted=books.submitted,
            accepted=books.accepted,
            ended=books.ended,
            concluded=books.concluded,
            judge=functools.partial(conclude, stores=self._stores),
            beat=books.beat,
            unjudged=spending.ended,
        )
        most = self.settings.max_jobs or partition.max_jobs
        here = self.settings.here
        durable = partition.scheduler != "local" and not here and self.comparison is None
        most = 1 if here else most  # one allocation, whose nodes each run owns
        return Driver(partition.id, provisioner, most, callbacks, pack=self.settings.pack, durable=durable)

    def _begin_records(self) -> None:
        if self._drill:
            return
        try:
            self._manager.hook.mlhpc_records_begin()
        except BaseException as error:  # noqa: BLE001 - as in _publish
            self.trouble.append(f"a receiver of records failed at the beginning: {error!r}")

    def _publish(self, record: Any) -> None:
        if self._drill:
            return
        try:
            self._manager.hook.mlhpc_record(record=record)
        except BaseException as error:  # noqa: BLE001 - a third party's sink, which may also call pytest.fail or sys.exit
            # The record is stored and this is a driver's thread: the session goes on, and its exit code tells.
            self.trouble.append(f"record {record.id} was stored, but a receiver of records failed: {error!r}")

    def _end_records(self, *, hurry: bool) -> None:
        """Last of all, when nothing can be lost any more: receivers may have to send what they got."""
        if self._stores is None or self._drill:
            return
        try:
            self._manager.hook.mlhpc_records_end(tell=self.notes.append, hurry=hurry)
        except BaseException as error:  # noqa: BLE001 - as in _publish
            self.trouble.append(f"a receiver of records failed at the end: {error!r}")

    def _terminate(self) -> None:
        """A runner's time-out leaves jobs elsewhere to a later session; what runs on this machine is cancelled."""
        self._detaching = self.terminated = True


def _runs_of(job: Job) -> int:
    return job.opponent.runs if job.opponent is not None else 1


def _by_partition(jobs: Iterable[Job]) -> list[tuple[Partition, list[Job]]]:
    grouped: dict[str, tuple[Partition, list[Job]]] = {}
    for job in jobs:
        partition = job.spec.target.partition
        grouped.setdefault(partition.id, (partition, []))[1].append(job)
    return list(grouped.values())
