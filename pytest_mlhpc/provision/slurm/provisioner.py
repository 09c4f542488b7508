"""Provisioner `slurm`: jobs as of any scheduler, within the limits that Slurm's partition and QoS set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.jobs.provisioner import MonotonicClock
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.scheduler.client import (
    PartitionLimits,
    QosLimits,
    SchedulerError,
    SchedulerUnavailable,
    SlurmClient,
)
from pytest_mlhpc.provision.scheduler.provisioner import JobProvisioner
from pytest_mlhpc.provision.slurm.options import (
    SlurmSettings,
    beyond_limits,
    longest_allocation_s,
    settings_of,
)
from pytest_mlhpc.provision.slurm.script import SLURM

if TYPE_CHECKING:
    from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns


class SlurmProvisioner(JobProvisioner):
    """Runs plans in Slurm jobs.

    Args:
        partition: the partition of systems.yaml.
        client: how Slurm is reached.
        payload: sha256 -> path of the zip; None where a plan needs none.
        runs: copies the folders of runs to nodes that do not see them; None: they do.
    """

    def __init__(
        self,
        partition: Partition,
        client: SlurmClient,
        payload: Callable[[str], Path | None],
        clock: MonotonicClock | None = None,
        runs: RemoteRuns | None = None,
    ) -> None:
        self._settings: SlurmSettings = settings_of(partition)
        super().__init__(
            partition,
            client,
            payload,
            rules=SLURM,
            pending_limit_s=self._settings.pending_limit_s,
            energy=self._settings.energy,
            clock=clock,
            runs=runs,
        )
        self._slurm = client
        self._limits: dict[str, tuple[PartitionLimits | None, QosLimits | None] | None] = {}  #: by QoS

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* is beyond the limits of systems.yaml, the partition or its QoS, or an empty string."""
        settings = settings_of(self._partition, spec.scheduler_options)
        return beyond_limits(spec, self._partition, settings, *self._known_limits(settings.qos))

    def longest(self) -> float | None:
        """Return the longest allocation that systems.yaml, the partition and its QoS give, in seconds; None: any."""
        return longest_allocation_s(self._settings, *self._known_limits(self._settings.qos))

    def _known_limits(self, qos: str) -> tuple[PartitionLimits | None, QosLimits | None]:
        if self._limits.get(qos) is None:
            self._limits[qos] = self._ask_limits(self._settings.partition, qos)
        return self._limits[qos] or (None, None)

    def _ask_limits(self, partition: str, qos: str) -> tuple[PartitionLimits | None, QosLimits | None] | None:
        """Return the limits of partition and QoS; none where Slurm refuses; None where it does not answer.

        In both cases the submission itself is refused by Slurm where it is beyond a limit.
        """
        if self._backoff.waits():
            return None
        try:
            limits = self._slurm.partition(partition) if partition else None
            return limits, self._slurm.qos(qos) if qos else None
        except SchedulerUnavailable as error:
            self._backoff.failed("investigate", error)
            return None
        except SchedulerError:
            return None, None
