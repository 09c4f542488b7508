"""What earlier vettings say of tonight's nodes: results that are used again, who is excluded, and what is stored of this one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.errors import MlhpcError, UsageError
from pytest_mlhpc.jobs.job import Attempt
from pytest_mlhpc.jobs.plan import node_report, node_verdict, probe_verdict, vetting_settings
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.protocol.schema import SCHEMA, to_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Exit, NodeReport, PairResult, Report, VetVerdict
from pytest_mlhpc.node.vet.main import PreviousResults
from pytest_mlhpc.node.vet.policy import ExpectedNode
from pytest_mlhpc.vetting.history import (
    REPORTS,
    JournalQuery,
    StoredVetting,
    append,
    day_of,
    days_since,
    entries_of_day,
)

if TYPE_CHECKING:
    from pytest_mlhpc.node.protocol.plan import Learned, VetSettings

#: Oldest result that may be used again, in seconds: what lies longer is taken away by the next vetting.
MOST_AGE_S = 3 * 86400.0


@dataclass(frozen=True)
class ReportEntry:
    """All that one good node said in one vetting; ``digest`` is of what was asked (:func:`digest`), ``pairs`` its exchanges."""

    vetting: str
    at_ns: int
    system: str
    partition: str
    digest: str
    level: str
    report: NodeReport
    pairs: tuple[PairResult, ...] = ()
    schema: int = SCHEMA


def max_age(text: str) -> float:
    """Return seconds of what --max-age says; 0 for an empty text.

    Raises:
        UsageError: it is no time, or longer than results are stored.
    """
    if not text:
        return 0.0
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--max-age: {error}") from error
    if seconds > MOST_AGE_S:
        raise UsageError(
            f"--max-age {text}: results are kept for {MOST_AGE_S / 3600:.0f} hours; ask for less"
        )
    return seconds


def remember(state_dir: Path, vetting: StoredVetting, job_checks: Collection[str], writer: str = "") -> None:
    """Keep what the good nodes of a vetting said, and take away what is too old to be used.

    Args:
        state_dir: the state directory, shared by whoever is to use it.
        vetting: with its report; without one nothing is stored.
        job_checks: names of checks that look at a job (``Check.purpose`` is job): left out.
        writer: as of ``history.keep``.

    Raises:
        StoreError: it cannot be written.
    """
    report, verdict = vetting.report, vetting.verdict
    if report is None or verdict.exit in {Exit.USAGE, Exit.INTERNAL}:
        return
    good = set(verdict.good)
    sum_ = digest(vetting.settings)
    entries = [
        ReportEntry(
            vetting.id, vetting.at_ns, vetting.system, vetting.partition, sum_, report.level,
            _without(node, job_checks), tuple(pair for pair in report.pairs if pair.first == node.host),
        )
        for node in report.nodes
        if node.host in good and node.boot_id and not node.missing
    ]  # fmt: skip
    append(state_dir, REPORTS, writer or vetting.id, vetting.at_ns, entries)
    _forget(state_dir, vetting.at_ns)


def recall(
    state_dir: Path,
    settings: VetSettings,
    hosts: Collection[str],
    *,
    max_age_s: float,
    now_ns: int,
    system: str = "",
    partition: str = "",
    on_problem: Callable[[str], None] | None = None,
) -> PreviousResults:
    """Return *settings* with the latest results of *hosts* that are young enough, of this level or closer, with equal bounds.

    Nothing here can see a node: who uses a report compares its ``boot_id`` with that of the node first.
    """
    found: dict[str, ReportEntry] = {}
    wanted, levels = set(hosts), {"deep"} if settings.level == "deep" else {"quick", "deep"}
    where = {"digest": digest(settings), "system": system, "partition": partition}
    query = JournalQuery(now_ns - int(max_age_s * 1e9), now_ns, where, on_problem)
    days = days_since(state_dir, REPORTS, query) if max_age_s > 0 else []
    for entry in (one for day in days for one in entries_of_day(state_dir, REPORTS, day, ReportEntry, query)):
        host = entry.report.host
        if (
            host in wanted
            and entry.level in levels
            and (host not in found or entry.at_ns > found[host].at_ns)
        ):
            found[host] = entry
    one = len({entry.vetting for entry in found.values()}) == 1 and set(found) == wanted
    pairs = [pair for entry in found.values() for pair in entry.pairs if pair.second in wanted] if one else []
    return PreviousResults(
        settings,
        {host: entry.report for host, entry in found.items()},
        tuple(sorted(pairs, key=lambda pair: (pair.stage == "confirm", pair.round))),
    )


def digest(settings: VetSettings) -> str:
    """Return a hash of all that changes what a node is asked and how it is judged on the spot, and of our own version."""
    about_nodes = replace(
        settings.wanted,
        purpose="",
        hours=0.0,
        ranks=0,
        paths={},
        checkpoint_bytes=ExpectedNode().checkpoint_bytes,
    )
    asked = {
        "wanted": to_json(about_nodes),
        "bounds": sorted(json.dumps(to_json(bound), sort_keys=True) for bound in settings.bounds),
        "single": settings.single,
        "no_load": settings.no_load,
        "version": metadata.version("pytest-mlhpc"),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _without(node: NodeReport, job_checks: Collection[str]) -> NodeReport:
    """Return a node's report without what its job's checks said."""
    names = set(job_checks)
    outcomes = [
        CheckOutcome(
            tuple(one for one in outcome.findings if one.check not in names),
            tuple(one for one in outcome.readings if one.check not in names),
            tuple(one for one in outcome.facts if one.check not in names),
            outcome.seconds,
        )
        for outcome in node.outcomes
    ]
    left = [outcome for outcome in outcomes if outcome.findings or outcome.readings or outcome.facts]
    return replace(node, outcomes=tuple(left))


def _forget(state_dir: Path, now_ns: int) -> None:
    """Take away the files of days that nobody can ask for any more; others' that we may not remove stay."""
    first = day_of(now_ns - int(MOST_AGE_S * 1e9))
    folder = state_dir / "vetting" / REPORTS
    with contextlib.suppress(OSError):
        for path in [path for path in folder.glob("*/*.jsonl") if path.parent.name < first]:
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # only once it is empty


