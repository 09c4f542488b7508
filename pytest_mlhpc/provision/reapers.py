"""How jobs of dead sessions are ended, for each scheduler of ours. Nothing is ended that is not surely this user's."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import BY_SSH
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.ledger import NotYet, Prepare, Reaper, prepared
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, same_cluster
from pytest_mlhpc.node.processes import copy_of
from pytest_mlhpc.provision.scheduler.client import UNDER_WAY_S, SchedulerClient, SchedulerJob

if TYPE_CHECKING:
    from pytest_mlhpc.provision.kubernetes.reap import ClusterLocation, OverdueDeletion

#: Folder of a state directory with notes of what stays in clusters (``kubernetes/reap.py``).
KEPT = "kept"


def our_reapers(environ: Mapping[str, str]) -> dict[str, Prepare]:
    """Return scheduler -> reaper for the schedulers of this package; *environ* says how they are reached."""

    def slurm_here(entries: Sequence[LedgerEntry]) -> Reaper:
        from pytest_mlhpc.provision.slurm.commands import CliClient

        client = CliClient(environ)
        return job_reaper(client, entries, cluster=client.cluster)

    def slurm(entries: Sequence[LedgerEntry]) -> Reaper:
        clusters = sorted({_way(entry) for entry in entries})
        makers = {
            name: functools.partial(ssh_reaper, name, environ) if name else slurm_here for name in clusters
        }
        reapers = {
            name: prepared(make, "slurm", [one for one in entries if _way(one) == name])
            for name, make in makers.items()
        }
        return lambda entry: reapers[_way(entry)](entry)

    def kubernetes(_entries: Sequence[LedgerEntry]) -> Reaper:
        from pytest_mlhpc.provision.kubernetes.reap import kubernetes_reaper, location_connector

        return kubernetes_reaper(location_connector(environ))

    def commands(_entries: Sequence[LedgerEntry]) -> Reaper:
        return functools.partial(reap_defined, environ)

    return {"local": local_reaper, "slurm": slurm, "kubernetes": kubernetes, "commands": commands}


def reap_defined(environ: Mapping[str, str], entry: LedgerEntry) -> str:
    """End the job of an allocation whose folder has the definition of its scheduler; return what was done.

    Raises:
        MlhpcError: the scheduler does not answer, or the folder does not say how it is asked.
    """
    from pytest_mlhpc.provision.scheduler.commands import client_of_allocation

    folder = Path(entry.directory)
    try:
        client = client_of_allocation(folder, environ)
    except FileNotFoundError:
        if folder.parent.is_dir() and not entry.native_id:
            return "nothing to cancel: it was never submitted"
        raise MlhpcError(
            f"{folder} does not say how its scheduler is asked: is it on another file system? Run `mlhpc reap` there"
        ) from None
    except (OSError, ValueError) as error:
        raise MlhpcError(f"{folder} does not say how its scheduler is asked: {error}") from error
    return job_reaper(client, [entry])(entry)


def _way(entry: LedgerEntry) -> str:
    """Return the name of the cluster of *entry* if it is reached by ssh, else an empty string."""
    return entry.cluster if entry.cluster.startswith(BY_SSH) else ""


def ssh_reaper(cluster: str, environ: Mapping[str, str], entries: Sequence[LedgerEntry]) -> Reaper:
    """Cancel jobs of a cluster that is reached by ssh, and remove their folders there.

    Raises:
        SchedulerError: there is no connection, or Slurm does not answer.
    """
    from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns, RemoteSlurmClient
    from pytest_mlhpc.provision.ssh import host_of

    destination, _, shared = cluster.removeprefix(BY_SSH).rpartition(":")
    host = host_of(destination, environ)
    cancel = job_reaper(RemoteSlurmClient(host), entries, cluster=lambda: cluster)

    def reaper(entry: LedgerEntry) -> str:
        done = cancel(entry)
        directory = Path(entry.directory)
        runs = RemoteRuns(host, directory.parents[2], shared)
        runs.use(directory)
        runs.remove([directory])
        return done

    return reaper


def clear_retained(state_dir: Path, environ: Mapping[str, str]) -> list[OverdueDeletion]:
    """Delete what sessions of this state directory have left in clusters for inspection, where its time is over."""
    if not (state_dir / KEPT).is_dir():
        return []  # nothing of Kubernetes is imported where there is nothing of it
    from pytest_mlhpc.provision.kubernetes.reap import delete_allocation, delete_overdue, location_connector

    return list(delete_overdue(state_dir, delete_allocation, location_connector(environ), time.time()))


def cluster_name(environ: Mapping[str, str]) -> str:
    """Return the name of the Slurm cluster that *environ* leads to, empty where it has none or does not answer.

    Asked once in a process; where it did not answer, again.
    """
    try:
        return ask_cluster_name(environ)
    except (MlhpcError, OSError):
        return ""


def ask_cluster_name(environ: Mapping[str, str]) -> str:
    """Return the name that the configuration of Slurm gives to the cluster that *environ* leads to.

    Raises:
        SchedulerError: it does not tell.
    """
    # What pytest changes from test to test leads nowhere.
    return _cluster_name(
        tuple(sorted(pair for pair in copy_of(environ).items() if not pair[0].startswith("PYTEST_")))
    )


@functools.lru_cache(maxsize=8)  # exceptions are not stored
def _cluster_name(environ: tuple[tuple[str, str], ...]) -> str:
    from pytest_mlhpc.provision.slurm.commands import CliClient

    return CliClient(dict(environ)).cluster()


def reachable_with(environ: Mapping[str, str]) -> Callable[[LedgerEntry], bool]:
    """Return the question whether an allocation may be one of the cluster that *environ* leads to."""

    def reachable(entry: LedgerEntry) -> bool:
        if entry.scheduler == "kubernetes":
            return leads_there(entry)
        if _way(entry):
            return True  # the entry says how
        return not entry.cluster or same_cluster(entry, cluster_name(environ))

    @functools.cache
    def leads_to(location: ClusterLocation) -> bool:
        from pytest_mlhpc.provision.kubernetes.reap import is_reachable

        return is_reachable(location, environ)

    def leads_there(entry: LedgerEntry) -> bool:
        """Whether the kubeconfig still leads to where *entry* is; where that is unknown, its reaper says why."""
        from pytest_mlhpc.provision.kubernetes.reap import read_location

        try:
            location = read_location(Path(entry.directory))
            return location is None or leads_to(location)
        except (MlhpcError, OSError, ValueError):
            return True

    return reachable


def local_reaper(entries: Sequence[LedgerEntry]) -> Reaper:
    """End the processes of dead sessions on this machine, found by the cookie in their environment."""
    from pytest_mlhpc.provision.guardian import reap_session

    left = {session: reap_session(session) for session in {entry.session for entry in entries} if session}

    def reaper(entry: LedgerEntry) -> str:
        if pids := left.get(entry.session):
            raise MlhpcError(f"processes {', '.join(map(str, pids))} do not end")
        return "its processes were ended, if there were any"

    return reaper


def job_reaper(
    client: SchedulerClient,
    entries: Sequence[LedgerEntry],
    now_ns: Callable[[], int] = time.time_ns,
    cluster: Callable[[], str] = str,
) -> Reaper:
    """Cancel the jobs of *entries* by one query and one call, and wait until they are gone.

    A job is known by its unique name and this user's uid.

    Ids are not asked for: schedulers use them again. A name that is not known means that nothing is left, unless its
    submission may be under way, or it may be a job of another cluster. *cluster* returns this one's name; it is asked
    only where an entry has one.

    Raises:
        SchedulerError: the scheduler does not answer, or refuses.
    """
    from pytest_mlhpc.provision.scheduler.submit import cancel_jobs, own_jobs

    here = cluster() if any(entry.cluster for entry in entries) else ""
    names = {entry.job_name for entry in entries if entry.job_name and entry.cluster in {"", here}}
    found: dict[str, list[SchedulerJob]] = defaultdict(list)
    for job in own_jobs(client, names, ended=True) if names else ():
        found[job.name].append(job)
    live = {job.id: job.name for jobs in found.values() for job in jobs if not job.state.ended}
    if live:
        client.cancel(sorted(live))
    left = cancel_jobs(client, live.values(), cancelled=True)

    def reaper(entry: LedgerEntry) -> str:
        if entry.cluster not in {"", here}:
            raise NotYet(f"it is a job of the cluster {entry.cluster}; run `mlhpc reap` there")
        jobs = found.get(entry.job_name, [])
        if not jobs:
            _surely_ended(entry, now_ns(), client.title)
            return f"nothing to cancel: {client.title} knows no job of this name any more"
        cancelled = [job for job in jobs if not job.state.ended]
        if not cancelled:
            return f"nothing to cancel: job {jobs[-1].id} has ended ({jobs[-1].state.value})"
        done = ", ".join(f"cancelled job {job.id} ({job.state.value})" for job in cancelled)
        if entry.job_name in left:  # it may still write into its folder
            raise NotYet(f"{done}, which {client.title} has not ended yet")
        return done

    return reaper


def _surely_ended(entry: LedgerEntry, now_ns: int, title: str) -> None:
    if not entry.job_name:
        raise MlhpcError(f"it has no name by which {title} could know it")
    # A clock that was set back since must not keep it for ever.
    if not entry.native_id and abs(now_ns - entry.submitted_ns) < UNDER_WAY_S * 1e9:
        raise NotYet(
            f"{title} knows no job of this name, but its submission may be under way; try again in {UNDER_WAY_S:.0f} s"
        )
    if not entry.cluster and _on_another_cluster(entry):
        raise MlhpcError(
            f"{title} knows no job of this name, and {entry.directory} is not visible here: is it a job of another cluster? "
            f"Run `mlhpc reap` there, or make the directory if it was removed"
        )


def _on_another_cluster(entry: LedgerEntry) -> bool:
    """Whether *entry* may lie on a file system of another cluster."""
    folder = Path(entry.directory)
    if not entry.directory or folder.is_dir():
        return False
    # Its session's own folder is here and it is not: the session was killed before it made it, and so before it submitted.
    never_made = not entry.native_id and entry.session in {"", folder.parent.name} and folder.parent.is_dir()
    return not never_made
