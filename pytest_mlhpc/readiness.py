"""Which nodes are fit, over sessions: what vetting is told of earlier ones, who is kept out, and what is kept of this one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.jobs.vetting import report_of, settings_of, verdict_of
from pytest_mlhpc.system.model import Partition

if TYPE_CHECKING:
    from pytest_mlhpc.vet.settings import Settings


class Readiness:
    """One for each session; called by the threads of its queues. ``trouble`` gets what cannot be read or kept.

    Nothing of the past is read where nothing is vetted.
    """

    def __init__(self, state_dir: Path, session_id: str, trouble: list[str]) -> None:
        self._state_dir, self._session_id, self._trouble = state_dir, session_id, trouble
        self._lock = threading.Lock()
        self._away: dict[str, dict[str, str]] = {}  #: partition -> node -> why it is kept out

    def settings(self, spec: JobSpec) -> Settings | None:
        """Return how the nodes of *spec* are vetted, with what this site has learned of them; None: not at all.

        Raises:
            ConfigError: the partition's policy file is missing or wrong.
        """
        if spec.vet_level == "off":
            return None
        from pytest_mlhpc.vet.command.history import learned

        partition = spec.target.partition
        try:
            known = learned(
                self._state_dir, partition.system, partition.name, time.time_ns(), on_problem=self._tell
            )
        except (MlhpcError, OSError) as error:
            self._tell(f"what earlier vettings found cannot be used: {error}")
            known = ()
        return settings_of(spec, known)

    def kept_out(self, spec: JobSpec) -> dict[str, str]:
        """Return nodes that jobs like *spec* keep away from, each with what an earlier vetting found; asked once a session.

        None are where too few others would be left, and where one node is asked for by name.
        """
        partition = spec.target.partition
        if partition.vet.level == "off" or spec.node or partition.scheduler == "local":
            return {}
        with self._lock:
            if partition.id not in self._away:
                self._away[partition.id] = self._read(partition)
            away = self._away[partition.id]
        return dict(away) if len(away) + spec.nodes <= partition.nodes.max else {}

    def _read(self, partition: Partition) -> dict[str, str]:
        from pytest_mlhpc.vet.command.history import excluded

        try:
            return excluded(
                self._state_dir, partition.system, partition.name, time.time_ns(),
                exclude_s=partition.vet.exclude_for_s, on_problem=self._tell,
            )  # fmt: skip
        except (MlhpcError, OSError) as error:
            self._tell(f"which nodes to keep away from cannot be read: {error}")
            return {}

    def keep(self, spec: JobSpec, attempt: Attempt) -> None:
        """Keep what vetting found of the nodes of *attempt*, if its run is the one that was told everything."""
        verdict, report = verdict_of(attempt), report_of(attempt)
        if verdict is None or report is None:
            return
        from pytest_mlhpc.vet.command.history import Vetting, keep

        settings = settings_of(spec)
        if settings is None:
            return
        partition = spec.target.partition
        identity = str((attempt.vetted or {}).get("id") or attempt.run.run_id)
        vetting = Vetting(
            identity,
            verdict,
            report,
            settings,
            partition.system,
            partition.name,
            attempt.ended_ns or time.time_ns(),
        )
        try:
            keep(self._state_dir, vetting, self._session_id)
        except (MlhpcError, OSError) as error:
            self._tell(f"what vetting found cannot be kept: {error}")

    def _tell(self, problem: str) -> None:
        if problem not in self._trouble:
            self._trouble.append(problem)
