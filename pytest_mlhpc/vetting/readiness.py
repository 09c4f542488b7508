"""Which nodes are fit, over sessions: what vetting is told of earlier ones, who is kept out, and what is kept of this one."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.job import Attempt
from pytest_mlhpc.jobs.plan import node_report, node_verdict, probe_verdict, vetting_settings
from pytest_mlhpc.jobs.spec import JobSpec

if TYPE_CHECKING:
    from pytest_mlhpc.node.protocol.plan import Learned, VetSettings


class Readiness:
    """One for each session; called by the threads of its queues. ``trouble`` gets what cannot be read or kept.

    Nothing of the past is read where nothing is vetted.
    """

    def __init__(self, state_dir: Path, session_id: str, trouble: list[str]) -> None:
        self._state_dir, self._session_id, self._trouble = state_dir, session_id, trouble
        self._lock = threading.Lock()
        self._away: dict[str, dict[str, str]] = {}  #: partition -> node -> why it is kept out
        self._learned: dict[str, tuple[Learned, ...]] = {}  #: partition -> what good nodes reach there

    def settings(self, spec: JobSpec) -> VetSettings | None:
        """Return how the nodes of *spec* are vetted, with what this site has learned of them; None: not at all.

        Raises:
            ConfigError: the partition's policy file is missing or wrong.
        """
        if spec.vet_level == "off":
            return None
        partition = spec.target.partition
        with self._lock:
            if partition.id not in self._learned:
                self._learned[partition.id] = self._learn(partition)
            known = self._learned[partition.id]
        return vetting_settings(spec, known)

    def _learn(self, partition: Partition) -> tuple[Learned, ...]:
        from pytest_mlhpc.vetting.history import learned

        now_ns = time.time_ns()
        # A scheduler chooses nodes later; this machine is known, and alone it has only its own figures.
        hosts = (os.uname().nodename,) if partition.scheduler == "local" else ()
        try:
            return learned(
                self._state_dir, partition.system, partition.name, now_ns, hosts=hosts, on_problem=self._tell
            )
        except (MlhpcError, OSError) as error:
            self._tell(f"what earlier vettings found cannot be used: {error}")
            return ()

    def excluded(self, spec: JobSpec) -> dict[str, str]:
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
        from pytest_mlhpc.vetting.history import excluded

        try:
            return excluded(
                self._state_dir, partition.system, partition.name, time.time_ns(),
                exclude_s=partition.vet.exclude_for_s, on_problem=self._tell,
            )  # fmt: skip
        except (MlhpcError, OSError) as error:
            self._tell(f"which nodes to keep away from cannot be read: {error}")
            return {}

    def keep(self, spec: JobSpec, attempt: Attempt) -> None:
        """Keep what was found of the nodes of *attempt*, if its run is the one that was told everything.

        Pods' probes, which look at one node alone, are a vetting of their own.
        """
        verdict, report, probed = node_verdict(attempt), node_report(attempt), probe_verdict(attempt)
        if probed is None and (verdict is None or report is None):
            return
        from pytest_mlhpc.vetting.history import StoredVetting, keep

        identity = str((attempt.vetted or {}).get("id") or attempt.run.run_id)
        at_ns = attempt.ended_ns or time.time_ns()
        place = (spec.target.partition.system, spec.target.partition.name, at_ns)
        try:
            settings = vetting_settings(spec)
            if settings is None:
                return
            if probed is not None:
                alone = replace(settings, single=True, no_load=True)
                vetting = StoredVetting(f"{identity}-probe", probed, None, alone, *place)
                keep(self._state_dir, vetting, self._session_id)
            if verdict is not None and report is not None:
                vetting = StoredVetting(identity, verdict, report, settings, *place)
                keep(self._state_dir, vetting, self._session_id)
        except (MlhpcError, OSError) as error:
            self._tell(f"what vetting found cannot be stored: {error}")

    def _tell(self, problem: str) -> None:
        if problem not in self._trouble:
            self._trouble.append(problem)
