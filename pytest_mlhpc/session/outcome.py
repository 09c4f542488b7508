"""What becomes of an ended job, in three steps that each hand a value on: it is checked, judged and recorded.

Open this to know why a run got its verdict, what else a loss is explained by, and what is written of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.errors import ConfigError, StoreError
from pytest_mlhpc.history.judge_inputs import JudgeHistory
from pytest_mlhpc.jobs.budget import account_of, used_hours
from pytest_mlhpc.jobs.job import Attempt, Job, Outcome, is_first_side
from pytest_mlhpc.jobs.plan import node_verdict, recorded_variables, vetted_record
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.baseline_files import environment_digest, series_of
from pytest_mlhpc.judge.baselines import BaselineBook, BaselineStanding, standings_of
from pytest_mlhpc.judge.judge import JudgeInputs, accept_command, entries_to_put, failure_of, fences_of, judge
from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.node.protocol.plan import VETTED
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.options import Settings, options_of_target, repeated_options
from pytest_mlhpc.session.against import Comparison, NamedResult, broken_run, judge_pairs, loss_of
from pytest_mlhpc.session.check_measurement import CheckedAttempt, CheckedJob, check_job
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.locations import default_state_dir
from pytest_mlhpc.store.record import (
    AGAINST,
    WORSE,
    Failure,
    JudgedBy,
    Judgement,
    Provenance,
    Record,
    Verdict,
    user_name,
)
from pytest_mlhpc.store.store import Drill, Store
from pytest_mlhpc.vetting.reuse import Readiness

if TYPE_CHECKING:
    from pytest_mlhpc.history.series import Source
    from pytest_mlhpc.session.preflight import Spending
    from pytest_mlhpc.store.index import Index

#: What a record says of a program that was the command of its container.
WITHOUT_AGENT = "no agent was in its pod: its node was not vetted, and there is neither telemetry nor standard error apart"


@dataclass(frozen=True)
class SessionTerms:
    """What all jobs of a session are judged by and recorded with.

    ``accept_options`` are those of the command that accepts a value. ``false_alarms`` is how many a month the site accepts.
    """

    settings: Settings
    session_id: str
    provenance: Provenance
    accept_options: tuple[str, ...]
    false_alarms: float = 1.0
    comparison: Comparison | None = None
    drill: Drill | None = None

    @property
    def apart(self) -> bool:
        """Whether hundreds of records of one night, or of other options than usual, would drown the nights of the judge."""
        return self.settings.each_node is not None or not neutral(self.settings.overrides)

    @property
    def purpose(self) -> str:
        """The purpose of the session's records."""
        if self.comparison is not None:
            return AGAINST
        return "manual" if self.apart else self.provenance.purpose


