"""Checks of Slurm before anything is submitted: missing programs, ignored variables, an upcoming maintenance."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.reapers import ask_cluster_name
from pytest_mlhpc.provision.scheduler.client import (
    PartitionLimits,
    Reservation,
    SchedulerError,
    SchedulerUnreachable,
    SchedulerUnusable,
    SlurmClient,
)
from pytest_mlhpc.provision.slurm.commands import PRESERVED_VARIABLES
from pytest_mlhpc.provision.slurm.options import OTHER_CLUSTER, settings_of
from pytest_mlhpc.store.locations import page

#: The programs that every job needs.
_PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")

#: Pauses between attempts to reach a login node before a session begins, in seconds, each beyond that of ``RemoteHost``. An sshd
#: turns connections away at random while many log in (sshd_config(5), MaxStartups).
CONNECTION_PAUSES_S: Final = (2.5, 5.0, 9.0)


def refuse_unusable(environ: Mapping[str, str]) -> None:
    """Refuse a Slurm that can never be used from here. One that does not answer at present is not refused.

    Raises:
        SchedulerUnusable: a program or the configuration is missing.
        UsageError: the environment names another cluster than slurm.conf.
    """
    path = environ.get("PATH", os.defpath)
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        raise SchedulerUnusable(
            f"Slurm's {', '.join(missing)} cannot be found on PATH ({path}); load Slurm's module, or start pytest on a "
            "login node"
        )
    if file := environ.get("SLURM_CONF"):
        try:
            with Path(file).open("rb"):
                pass
        except OSError as error:
            raise SchedulerUnusable(
                f"Slurm's configuration {file} (SLURM_CONF) cannot be read: {error.strerror}; set SLURM_CONF to the "
                "cluster's slurm.conf, or unset it"
            ) from error
    own = _cluster_name(environ)
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        if environ.get(name, own) != own:
            raise UsageError(f"{name}={environ[name]} in the environment cannot be followed: {OTHER_CLUSTER}")


def refuse_unreachable(client: SlurmClient, sleep: Callable[[float], None] = time.sleep) -> None:
    """Refuse a login node that cannot be reached or used. A Slurm behind it that does not answer at present is not refused.

    Raises:
        SchedulerUnusable: ssh is refused, or a program is missing there.
        SchedulerUnreachable: there was no connection in any of the attempts.
    """
    for pause_s in (*CONNECTION_PAUSES_S, None):
        try:
            client.version()
        except SchedulerUnusable:
            raise
        except SchedulerUnreachable:
            if pause_s is None:
                raise
            sleep(pause_s)
        except SchedulerError:
            return
        else:
            return


def _cluster_name(environ: Mapping[str, str]) -> str:
    """Return the name of the cluster, empty without an answer."""
    try:
        return ask_cluster_name(environ)
    except SchedulerUnusable as error:
        raise SchedulerUnusable(
            f"{error}; Slurm's programs find no configuration that they can use: set SLURM_CONF to the cluster's "
            "slurm.conf, or start pytest on a login node"
        ) from error
    except SchedulerError:
        return ""


def unused_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a line that names the set variables of sbatch that have no effect; no line without such."""
    names = sorted(name for name in environ if name.startswith("SBATCH_") and environ[name])
    names = [
        name for name in names if name not in PRESERVED_VARIABLES and "_BIND" not in name
    ]  # a surrounding job sets those
    if not names:
        return []
    line = f"{', '.join(names)}: not used, as jobs are what systems.yaml says; there ${{{names[0]}}} can be written"
    return [f"{line} ({page('slurm')})"]


def maintenances(
    specs: Sequence[JobSpec], client_of: Callable[[Partition], SlurmClient], now_ns: int, until_ns: int
) -> list[Reservation]:
    """Return the maintenances that Slurm announces and that leave too few nodes to the largest of *specs*.

    Those that begin before *until_ns* may do so together. All *specs* are of one partition. Costs one query, two where a
    maintenance is announced. Where Slurm does not answer there are none: the submission reports that.

    Raises:
        SchedulerUnusable: a program or the configuration of Slurm is missing here.
    """
    partition = specs[0].target.partition
    settings = settings_of(partition)
    try:
        client = client_of(partition)
        announced = upcoming_maintenance(client.reservations(), settings.reservation, now_ns)
        if not announced or not settings.partition:
            return []
        limits, nodes = client.partition(settings.partition), max(one.nodes for one in specs)
    except SchedulerUnusable:
        raise
    except SchedulerError:
        return []
    near = blocking_maintenance([one for one in announced if one.start_ns < until_ns], limits, nodes)
    return [one for one in announced if one is near or blocking_maintenance([one], limits, nodes) is not None]


def upcoming_maintenance(reservations: Sequence[Reservation], own: str, now_ns: int) -> list[Reservation]:
    """Return maintenances that are not over, other than those that *own* names."""
    return [
        one
        for one in reservations
        if "MAINT" in one.flags and one.name not in own.split(",") and one.end_ns > now_ns
    ]


def blocking_maintenance(
    near: Sequence[Reservation], limits: PartitionLimits, nodes: int
) -> Reservation | None:
    """Return the maintenance that ends last of those that leave fewer than *nodes* nodes to the partition, or None."""
    taken = {name for one in near for name in one.nodes}
    if len(set(limits.nodes) - taken) >= nodes:
        return None
    touching = [one for one in near if set(one.nodes) & set(limits.nodes)]
    return max(touching, key=lambda one: one.end_ns, default=None)
