"""From ended attempts to an outcome: is the result what was asked for, what does the judge say, and its record."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.errors import ConfigError, StoreError
from pytest_mlhpc.history.judge_inputs import JudgeHistory
from pytest_mlhpc.jobs.budget import account_of, used_hours
from pytest_mlhpc.jobs.job import Attempt, Job, Outcome, is_first_side
from pytest_mlhpc.jobs.plan import node_verdict, vetted_record
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.accepting import BaselineStanding, standings_of
from pytest_mlhpc.judge.baseline_files import Entry, environment_digest, series_of
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.judge import accept_command, entries_to_put, failure_of, fences_of, judge
from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.node.protocol.plan import VETTED
from pytest_mlhpc.node.protocol.schema import Measurement, to_json
from pytest_mlhpc.options import Settings, options_of_target, repeated_options, state_and_baselines
from pytest_mlhpc.session.against import Comparison, broken_run, judge_pairs, loss_of
from pytest_mlhpc.session.check_measurement import check
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.locations import default_state_dir
from pytest_mlhpc.store.record import AGAINST, Epoch, Failure, JudgedBy, Provenance, Record, user_name
from pytest_mlhpc.store.store import Store
from pytest_mlhpc.store.verdict import WORSE, Judgement, Verdict
from pytest_mlhpc.vetting.readiness import Readiness

if TYPE_CHECKING:
    from pytest_mlhpc.history.series import Source
    from pytest_mlhpc.session.preflight import Spending
    from pytest_mlhpc.store.index import Index


#: What a record says of a program that was the command of its container.
WITHOUT_AGENT = "no agent was in its pod: its node was not vetted, and there is neither telemetry nor standard error apart"


class JobFinisher:
    """Judges ended jobs and stores their records. Called by drivers' threads, one at a time."""

    def __init__(
        self,
        settings: Settings,
        session_id: str,
        provenance: Provenance,
        publish: Callable[[Record], None],
        *,
        spending: Spending,
        readiness: Readiness,
        false_alarms: float = 1.0,
        source: Source | None = None,
        tell: Callable[[str], None] = lambda _text: None,
        comparison: Comparison | None = None,
    ) -> None:
        self._settings = settings
        self._comparison = comparison
        self._session_id = session_id
        self._provenance = provenance
        self._publish = publish
        self._spending = spending
        self._readiness = readiness
        self._lock = threading.Lock()
        self._reruns_left = settings.reruns
        self._false_alarms = false_alarms
        self._store: Store | None = None
        self._index: Index | None = None
        # `mlhpc` looks for baselines in the folder it is called in; found out now, as tests may change theirs.
        self.accept_options = state_and_baselines(settings, Path.cwd() / "baselines")
        # Hundreds of records of one night, or of other options than usual, would drown the nights that the judge looks at.
        self.apart = settings.each_node is not None or not neutral(settings.overrides)
        self._purpose = "manual" if self.apart else provenance.purpose
        if comparison is not None:
            self._purpose = AGAINST
        self.standings: dict[tuple[str, str], BaselineStanding] = {}
        self.epochs: dict[str, str] = {}  #: node id -> what changed where a new epoch begins
        self.book = BaselineBook(settings.baselines_dir, settings.state_dir)
        self.past = JudgeHistory(settings.state_dir, self._index_, source, tell)

    def conclude(self, job: Job) -> Outcome | int:
        """Return the outcome of *job*, all its attempts having ended, or how many more attempts to run."""
        with self._lock:
            try:
                if self._comparison is not None and job.opponent is not None:
                    return self._compared(job, self._comparison)
                return self._conclude(job)
            except StoreError as error:
                return self._outcome(job, None, Failure(unwritten(error), str(error)))
            except ConfigError as error:  # the baseline file was sound when the session began
                return self._outcome(job, None, Failure("no_baseline", str(error)))

    def close(self) -> tuple[Path, ...]:
        """Write new baselines and close the store; return the baseline files that changed.

        Raises:
            StoreError: a file cannot be written.
            ConfigError: a baseline file was damaged meanwhile.
        """
        with self._lock:
            try:
                return self.book.save()
            finally:
                if self._store is not None:
                    self._store.close()
                if self._index is not None:
                    self._index.close()
                self.past.close()

    def _conclude(self, job: Job) -> Outcome | int:
        spec, first = job.spec, job.attempts[0]
        check_all(job)
        if spec.about_nodes and first.failure is None:
            return self._outcome(job, Judgement(Verdict.UNJUDGED), None)
        if first.failure is not None or first.measurement is None:
            return self._outcome(job, None, first.failure)
        if not spec.judged:
            return self._outcome(job, Judgement(Verdict.UNJUDGED), None)
        good = [a.measurement for a in job.attempts if a.measurement is not None and not a.failures]
        device, update = first.measurement.device_model, self._settings.baseline == "update"
        entries = self.book.for_spec(spec, device, provisional=not update)
        judgement, by = self._judge(spec, good, entries, len(job.attempts) - len(good))
        if judgement.reruns_wanted > 0:
            if refused := self._refused(job, judgement.reruns_wanted):
                return self._outcome(job, judgement, Failure("reruns_incomplete", refused))
            self._reruns_left -= judgement.reruns_wanted
            return judgement.reruns_wanted
        failure = failure_of(judgement)
        if failure is not None and failure.outcome == "no_baseline":
            failure = replace(failure, text=self._without_baseline(spec, judgement))
        judgement = self._with_epoch(spec, judgement, Epoch(spec.definition, device))
        if judgement.epoch:
            self.epochs[spec.node_id] = judgement.epoch
        local, epoch = spec.target.partition.scheduler == "local", Epoch(spec.definition, device)
        reviewed = self.book.for_spec(spec, device, provisional=False)
        accepted = [metric for metric, entry in reviewed.items() if not changed(entry.epoch, epoch)]
        self.standings.update(standings_of(spec.node_id, judgement, accepted, update=update, local=local))
        self._accept(spec, good, judgement, entries)
        return self._outcome(job, judgement, failure, by)

    def _compared(self, job: Job, comparison: Comparison) -> Outcome | int:
        """Return the outcome of a comparison, or 0: more of its runs are on their way."""
        check_all(job)
        judged = judge_pairs(job, comparison)
        failure = broken_run(job)
        if failure is None and judged is None:
            if job.pending and job.refused is None:
                return 0
            failure = job.refused or Failure("no_result", "no pair of runs of both sides ended")
        judgement, results = judged if judged is not None and failure is None else (None, ())
        if judgement is not None:
            failure = loss_of(judgement)
        return replace(self._outcome(job, judgement, failure), comparison=results)

    def _refused(self, job: Job, wanted: int) -> str:
        """Return why *wanted* re-runs cannot be had, or an empty text after having asked the budget for them."""
        if job.refused is not None:
            return f"a re-run was refused: {job.refused}"
        first = 1 + max(attempt.number for attempt in job.attempts)
        refused = self._spending.refused(job.spec, range(first, first + wanted))
        return f"inconclusive (budget): {refused}" if refused else ""

    def _judge(
        self, spec: JobSpec, good: Sequence[Measurement], entries: Mapping[str, Entry], broken: int
    ) -> tuple[Judgement, JudgedBy]:
        by = self._judged_by(spec, entries, broken)
        epoch = Epoch(spec.definition, good[0].device_model)
        history = {
            metric: self.past.nights(
                series_of(spec, metric), epoch, since_ns,
                default_branch=by.default_branch,
                reference=entry.calibration if by.local and (entry := entries.get(metric)) else None,
            )
            for metric, since_ns in by.since_ns.items()
        }  # fmt: skip

        def ask(last_good: Record | None) -> Judgement:
            return judge(
                good,
                spec,
                entries,
                history,
                local=by.local,
                mode=by.mode,
                reruns_allowed=by.reruns_allowed,
                reruns_broken=by.reruns_broken,
                last_good=last_good,
                commit=self._provenance.commit,
                accept_options=self.accept_options,
                series=by.series,
                nightly=by.nightly,
                matters=by.matters,
            )

        judgement = ask(None)
        if judgement.verdict in WORSE and not judgement.reruns_wanted:
            last_good = self.past.last_good(series_of(spec, spec.judged[0]), epoch)
            judgement = self._with_events(spec, ask(last_good) if last_good else judgement, last_good)
        return judgement, by

    def _judged_by(self, spec: JobSpec, entries: Mapping[str, Entry], broken: int) -> JudgedBy:
        """Return what the verdict follows from beside figures and history."""
        local = spec.target.partition.scheduler == "local"
        record = self._settings.baseline == "record" and not local
        since = {
            metric: self.past.since_ns(series_of(spec, metric), entry.date if entry else "")
            for metric in spec.judged
            if (entry := entries.get(metric)) is not None or record
        }
        return JudgedBy(
            entries={metric: to_json(entry) for metric, entry in entries.items()},
            since_ns=since,
            default_branch=self._provenance.default_branch,
            mode=self._settings.baseline,
            local=local,
            nightly=self._purpose == "nightly" and self._provenance.branch == self._provenance.default_branch,
            series=max(self.book.count(), 1) / self._false_alarms,
            reruns_allowed=max(0, self._reruns_left),
            reruns_broken=broken,
            matters=spec.target.partition.matters,
            references=dict(spec.references),
        )

    def _with_events(self, spec: JobSpec, judgement: Judgement, last_good: Record | None) -> Judgement:
        """Name what people noted since the last good run, or the newest where there is none."""
        partition = spec.target.partition
        since_ns = last_good.created_ns if last_good else 0
        noted = self.past.noted(partition.system, partition.name, since_ns)
        return replace(judgement, explanation=(*judgement.explanation, *noted)) if noted else judgement

    def _accept(
        self,
        spec: JobSpec,
        good: Sequence[Measurement],
        judgement: Judgement,
        entries: Mapping[str, Entry],
    ) -> None:
        """Put new entries in the book, also beside metrics that improved or were inconclusive."""
        local = spec.target.partition.scheduler == "local"
        update = self._settings.baseline == "update"
        if self._settings.baseline == "fail" or not (local or update):
            return
        accepted = entries_to_put(
            good,
            judgement,
            entries,
            local=local,
            accepted_by=user_name(),
            reason="--mlhpc-baseline=update" if update else "first run on this machine",
            now_ns=time.time_ns(),
            environment=environment_digest(good[0].environment),
            definition=spec.definition,
        )
        for metric, entry in accepted.items():
            key = series_of(spec, metric)
            self.book.put(key, entry, provisional=local and not update)

    def _with_epoch(self, spec: JobSpec, judgement: Judgement, epoch: Epoch) -> Judgement:
        """Say what changed since the newest record where there is no baseline from which it is known."""
        if judgement.epoch or all(metric.baseline is not None for metric in judgement.metrics):
            return judgement
        newest = self.past.newest(series_of(spec, spec.judged[0]))
        if newest is None or not (what := changed(newest, epoch)):
            return judgement
        explanation = (*judgement.explanation, f"a new epoch begins: {what}")
        return replace(judgement, epoch=what, explanation=explanation)

    def _without_baseline(self, spec: JobSpec, judgement: Judgement) -> str:
        """Say in one sentence which series has no baseline, in which file, and how to accept what was measured."""
        lacking = [one for one in judgement.metrics if one.reason.startswith("no_baseline: ")]
        file = os.path.relpath(self.book.path(series_of(spec, lacking[0].name)))
        others = [
            f"{one.name}: {one.reason.partition(': ')[2]}" for one in lacking if one.baseline is not None
        ]
        names = ", ".join(one.name for one in lacking if one.baseline is None)
        words = [*others, *([f"{names} of {spec.benchmark} has none"] if names else [])]
        command = accept_command(spec.node_id, self.accept_options)
        return f"{'; '.join(words)} in {file}; to accept what was measured: {command}"

    def _outcome(
        self, job: Job, judgement: Judgement | None, failure: Failure | None, by: JudgedBy | None = None
    ) -> Outcome:
        first = job.attempts[0]
        if failure is not None and first.job_id:
            failure = replace(failure, where=_where(first))
        verdict = failure.outcome if failure else judgement.verdict.value if judgement else "no_result"
        self._spending.ended(job)
        try:
            for attempt in (*job.lost, *job.attempts):
                own = failure if attempt is first and job.opponent is None else attempt.failure
                judged_by = by if attempt is first else None
                if job.opponent is not None and not (attempt.heard or own):
                    continue  # the comparison was decided before it began
                record = self._record(job, attempt, verdict, own, judgement, by=judged_by)
                self._append(record, job.spec, attempt)
        except StoreError as error:
            failure = failure or Failure(unwritten(error), str(error))
        # The comparison in the test's body explains these failures, which are raised after it.
        slow = failure is not None and failure.outcome in WORSE
        return Outcome(
            node_id=job.spec.node_id,
            benchmark=job.spec.benchmark,
            measurement=first.measurement,
            judgement=judgement,
            failure=None if slow else failure,
            attempts=len(job.attempts),
            record_id=first.run.run_id,
            directory=first.directory,
            vetting=node_verdict(first) if job.spec.workload == VETTED else None,
            artifacts=job.spec.artifacts,
            needed=first.run.needed,
        )

    def _record(
        self,
        job: Job,
        attempt: Attempt,
        verdict: str,
        failure: Failure | None,
        judgement: Judgement | None,
        *,
        by: JudgedBy | None,
    ) -> Record:
        spec = job.spec_of(attempt.number)
        measurement, partition = attempt.measurement, spec.target.partition
        purpose, branch, commit = self._made_from(attempt)
        return Record(
            id=attempt.run.run_id,
            session=self._session_id,
            node_id=spec.node_id,
            benchmark=spec.benchmark,
            definition=spec.definition,
            system=partition.system,
            partition=partition.name,
            environment=self._environment(job, attempt),
            device_model=measurement.device_model if measurement else "",
            attempt=attempt.number,
            created_ns=attempt.ended_ns if attempt.adopted else time.time_ns(),
            verdict=failure.outcome if failure else Verdict.UNJUDGED.value if job.opponent else verdict,
            fingerprint=spec.target.fingerprint,
            purpose=purpose,
            branch=branch,
            commit=commit,
            owner=spec.owner,
            partition_owner=partition.owner,
            pipeline=self._provenance.pipeline,
            root=self._provenance.root,
            preset=spec.preset,
            asked=to_json(spec.asked),
            parameters=to_json(spec.parameters),
            failure=str(failure) if failure else "",
            explanation=(
                *((*judgement.explanation, *filter(None, [attempt.beside])) if judgement else ()),
                *([WITHOUT_AGENT] if spec.agentless else []),
            ),
            node_hours=used_hours(spec, attempt.run_s),
            queue_s=attempt.queue_s,
            run_s=attempt.run_s,
            account=account_of(spec),
            nodes=attempt.nodes,
            job_id=attempt.job_id,
            step_id=attempt.step_id,
            energy_j=attempt.energy_j,
            judged=spec.judged,
            judged_by=by,
            fences=fences_of(judgement) if by and judgement else {},
            options=self._options(spec),
            overrides=dict(self._settings.overrides),
            vetting=vetted_record(attempt, job.lost, self._readiness.excluded(spec)),
            measurement=measurement,
        )

    def _made_from(self, attempt: Attempt) -> tuple[str, str, str]:
        """Return purpose, branch and commit of *attempt*; B of another revision is on no branch."""
        ours = (self._purpose, self._provenance.branch, self._provenance.commit)
        revision = self._comparison.revision if self._comparison is not None else None
        if revision is None:
            return attempt.made_from or ours
        first = is_first_side(attempt.number)
        return (ours[0], ours[1], revision.first_commit) if first else (ours[0], "", revision.commit)

    def _options(self, spec: JobSpec) -> tuple[str, ...]:
        settings = replace(
            self._settings, state_dir=default_state_dir(os.environ)
        )  # whoever reads it names it
        root = Path(self._provenance.root) if self._provenance.root else Path.cwd()
        return (*options_of_target(settings, spec.target), *repeated_options(settings, root))

    def _environment(self, job: Job, attempt: Attempt) -> str:
        """Return the name of the environment; of B with all that it has instead of A's, so that no series is that of another."""
        name = job.spec_of(attempt.number).target.environment.name
        if job.opponent is None or is_first_side(attempt.number) or self._comparison is None:
            return name
        other = str(replace(self._comparison.against, environment=""))
        return f"{name}, {other}" if other else name

    def _append(self, record: Record, spec: JobSpec, attempt: Attempt) -> None:
        """Store a record, unless the session that submitted its run was killed between this line and the ledger's."""
        if attempt.adopted and self._index_().has(record.id):
            return
        if self._store is None:
            self._store = Store(self._settings.state_dir, self._session_id)
        self._store.append(record)
        self._readiness.keep(spec, attempt)
        self._publish(record)

    def _index_(self) -> Index:
        """Opened when a baseline is found first: sessions without history need no database."""
        if self._index is None:
            from pytest_mlhpc.store.index import Index

            self._index = Index(self._settings.state_dir)
        return self._index


def check_all(job: Job) -> None:
    """Give each measured attempt the failures that its measurement shows."""
    for attempt in job.attempts:
        if attempt.measurement is not None and not attempt.failures:
            attempt.failures += check(attempt.measurement, job.spec_of(attempt.number), attempt.run)


def _where(attempt: Attempt) -> str:
    nodes = ", ".join(attempt.nodes) or "no node yet"
    return f"{nodes} (job {attempt.job_id}{'.' * bool(attempt.step_id)}{attempt.step_id})"