class SessionStores:
    """What the outcomes of a session are read from and written to: baselines, history, budgets, records.

    Its lock lets one thread use it at a time. Files are opened when they are needed first.
    """

    def __init__(
        self,
        terms: SessionTerms,
        *,
        spending: Spending,
        readiness: Readiness,
        publish: Callable[[Record], None],
        source: Source | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.lock = threading.Lock()
        self.terms, self.spending, self.readiness, self._publish = terms, spending, readiness, publish
        self.book = BaselineBook(terms.settings.baselines_dir, terms.settings.state_dir)
        self.past = JudgeHistory(terms.settings.state_dir, lambda: self._index, source, tell)
        self.standings: dict[tuple[str, str], BaselineStanding] = {}
        self.epochs: dict[str, str] = {}  #: node id -> what changed where a new epoch begins

    @cached_property
    def _index(self) -> Index:
        from pytest_mlhpc.store.index import Index

        return Index(self.terms.settings.state_dir)

    @cached_property
    def _store(self) -> Store:
        return Store(self.terms.settings.state_dir, self.terms.session_id)

    def append(self, record: Record, spec: JobSpec, attempt: Attempt) -> None:
        """Store a record, unless the session that submitted its run was killed between this line and the ledger's.

        Raises:
            StoreError: it cannot be stored.
        """
        if attempt.adopted and self._index.has(record.id):
            return
        self._store.append(record)
        self.readiness.keep(spec, attempt)
        self._publish(record)

    def close(self) -> tuple[Path, ...]:
        """Write new baselines and close what is open; return the baseline files that changed.

        Raises:
            StoreError: a file cannot be written.
            ConfigError: a baseline file was damaged meanwhile.
        """
        with self.lock:
            try:
                return self.book.save()
            finally:
                for name in ("_store", "_index"):
                    if name in vars(self):  # it was opened
                        getattr(self, name).close()
                self.past.close()


@dataclass(frozen=True)
class JudgedJob:
    """The verdict on a checked job: how its figures compare, or its failure, and what the verdict follows from."""

    checked: CheckedJob
    judgement: Judgement | None = None
    failure: Failure | None = None
    inputs: JudgeInputs | None = None  #: None where no figure was compared with a baseline
    comparison: tuple[NamedResult, ...] = ()  #: of A against B
    #: attempts to run before it can be recorded, 0: those on their way; None: it is final
    more: int | None = None

    @property
    def verdict(self) -> str:
        """What its first record says."""
        if self.failure is not None:
            return self.failure.outcome
        return self.judgement.verdict.value if self.judgement is not None else "no_result"


def conclude(job: Job, stores: SessionStores) -> Outcome | int:
    """Return the outcome of *job*, all its attempts having ended, or how many more attempts to run.

    Of a comparison, 0 says that more of its runs are on their way. Called by drivers' threads.
    """
    with stores.lock:
        checked = check_job(job)
        try:
            judged = _judged(checked, stores)
        except StoreError as error:
            judged = JudgedJob(checked, failure=Failure(unwritten(error), str(error)))
        except ConfigError as error:  # the baseline file was sound when the session began
            judged = JudgedJob(checked, failure=Failure("no_baseline", str(error)))
        if judged.more is not None:
            return judged.more
        stores.spending.ended(job)
        return record_job(judged, stores)


def _judged(checked: CheckedJob, stores: SessionStores) -> JudgedJob:
    """Read what the judge needs, ask it, and ask the budget for the re-runs that it wants.

    Raises:
        StoreError: history or a baseline file cannot be read.
        ConfigError: a baseline file is damaged.
    """
    inputs = _read_inputs(checked, stores)
    judged = judge_job(checked, inputs, stores.terms)
    judgement = judged.judgement
    if judgement is None or inputs is None:
        return judged
    if judged.more is not None:
        refused = _refused(checked, judged.more, stores.spending)
        return JudgedJob(checked, judgement, refused) if refused is not None else judged
    explained = stores.past.explaining(judgement, inputs, checked.spec, checked.epoch)
    if explained is not inputs:
        judged = judge_job(checked, explained, stores.terms)
    if judged.failure is not None and judged.failure.outcome == "no_baseline":
        text = _without_baseline(checked.spec, judgement, stores)
        return replace(judged, failure=replace(judged.failure, text=text))
    return judged


def _read_inputs(checked: CheckedJob, stores: SessionStores) -> JudgeInputs | None:
    """Return what figures are compared with; None where none is judged."""
    terms, spec = stores.terms, checked.spec
    if checked.compared or not checked.is_judged:
        return None
    local, mode = spec.target.partition.scheduler == "local", terms.settings.baseline
    entries = stores.book.for_spec(spec, checked.epoch.device_model, provisional=mode != "update")
    since = {
        metric: stores.past.since_ns(series_of(spec, metric), entry.date if entry else "")
        for metric in spec.judged
        if (entry := entries.get(metric)) is not None or (mode == "record" and not local)
    }
    branch, default_branch = terms.provenance.branch, terms.provenance.default_branch
    by = JudgedBy(
        entries={metric: to_json(entry) for metric, entry in entries.items()},
        since_ns=since,
        default_branch=default_branch,
        mode=mode,
        local=local,
        nightly=terms.purpose == "nightly" and branch == default_branch,
        series=max(stores.book.count(), 1) / terms.false_alarms,
        reruns_allowed=max(0, stores.spending.reruns_left),
        reruns_broken=len(checked.attempts) - len(checked.measurements),
        matters=spec.target.partition.matters,
        references=dict(spec.references),
    )
    return stores.past.inputs(spec, checked.epoch, entries, by)


def judge_job(checked: CheckedJob, inputs: JudgeInputs | None, terms: SessionTerms) -> JudgedJob:
    """Judge an ended job that was checked. Pure: what it is compared with was read before."""
    if terms.comparison is not None and checked.compared:
        return _judge_comparison(checked, terms.comparison)
    if inputs is None:
        judgement = Judgement(Verdict.UNJUDGED) if checked.has_result else None
        return JudgedJob(checked, judgement, checked.first.failure)
    judgement = judge(
        checked.measurements,
        checked.spec,
        inputs,
        commit=terms.provenance.commit,
        accept_options=terms.accept_options,
    )
    more = judgement.reruns_wanted or None
    return JudgedJob(checked, judgement, failure_of(judgement), inputs, more=more)


def _judge_comparison(checked: CheckedJob, comparison: Comparison) -> JudgedJob:
    judged, failure = judge_pairs(checked, comparison), broken_run(checked)
    if failure is None and judged is None:
        if checked.pending and checked.refused is None:
            return JudgedJob(checked, more=0)
        failure = checked.refused or Failure("no_result", "no pair of runs of both sides ended")
    if judged is None or failure is not None:
        return JudgedJob(checked, failure=failure)
    judgement, results = judged
    return JudgedJob(checked, judgement, loss_of(judgement), comparison=results)


def _refused(checked: CheckedJob, wanted: int, spending: Spending) -> Failure | None:
    """Return why *wanted* re-runs cannot be had, or None after having asked the budget for them."""
    if checked.refused is not None:
        return Failure("reruns_incomplete", f"a re-run was refused: {checked.refused}")
    first = 1 + max(one.attempt.number for one in checked.attempts)
    refused = spending.refused(checked.spec, range(first, first + wanted))
    return Failure("reruns_incomplete", f"inconclusive (budget): {refused}") if refused else None


def _without_baseline(spec: JobSpec, judgement: Judgement, stores: SessionStores) -> str:
    """Say in one sentence which series has no baseline, in which file, and how to accept what was measured."""
    lacking = [one for one in judgement.metrics if one.reason.startswith("no_baseline: ")]
    file = os.path.relpath(stores.book.path(series_of(spec, lacking[0].name)))
    others = [f"{one.name}: {one.reason.partition(': ')[2]}" for one in lacking if one.baseline is not None]
    names = ", ".join(one.name for one in lacking if one.baseline is None)
    reasons = [*others, *([f"{names} of {spec.benchmark} has none"] if names else [])]
    command = accept_command(spec.node_id, stores.terms.accept_options)
    return f"{'; '.join(reasons)} in {file}; to accept what was measured: {command}"


def record_job(judged: JudgedJob, stores: SessionStores) -> Outcome:
    """Put new baselines in the book, append a record of each attempt, and return the outcome for the test."""
    checked, first = judged.checked, judged.checked.first
    if judged.inputs is not None and judged.judgement is not None:
        _put_baselines(checked, judged.judgement, judged.inputs, stores)
    failure = judged.failure
    if failure is not None and first.attempt.job_id:
        failure = replace(failure, where=_where(first.attempt))
        judged = replace(judged, failure=failure)
    try:
        for one in (*checked.lost, *checked.attempts):
            own = failure if one is first and not checked.compared else one.failure
            if checked.compared and not (one.attempt.heard or own):
                continue  # the comparison was decided before it began
            stores.append(_record(judged, one, own, stores), checked.spec, one.attempt)
    except StoreError as error:
        failure = failure or Failure(unwritten(error), str(error))
    # The comparison in the test's body explains these failures, which are raised after it.
    slow = failure is not None and failure.outcome in WORSE
    return Outcome(
        node_id=checked.spec.node_id,
        benchmark=checked.spec.benchmark,
        measurement=first.attempt.measurement,
        judgement=judged.judgement,
        failure=None if slow else failure,
        attempts=len(checked.attempts),
        record_id=first.attempt.run.run_id,
        directory=first.attempt.directory,
        vetting=node_verdict(first.attempt) if checked.spec.workload == VETTED else None,
        artifacts=checked.spec.artifacts,
        needed=first.attempt.run.needed,
        comparison=judged.comparison,
    )


def _put_baselines(
    checked: CheckedJob, judgement: Judgement, inputs: JudgeInputs, stores: SessionStores
) -> None:
    """Put new entries in the book, also beside metrics that improved or were inconclusive; note how all stand."""
    spec, by, book = checked.spec, inputs.by, stores.book
    update = by.mode == "update"
    if judgement.epoch:
        stores.epochs[spec.node_id] = judgement.epoch
    reviewed = book.for_spec(spec, checked.epoch.device_model, provisional=False)
    accepted = [metric for metric, entry in reviewed.items() if not changed(entry.epoch, checked.epoch)]
    stores.standings.update(standings_of(spec.node_id, judgement, accepted, update=update, local=by.local))
    if by.mode == "fail" or not (by.local or update):
        return
    new = entries_to_put(
        checked.measurements,
        judgement,
        inputs.entries,
        local=by.local,
        accepted_by=user_name(),
        reason="--mlhpc-baseline=update" if update else "first run on this machine",
        now_ns=time.time_ns(),
        environment=environment_digest(checked.measurements[0].environment),
        definition=spec.definition,
    )
    for metric, entry in new.items():
        book.put(series_of(spec, metric), entry, provisional=by.local and not update)


def _record(judged: JudgedJob, one: CheckedAttempt, failure: Failure | None, stores: SessionStores) -> Record:
    """Return the record of one attempt of a job; *failure* is the attempt's."""
    checked, attempt, spec, terms = judged.checked, one.attempt, one.spec, stores.terms
    measurement, partition, judgement = attempt.measurement, spec.target.partition, judged.judgement
    by = judged.inputs.by if judged.inputs and one is checked.first else None
    purpose, branch, commit = _made_from(attempt, terms)
    verdict = Verdict.UNJUDGED.value if checked.compared else judged.verdict
    lost = [other.attempt for other in checked.lost]
    return Record(
        id=attempt.run.run_id,
        session=terms.session_id,
        node_id=spec.node_id,
        benchmark=spec.benchmark,
        definition=spec.definition,
        system=partition.system,
        partition=partition.name,
        environment=_environment(one, terms),
        device_model=measurement.device_model if measurement else "",
        attempt=attempt.number,
        created_ns=attempt.ended_ns if attempt.adopted else time.time_ns(),
        verdict=failure.outcome if failure else verdict,
        fingerprint=spec.target.fingerprint,
        purpose=purpose,
        branch=branch,
        commit=commit,
        owner=spec.owner,
        partition_owner=partition.owner,
        pipeline=terms.provenance.pipeline,
        root=terms.provenance.root,
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
        options=_options(spec, terms),
        overrides=dict(terms.settings.overrides),
        argv=attempt.run.argv,
        variables=recorded_variables(spec, attempt.run),
        drill=terms.drill.mark(attempt.run.fault) if terms.drill else "",
        vetting=vetted_record(attempt, lost, stores.readiness.excluded(spec)),
        measurement=measurement,
    )


def _made_from(attempt: Attempt, terms: SessionTerms) -> tuple[str, str, str]:
    """Return purpose, branch and commit of *attempt*; B of another revision is on no branch."""
    ours = (terms.purpose, terms.provenance.branch, terms.provenance.commit)
    revision = terms.comparison.revision if terms.comparison is not None else None
    if revision is None:
        return attempt.made_from or ours
    first = is_first_side(attempt.number)
    return (ours[0], ours[1], revision.first_commit) if first else (ours[0], "", revision.commit)


def _options(spec: JobSpec, terms: SessionTerms) -> tuple[str, ...]:
    settings = replace(terms.settings, state_dir=default_state_dir(os.environ))  # whoever reads it names it
    root = Path(terms.provenance.root) if terms.provenance.root else Path.cwd()
    return (*options_of_target(settings, spec.target), *repeated_options(settings, root))


def _environment(one: CheckedAttempt, terms: SessionTerms) -> str:
    """Return the name of the environment; of B with all that it has instead of A's, so that no series is that of another."""
    name = one.spec.target.environment.name
    if terms.comparison is None or is_first_side(one.attempt.number):
        return name
    other = str(replace(terms.comparison.against, environment=""))
    return f"{name}, {other}" if other else name


def _where(attempt: Attempt) -> str:
    nodes = ", ".join(attempt.nodes) or "no node yet"
    return f"{nodes} (job {attempt.job_id}{'.' * bool(attempt.step_id)}{attempt.step_id})"
