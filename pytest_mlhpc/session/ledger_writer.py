"""What the queues of a session write: plans, payloads, the ledger; and what they adopt from earlier sessions."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, ledger_entry
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.spec import FROM_SOURCE, JobSpec, has_this_package, run_root
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.node.launch import LAUNCHERS
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.options import Settings
from pytest_mlhpc.provision.payload import make_session_directory, write_private
from pytest_mlhpc.vetting.reuse import Readiness

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Partition
    from pytest_mlhpc.jobs.resume import Resumed
    from pytest_mlhpc.node.worker.workloads.definitions import Workload
    from pytest_mlhpc.store.record import Provenance
    from pytest_mlhpc.store.store import Drill


class LedgerWriter:
    """Writes for all queues of a session; their threads call it. ``trouble`` gets the errors of what cannot be written."""

    def __init__(
        self, settings: Settings, session_id: str, workloads: Mapping[str, Workload], trouble: list[str]
    ) -> None:
        self._settings = settings
        self._session_id = session_id
        self._workloads = workloads
        self._trouble = trouble
        self.readiness = Readiness(settings.state_dir, session_id, trouble)
        self._ledger = Ledger(settings.state_dir, session_id)
        self.provenance: Provenance | None = None  #: known once there is something to submit
        self.drill: Drill | None = None  #: set as above
        #: How long a run's timed steps take, as the baselines say, in seconds; set as above.
        self.usual: Callable[[JobSpec], float | None] = lambda _spec: None
        self._cluster: str | None = None
        self._lock = threading.Lock()
        self._payloads: dict[tuple[str, ...], str] = {}
        self._folders: dict[str, Path] = {}  #: allocation id -> its directory

    def plan(self, specs: Sequence[tuple[JobSpec, int]], excluded: Sequence[str]) -> Plan:
        """Return the plan of attempts (spec, number) that share an allocation; see ``jobs/plan.py``."""
        first = specs[0][0]
        root = run_root(first.target.partition, self._settings.state_dir)
        runs_dir = root / "runs" / self._session_id
        away = sorted({*excluded, *self.readiness.excluded(first)})
        return plan_of(
            specs,
            runs_dir,
            self._payload([spec for spec, _ in specs], root),
            away,
            self.readiness.settings(first),
            usual=self._usual,
            fault=self.drill.fault if self.drill else None,
        )

    def _usual(self, spec: JobSpec) -> float | None:
        try:
            return self.usual(spec)
        except MlhpcError:  # a baseline file was sound when the session began; judging says it
            return None

    def note(self, content: Mapping[str, Any]) -> None:
        """Write down what was known before anything was submitted: ``session.json`` beside the session's runs.

        Nothing is written where nothing is charged: such a session may have no files at all.
        """
        if not any(content.values()):
            return
        folder = self._settings.state_dir / "runs" / self._session_id
        try:
            make_session_directory(folder)
            text = json.dumps({"schema": 1, "session": self._session_id, **content}, indent=1)
            write_private(folder / "session.json", text + "\n")
        except OSError as error:
            self._trouble.append(f"cannot write {folder / 'session.json'}: {error.strerror}")

    def start(self) -> None:
        """Make the session's file before anything is submitted.

        Raises:
            StoreError: it cannot be made.
        """
        with self._lock:
            self._ledger.start(durable=False)

    def submitted(self, specs: Sequence[JobSpec], plan: Plan) -> None:
        """Write an allocation down before it is submitted.

        Raises:
            StoreError: it cannot be; do not submit it.
        """
        cluster = self._cluster_of(specs[0].target.partition)  # not under the lock: Slurm may take its time
        with self._lock:
            self._folders[plan.allocation_id] = Path(plan.directory)
            entry = ledger_entry(plan, specs, self._session_id, provenance=self.provenance, cluster=cluster)
            # What a session inside an allocation starts is this session's own, as on `local`: no reaper may take the user's allocation for ours.
            self._ledger.submitted(replace(entry, scheduler="local") if self._settings.here else entry)

    def _cluster_of(self, partition: Partition) -> str:
        """Return the cluster's own name; asked once, also where nobody answers."""
        if partition.scheduler != "slurm" or self._settings.here:
            return ""
        if partition.cluster:
            return partition.cluster
        if self._cluster is None:
            from pytest_mlhpc.provision.reapers import cluster_name

            self._cluster = cluster_name(os.environ)
        return self._cluster

    def accepted(self, allocation_id: str, native_id: str) -> None:
        """Note the scheduler's own id."""
        if self._settings.here:
            return
        with self._lock, self._telling():
            self._ledger.accepted(allocation_id, native_id)

    def ended(self, allocation_id: str) -> None:
        """Note that nothing is left of an allocation and nobody needs its results any more."""
        with self._lock:
            folder = self._folders.pop(allocation_id, None)
            with self._telling():  # the job is over all the same, and the others go on
                self._ledger.ended(allocation_id)
        if folder is not None:
            self._remove_data(folder)

    def concluded(self, run_ids: Sequence[str]) -> None:
        """Note that runs were judged and recorded, or are not wanted: no later session is to give them out again."""
        with self._lock, self._telling():
            self._ledger.concluded(run_ids)

    def beat(self) -> bool:
        """Tell other hosts that this session lives; return whether its jobs are still its own."""
        with self._lock:
            return self._ledger.beat()

    def take_over(self, jobs: Iterable[Job]) -> tuple[Resumed, list[str]]:
        """End what nobody watches any more, and take over what *jobs* want of it; return that, and a line for each end.

        Raises:
            StoreError: the ledgers cannot be read or written; nothing is lost.
        """
        from pytest_mlhpc.jobs.ledger import reap, reap_expired_leases
        from pytest_mlhpc.jobs.resume import is_needed_by, resume_entries
        from pytest_mlhpc.provision.reapers import clear_retained, our_reapers, reachable_with
        from pytest_mlhpc.session.revision import remove_left

        jobs = list(jobs)
        reapers = our_reapers(os.environ)
        wanted = is_needed_by(() if self._settings.here else jobs)
        reachable = reachable_with(os.environ)
        only = self._settings.resume
        with self._lock:
            adoption, reaped = reap_expired_leases(
                self._ledger,
                reapers,
                lambda entry: wanted(entry) and (not only or entry.session == only),
                reachable,
            )
            recovered = resume_entries(adoption.adopted, jobs, self._recorded(adoption.adopted))
            why = {name: reason for name, (_, reason) in recovered.unusable.items()}
            reaped += reap(self._ledger, [entry for entry, _ in recovered.unusable.values()], why, reapers)
            for entry in adoption.adopted:
                self._folders[entry.id] = Path(entry.directory)
        self._trouble += [str(one) for one in reaped if not (one.ended or one.later)]
        self._trouble += adoption.notes
        self._trouble += [f"{name}: {why}; it stays in the ledger" for name, why in recovered.unseen.items()]
        messages = [
            f"{'reaped' if one.ended else 'not yet reaped:'} {clean(str(one))}"
            for one in reaped
            if (one.ended or one.later) and one.entry.scheduler != "local"
        ]
        messages += [clean(str(one)) for one in clear_retained(self._settings.state_dir, os.environ)]
        state_dir = self._settings.state_dir
        roots = {state_dir, *(run_root(job.spec.target.partition, state_dir) for job in jobs)}
        self._trouble += remove_left(sorted(roots), state_dir, self._session_id)
        return recovered, messages

    def _recorded(self, entries: Sequence[LedgerEntry]) -> Callable[[str], bool]:
        """Return the question whether a run was recorded; the store is opened only where there is something to ask."""
        if not entries:
            return lambda _run_id: False
        from pytest_mlhpc.store.index import Index

        concluded = {run_id for entry in entries for run_id in entry.concluded}
        index = Index(self._settings.state_dir)
        try:
            known = {run.run_id for entry in entries for run in entry.runs if index.has(run.run_id)}
        finally:
            index.close()
        return (concluded | known).__contains__

    def lease(self) -> None:
        """Write down at once that what is open may stand for a while, whatever becomes of this session.

        Raises:
            StoreError: that cannot be written down: the next session takes this one for dead.
        """
        with self._lock:
            self._ledger.lease(self._until_ns())

    def detach(self) -> None:
        """Leave what is open to a later session.

        Raises:
            StoreError: that cannot be written down: the next session takes this one for dead.
        """
        with self._lock:
            self._ledger.detach(self._until_ns())

    def close(self, resumable: Collection[str] = (), unsure: Collection[str] = ()) -> None:
        """Put the ledger aside if all has ended; the allocations *resumable* are left to a later session, *unsure* for it to end.

        Raises:
            StoreError: it cannot be put aside; the next session will do so.
        """
        with self._lock:
            if resumable:
                self._ledger.release(resumable, self._until_ns())
            if unsure:
                self._ledger.release(unsure, 0)
            self._ledger.close()

    def _until_ns(self) -> int:
        return self._ledger.until(self._settings.lease_s)

    def payload(self, root: Path) -> str:
        """Return the hash of the payload below *root* for what this machine does before anything is submitted.

        Raises:
            ProvisionError: it cannot be written.
        """
        from pytest_mlhpc.provision import payload

        if (str(root),) not in self._payloads:
            self._payloads[str(root),] = payload.build(root, ()).sha256
        return self._payloads[str(root),]

    def _payload(self, specs: Sequence[JobSpec], root: Path) -> str:
        """Return the hash of the payload that *specs* need; a program that is started directly, by itself, needs none."""
        spec, alone = specs[0], len(specs) == 1
        local = spec.target.partition.scheduler == "local"
        if local and alone and spec.workload == "command" and spec.launcher == "plain" and not spec.builds:
            return ""
        ours = all(has_this_package(one.target.environment) for one in specs)
        shares_files = (
            spec.target.partition.scheduler in {"slurm", "commands"} and not spec.target.partition.apart
        )
        if shares_files and ours:
            return FROM_SOURCE  # pods have a file system of their own
        foreign = () if spec.launcher in LAUNCHERS else (spec.launcher,)
        extra = (*self._workloads[spec.workload].extra_modules, *foreign)
        if (str(root), *extra) not in self._payloads:
            from pytest_mlhpc.provision import payload

            self._payloads[str(root), *extra] = payload.build(root, extra).sha256
        return self._payloads[str(root), *extra]

    def _remove_data(self, directory: Path) -> None:
        """Remove the synthetic set that a run has made for itself; plan and logs stay."""
        for folder in (directory, *directory.glob("*-*-*-*-*")):
            try:
                shutil.rmtree(folder / "data")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                self._trouble.append(f"{error.filename} cannot be removed: {error.strerror}; please do")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell once at the end what cannot be written now."""
        try:
            yield
        except StoreError as error:
            if str(error) not in self._trouble:
                self._trouble.append(str(error))
