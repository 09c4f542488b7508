"""The benchmark session: takes the declared jobs, keeps the queues full, hands out results in test order, closes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import MlhpcError, StoreError, UsageError
from pytest_mlhpc.jobs.identity import uuid7
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.ledger import Ledger, reap_expired
from pytest_mlhpc.jobs.places import SOURCE, has_this_package, root_of
from pytest_mlhpc.jobs.planning import plan_of
from pytest_mlhpc.jobs.queue import Callbacks, Driver
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.jobs.submitted import entry_of
from pytest_mlhpc.launch import OURS
from pytest_mlhpc.options import Settings
from pytest_mlhpc.provenance import provenance_of
from pytest_mlhpc.results.outcome import Outcome
from pytest_mlhpc.system.model import Partition

if TYPE_CHECKING:
    import pluggy

    from pytest_mlhpc.conclude import Concluder
    from pytest_mlhpc.worker.workloads.definitions import Workload

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
    ) -> None:
        self.id = uuid7()
        self.settings = settings
        self.jobs: dict[str, Job] = {}
        self.deselected: list[str] = []  #: lines of tests that no selected target can run
        self.changed_files: tuple[Path, ...] = ()
        self.trouble: list[str] = []  #: what went wrong on closing, for the summary
        self._manager = manager
        self._workloads = workloads
        self._root = root
        self._drivers: dict[str, Driver] = {}
        self._ledger = Ledger(settings.state_dir, self.id)
        self._ledger_lock = threading.Lock()
        self._concluder: Concluder | None = None
        self._payloads: dict[tuple[str, ...], str] = {}
        self._roots: set[Path] = set()  #: folders that nodes see, each with our runs in it
        self._old_sigterm: Any = None
        self._closed = False

    def declare(self, specs: Sequence[JobSpec]) -> None:
        """Take the jobs of all tests that will run, in test order, and start submitting them. The first call counts.

        Raises:
            ConfigError: a baseline file is damaged; nothing was started.
        """
        if self.jobs or not specs or self._closed:
            return
        from pytest_mlhpc.conclude import Concluder

        provenance = provenance_of(self._root)
        self._concluder = Concluder(self.settings, self.id, provenance, self._publish)
        self._concluder.book.problems(sorted({spec.target.partition.system for spec in specs}))
        self._reap()
        self._catch_sigterm()
        self.jobs = {spec.node_id: Job(spec) for spec in specs}
        for partition, jobs in _by_partition(self.jobs.values()):
            self._drivers[partition.id] = self._driver(partition)
            self._drivers[partition.id].add(jobs)
        for driver in self._drivers.values():
            driver.start()

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
        job.taken = True
        return job.outcome

    def test_over(self, node_id: str) -> None:
        """Cancel the job of a test that ended without taking its result."""
        job = self.jobs.get(node_id)
        if job is not None and not job.taken and not job.done.is_set():
            self._drivers[job.spec.target.partition.id].cancel(
                job, "its test ended without taking the result"
            )

    def stop(self, reason: str) -> None:
        """Cancel everything that no test has taken: the session is about to end."""
        for job in self.jobs.values():
            if not job.taken and not job.done.is_set():
                self._drivers[job.spec.target.partition.id].cancel(job, reason)

    def close(self) -> None:
        """Cancel what has not ended, write baselines, give everything back. Idempotent.

        What cannot be written is added to ``trouble``.
        """
        if self._closed:
            return
        self._closed = True
        with self._sigterm_ignored():
            for driver in self._drivers.values():
                driver.close()
            for driver in self._drivers.values():
                if driver.ident is None:
                    driver.run()  # never started, as another could not be made: it only closes
                else:
                    driver.join()
                if driver.crash:
                    self.trouble.append(f"internal error in {driver.name}:\n{driver.crash}")
            self._finish()

    @property
    def crashed(self) -> bool:
        """Whether a queue stopped by an error of our own."""
        return any(driver.crash for driver in self._drivers.values())

    def measured(self) -> bool:
        """Whether any test took a measurement."""
        return any(job.taken and job.outcome and job.outcome.measurement for job in self.jobs.values())

    def unused_baselines(self) -> tuple[str, ...]:
        """Return baseline entries that no test asked for, as ``benchmark: metric``."""
        if self._concluder is None:
            return ()
        return tuple(f"{key.benchmark}: {key.metric}" for key in self._concluder.book.unused())

    def _finish(self) -> None:
        if self._concluder is not None:
            try:
                self.changed_files = self._concluder.close()
            except MlhpcError as error:
                self.trouble.append(str(error))
        try:
            with self._ledger_lock:
                self._ledger.close()
        except StoreError as error:
            self.trouble.append(str(error))

    def _driver(self, partition: Partition) -> Driver:
        root = root_of(partition, self.settings.state_dir)
        self._roots.add(root)
        provisioner = self._manager.hook.mlhpc_provisioner(
            partition=partition, state_dir=root, session_id=self.id
        )
        if provisioner is None:
            raise pytest.UsageError(f"{partition.id}: nobody serves scheduler {partition.scheduler!r}")
        assert self._concluder is not None  # noqa: S101 - declare() made it
        callbacks = Callbacks(
            self._plan, self._submitted, self._accepted, self._ended, self._concluder.conclude
        )
        return Driver(partition.id, provisioner, self.settings.max_jobs or partition.max_jobs, callbacks)

    def _plan(self, specs: Sequence[tuple[JobSpec, int]], excluded: Sequence[str]) -> Plan:
        root = root_of(specs[0][0].target.partition, self.settings.state_dir)
        return plan_of(specs, root / "runs" / self.id, self._payload(specs[0][0], root), excluded)

    def _payload(self, spec: JobSpec, root: Path) -> str:
        """Return the hash of the payload that *spec* needs; a program that is started directly needs none."""
        local = spec.target.partition.scheduler == "local"
        if local and spec.workload == "command" and spec.launcher == "plain":
            return ""
        if not local and has_this_package(spec.target.environment):
            return SOURCE
        foreign = () if spec.launcher in OURS else (spec.launcher,)
        key = (str(root), *self._workloads[spec.workload].extra_modules, *foreign)
        if key not in self._payloads:
            from pytest_mlhpc import payload

            self._payloads[key] = payload.build(root, key[1:]).sha256
        return self._payloads[key]

    def _submitted(self, specs: Sequence[JobSpec], plan: Plan) -> None:
        with self._ledger_lock:
            self._ledger.submitted(entry_of(plan, specs, self.id))

    def _accepted(self, allocation_id: str, native_id: str) -> None:
        with self._ledger_lock, self._telling():
            self._ledger.accepted(allocation_id, native_id)

    def _ended(self, allocation_id: str) -> None:
        for root in self._roots:
            self._remove_data(root / "runs" / self.id / allocation_id)
        with self._ledger_lock, self._telling():  # the job is over all the same, and the others go on
            self._ledger.ended(allocation_id)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell once at the end what cannot be written now."""
        try:
            yield
        except StoreError as error:
            if str(error) not in self.trouble:
                self.trouble.append(str(error))

    def _publish(self, record: Any) -> None:
        try:
            self._manager.hook.mlhpc_record(record=record)
        except BaseException as error:  # noqa: BLE001 - a third party's sink, which may also call pytest.fail or sys.exit
            # The record is stored and this is a driver's thread: the session goes on, and its exit code tells.
            self.trouble.append(f"record {record.id} was stored, but a receiver of records failed: {error!r}")

    def _reap(self) -> None:
        from pytest_mlhpc.provision.guardian import reap_session

        for session_id in reap_expired(self.settings.state_dir, reap_session, self.trouble.append):
            for directory in (self.settings.state_dir / "runs" / session_id).glob("*"):
                self._remove_data(directory)

    def _remove_data(self, directory: Path) -> None:
        """Remove the synthetic set that a run has made for itself; plan and logs stay."""
        try:
            shutil.rmtree(directory / "data")
        except FileNotFoundError:
            return
        except OSError as error:
            self.trouble.append(f"{error.filename} cannot be removed: {error.strerror}; please do")

    def _catch_sigterm(self) -> None:
        """A runner's time-out ends the session like Ctrl-C: what was submitted is cancelled."""
        if threading.current_thread() is threading.main_thread():
            self._old_sigterm = signal.signal(signal.SIGTERM, _on_sigterm)

    @contextlib.contextmanager
    def _sigterm_ignored(self) -> Iterator[None]:
        """While closing, a second SIGTERM changes nothing; a second Ctrl-C leaves the rest to the guardian."""
        if self._old_sigterm is None:
            yield
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._old_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    del number, frame
    pytest.exit("SIGTERM: cancelling what was submitted", returncode=int(pytest.ExitCode.INTERRUPTED))


def _by_partition(jobs: Iterable[Job]) -> list[tuple[Partition, list[Job]]]:
    grouped: dict[str, tuple[Partition, list[Job]]] = {}
    for job in jobs:
        partition = job.spec.target.partition
        grouped.setdefault(partition.id, (partition, []))[1].append(job)
    return list(grouped.values())
