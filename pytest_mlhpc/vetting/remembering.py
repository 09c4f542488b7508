"""What `mlhpc vet` takes from earlier vettings before one, and does with its verdict after it; the leader's process alone.

Nothing here changes a verdict or its exit code: what cannot be read, kept or done is said on standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.finding import Report, Verdict
from pytest_mlhpc.node.vet.session import Earlier


@dataclass(frozen=True)
class Remembering:
    """``max_age_s``: results so young are used again, 0: none; ``apply``: unfit nodes are taken out of service."""

    state_dir: Path
    environ: Mapping[str, str]
    max_age_s: float = 0.0
    apply: bool = False

    @property
    def grace_s(self) -> float:
        """How long ``after`` may take: a line in a file, or a call of the scheduler for each unfit node."""
        return 60.0 if self.apply else 5.0

    @property
    def _where(self) -> dict[str, str]:
        """Whose nodes these are, as far as the job's environment says; figures of others are not compared."""
        environ = self.environ
        return {
            "system": environ.get("SLURM_CLUSTER_NAME", ""),
            "partition": environ.get("SLURM_JOB_PARTITION", ""),
        }

    def before(self, settings: Settings, hosts: Sequence[str]) -> Earlier:
        """Return what this site has learned, and what need not be measured again."""
        from pytest_mlhpc.vetting.history import learned
        from pytest_mlhpc.vetting.reuse import recall

        now_ns, where = time.time_ns(), self._where
        try:
            known = learned(self.state_dir, **where, now_ns=now_ns, hosts=hosts, on_problem=_tell)
            settings = replace(settings, learned=(*settings.learned, *known))
            if not self.max_age_s:
                return Earlier(settings)
            found = recall(
                self.state_dir,
                settings,
                hosts,
                max_age_s=self.max_age_s,
                now_ns=now_ns,
                on_problem=_tell,
                **where,
            )
        except (MlhpcError, OSError) as error:
            _tell(f"what earlier vettings found cannot be used: {error}")
            return Earlier(settings)
        return Earlier(settings, found.nodes, found.pairs, found.age_s)

    def after(
        self, identity: str, verdict: Verdict, report: Report, settings: Settings, reused: Sequence[str]
    ) -> None:
        """Keep what was found, and take unfit nodes out of service if that was asked for."""
        from pytest_mlhpc.node.vet.checks import all_checks
        from pytest_mlhpc.vetting.history import Vetting, keep
        from pytest_mlhpc.vetting.reuse import remember

        where = self._where
        vetting = Vetting(identity, verdict, report, settings, where["system"], where["partition"])
        try:
            if not reused:  # figures must not count twice, nor results grow young by being used
                keep(self.state_dir, vetting)
                checks, watches = all_checks()
                about_job = [one.name for one in checks if one.purpose == "job"]
                about_job += [one.name for one in watches if one.purpose == "job"]
                remember(self.state_dir, vetting, about_job)
        except (MlhpcError, OSError) as error:
            _tell(f"the verdict cannot be kept for later: {error}")
        if self.apply:
            self._apply(verdict)

    def _apply(self, verdict: Verdict) -> None:
        from pytest_mlhpc.vetting.apply import apply, keeper_of, left_silent, tell
        from pytest_mlhpc.vetting.reasons import node_problems

        if not node_problems(verdict):
            tell(left_silent(verdict))
            return
        try:
            tell(apply(verdict, keeper_of("auto", self.environ)))
        except (MlhpcError, OSError) as error:
            _tell(f"--drain: {error}")


def _tell(text: str) -> None:
    sys.stderr.write(f"mlhpc vet: {text}\n")
