"""The client that uses pyslurm, which must be built for the cluster's own release; see choose.py.

What pyslurm cannot do (the limits of a QoS, some options of a job) is asked of Slurm's commands. Its calls run in this
process and end by Slurm's own time limit, MessageTimeout, twice at most. Exit codes of 128 and more lose 128 in it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from pytest_mlhpc.provision.slurm import calls, pyslurm_options, pyslurm_records, text
from pytest_mlhpc.provision.slurm.cli import CliClient, expanded
from pytest_mlhpc.provision.slurm.client import (
    Job,
    Node,
    PartitionLimits,
    QosLimits,
    Reservation,
    SlurmRefused,
    SlurmUnavailable,
    State,
    Step,
    Submission,
)

T = TypeVar("T")

#: Words of errors for jobs and steps that have ended or never were.
_GONE = ("invalid job id specified", "already completing or completed", "does not exist", "not found")


class PyslurmClient:
    """Asks Slurm by its library. See SlurmClient for what each method returns and raises."""

    name: str = "pyslurm"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        # Importing it without a cluster ends the process: only after choose.probe().
        self._pyslurm: Any = importlib.import_module("pyslurm")
        self._environ = os.environ if environ is None else environ
        self._cli = CliClient(environ)
        self.calls: dict[str, int] = self._cli.calls

    def version(self) -> str:
        """Return the version of the cluster's commands, which is that of the library: choose.py compared them."""
        return self._cli.version()

    def submit(self, submission: Submission) -> str:
        """Submit the script; by sbatch if it asks for what pyslurm cannot say."""
        try:
            script = submission.script.read_text(encoding="utf-8")
            wanted = pyslurm_options.attributes(script, self._environ)
        except (OSError, ValueError):  # CannotSayError, or shlex's: sbatch names what is wrong, or can do it
            return self._cli.submit(submission)
        wanted.setdefault("working_directory", str(submission.directory))
        wanted["script"] = str(submission.script)
        return str(self._ask("submit", lambda: self._pyslurm.JobSubmitDescription(**wanted).submit()))

    def jobs(self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = "") -> list[Job]:
        """Return jobs with one of *ids* or of *names* (all if neither is given) of *user* (anyone if not given)."""
        if not (ids or names or user):
            raise ValueError("jobs() needs a filter")
        return [
            pyslurm_records.job(job)
            for job in self._all_jobs()
            if (not (ids or names) or str(job.id) in ids or job.name in names)
            and (not user or user in {job.user_name, str(job.user_id)})
        ]

    def queue(self, partition: str) -> list[Job]:
        """Return all users' pending jobs of *partition*, highest priority first."""
        found = [
            pyslurm_records.job(job)
            for job in self._all_jobs()
            if partition in (job.partition or "").split(",") and text.state(job.state or "") is State.PENDING
        ]
        return sorted(found, key=lambda job: -job.priority)

    def _all_jobs(self) -> list[Any]:
        return self._ask("Jobs.load", lambda: list(self._pyslurm.Jobs.load().values()))

    def accounting(self, ids: Collection[str]) -> list[Job]:
        """Return jobs with their steps from slurmdbd."""
        if not ids:
            return []
        wanted = [int(job) for job in ids]
        db = self._pyslurm.db
        try:
            found = self._ask("db.Jobs.load", lambda: list(db.Jobs.load(db.JobFilter(ids=wanted)).values()))
        except SlurmRefused as error:  # without slurmdbd, or none reached, it only says that it failed
            raise SlurmUnavailable(str(error)) from error
        return [pyslurm_records.accounted(job) for job in found]

    def steps(self, ids: Collection[str]) -> dict[str, tuple[Step, ...]]:
        """Return job id -> its running steps."""
        found = self._ask("JobSteps.load_all", self._pyslurm.JobSteps.load_all)
        return {
            str(job): tuple(pyslurm_records.step(step) for step in steps.values())
            for job, steps in found.items()
            if str(job) in ids
        }

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs or steps, or send them *signal* ("TERM")."""
        for word in ids:
            job, _, step = word.partition(".")
            if not job.isdecimal():
                raise SlurmRefused(f"{word!r} is no job or step id")
            self._end(int(job), step, f"SIG{signal.removeprefix('SIG')}" if signal else "")

    def _end(self, job: int, step: str, signal: str) -> None:
        if step:
            it = self._pyslurm.JobStep(job, int(step) if step.isdecimal() else step)
        else:
            it = self._pyslurm.Job(job)
        try:
            self._ask("cancel", lambda: it.send_signal(signal) if signal else it.cancel())
        except SlurmRefused as error:
            if not any(words in str(error).lower() for words in _GONE):
                raise

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """Return the named nodes, or all; names that Slurm does not know are not in the answer."""
        found = self._ask("Nodes.load", lambda: list(self._pyslurm.Nodes.load().values()))
        return [pyslurm_records.node(node) for node in found if not names or node.name in names]

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes; *reason* becomes one line."""
        line = " ".join(reason.split())
        if not line:
            raise ValueError("Slurm drains no node without a reason")
        for name in names:
            self._modify(name, state="DRAIN", reason=line)

    def resume(self, names: Collection[str]) -> None:
        """Return drained and down nodes to service; others are left alone, for Slurm would refuse them."""
        for node in self.nodes(names) if names else []:
            if node.state in {"down", "error"} or node.flags & {"drain", "fail"}:
                self._modify(node.name, state="RESUME")

    def _modify(self, name: str, **changes: str) -> None:
        node = self._pyslurm.Node
        self._ask("Node.modify", lambda: node(name).modify(node(**changes)))

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits."""
        return pyslurm_records.partition(
            self._ask("Partition.load", lambda: self._pyslurm.Partition.load(name))
        )

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits, from sacctmgr: pyslurm tells none."""
        return self._cli.qos(name)

    def reservations(self) -> list[Reservation]:
        """Return all reservations; of their flags MAINT alone."""
        maintenance = self._pyslurm.ReservationFlags.MAINTENANCE
        found = self._ask("Reservations.load", lambda: list(self._pyslurm.Reservations.load().values()))
        return [pyslurm_records.reservation(one, maintenance in one.flags) for one in found]

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list; asks nobody."""
        return expanded(hostlist)

    def _ask(self, function: str, ask: Callable[[], T]) -> T:
        """Call pyslurm and turn its errors into ours, in its own words."""
        self.calls[function] += 1
        try:
            return ask()
        except (self._pyslurm.PyslurmError, ValueError, TypeError, OverflowError) as error:
            kind = SlurmUnavailable if calls.no_answer(str(error)) else SlurmRefused
            raise kind(f"pyslurm {function}: {error}") from error