@dataclass(frozen=True)
class StoredResults:
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

    def before(self, settings: VetSettings, hosts: Sequence[str]) -> PreviousResults:
        """Return what this site has learned, and what need not be measured again."""
        from pytest_mlhpc.vetting.history import learned

        now_ns, where = time.time_ns(), self._where
        try:
            known = learned(self.state_dir, **where, now_ns=now_ns, hosts=hosts, on_problem=_tell)
            settings = replace(settings, learned=(*settings.learned, *known))
            if not self.max_age_s:
                return PreviousResults(settings)
            return recall(
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
            return PreviousResults(settings)

    def after(
        self, identity: str, verdict: VetVerdict, report: Report, settings: VetSettings, reused: Sequence[str]
    ) -> None:
        """Keep what was found, and take unfit nodes out of service if that was asked for."""
        from pytest_mlhpc.node.vet.checks import names_of
        from pytest_mlhpc.vetting.history import StoredVetting, keep

        where = self._where
        vetting = StoredVetting(identity, verdict, report, settings, where["system"], where["partition"])
        try:
            if not reused:  # figures must not count twice, nor results grow young by being used
                keep(self.state_dir, vetting)
                remember(self.state_dir, vetting, names_of(purpose="job"))
        except (MlhpcError, OSError) as error:
            _tell(f"the verdict cannot be stored for later: {error}")
        if self.apply:
            self._apply(verdict)

    def _apply(self, verdict: VetVerdict) -> None:
        from pytest_mlhpc.vetting.cordon import (
            apply,
            left_silent,
            node_admin_of,
            node_problems,
            print_actions,
        )

        if not node_problems(verdict):
            print_actions(left_silent(verdict))
            return
        try:
            print_actions(apply(verdict, node_admin_of("auto", self.environ)))
        except (MlhpcError, OSError) as error:
            _tell(f"--drain: {error}")


def _tell(text: str) -> None:
    sys.stderr.write(f"mlhpc vet: {text}\n")


class Readiness:
    """One for each session; called by the threads of its queues. ``trouble`` gets what cannot be read or stored.

    Nothing of the past is read where nothing is vetted.
    """

    def __init__(self, state_dir: Path, session_id: str, trouble: list[str]) -> None:
        self._state_dir, self._session_id, self._trouble = state_dir, session_id, trouble
        self._lock = threading.Lock()
        self._away: dict[str, dict[str, str]] = {}  #: partition -> node -> why it is excluded
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
        """Keep what was found of the nodes of *attempt*, if its run is the one that has everything.

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
