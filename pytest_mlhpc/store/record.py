"""A record: one attempt's measurement with its verdicts, failure, surroundings and the commit under test, stored as one JSON line."""

from __future__ import annotations

import enum
import getpass
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pytest_mlhpc.node.protocol.schema import SCHEMA, Measurement


@dataclass(frozen=True)
class RecordedVetting:
    """What vetting said of the nodes before the run.

    ``unfit`` (left out), ``warnings`` and ``kept_out`` (not even asked for, after earlier vettings) are host -> reason.
    """

    level: str
    seconds: float
    fit: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)
    kept_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JudgedBy:
    """What a verdict follows from beside figures and history: with these, the run is judged again anywhere.

    ``entries`` are the baselines by metric, as the file has them; the nights of each metric count since ``since_ns``.
    ``series`` ``matters`` and the last fields are those of :func:`pytest_mlhpc.judge.judge.judge`.
    """

    entries: Mapping[str, Mapping[str, Any]]
    since_ns: Mapping[str, int]
    default_branch: str
    mode: str
    local: bool
    nightly: bool
    series: float
    reruns_allowed: int
    reruns_broken: int
    matters: float | None = None
    references: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedFence:
    """What a metric was compared with: the accepted value, in its unit, and the width of the fence as a fraction of it."""

    accepted: float
    width: float


@dataclass(frozen=True)
class Record:
    """One attempt of one run.

    ``system, partition, environment, benchmark`` (+ ``fingerprint`` on `local`) + a metric's name make the series;
    ``benchmark`` is the test's identity. Figures of one series are comparable while ``definition`` and ``device_model``
    stay as they were: another one begins a new epoch. ``purpose`` is nightly, change or manual, or against: one side of a comparison, which feeds nothing. ``verdict`` is a Verdict's value or the failure's name.
    ``created_ns`` is when the record was written, UTC; a measurement carries the run's own times.
    """

    id: str  #: UUIDv7 of the run's attempt
    session: str
    node_id: str
    benchmark: str
    definition: str  #: see :mod:`pytest_mlhpc.store.definition`
    system: str
    partition: str
    environment: str
    device_model: str
    attempt: int
    created_ns: int
    verdict: str
    fingerprint: str = ""
    purpose: str = "manual"
    branch: str = ""
    commit: str = ""
    preset: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""  #: the failure's text where there is one
    explanation: tuple[str, ...] = ()
    node_hours: float = 0.0
    queue_s: float = 0.0
    run_s: float = 0.0  #: from the first process to the last
    account: str = ""  #: ``system:account`` that is charged
    nodes: tuple[str, ...] = ()
    job_id: str = ""  #: the scheduler's own id of the allocation, and of the run's step in it
    step_id: str = ""
    energy_j: float | None = None  #: as the scheduler accounts it
    judged: tuple[str, ...] = ()
    judged_by: JudgedBy | None = None  #: of first attempts that were judged
    #: by metric, of first attempts that were judged by a baseline
    fences: Mapping[str, RecordedFence] = field(default_factory=dict)
    owner: str = ""  #: who is asked about the test; several are one text with commas
    partition_owner: str = ""  #: who is asked about the nodes
    pipeline: str = ""  #: id of the CI pipeline in which the session ran
    root: str = ""  #: pytest's root directory, to which ``node_id`` is relative, on the session's machine
    options: tuple[str, ...] = ()  #: of pytest that chose how it ran, but for system and state directory
    overrides: Mapping[str, str] = field(default_factory=dict)  #: what --mlhpc-set changed of systems.yaml
    #: a program's, as its node started it; ``definition`` has it as the test says it
    argv: tuple[str, ...] = ()
    #: those of the test, and those of the environment with values filled in; of a secret the name alone
    variables: Mapping[str, str] = field(default_factory=dict)
    #: id of the drill, and the fault that it planted into the run; of all other records empty
    drill: str = ""
    vetting: RecordedVetting | None = None  #: None: the nodes were not vetted
    measurement: Measurement | None = None
    schema: int = SCHEMA

    def series(self, metric: str = "") -> SeriesKey:
        """Return the key of one of its series."""
        place = self.system, self.partition, self.environment, self.fingerprint
        return SeriesKey(*place, self.benchmark, metric)

    @property
    def epoch(self) -> Epoch:
        """What it may be compared with."""
        return Epoch(self.definition, self.device_model)


class Epoch(NamedTuple):
    """What must be the same for figures of one series to be comparable."""

    definition: str
    device_model: str  #: empty where the run reports none, as programs do


@dataclass(frozen=True, order=True)
class SeriesKey:
    """One metric of one benchmark where it is measured."""

    system: str
    partition: str
    environment: str
    fingerprint: str  #: empty except on `local`
    benchmark: str  #: identity of the test
    metric: str


#: The run was broken or not what was asked: the test fails in its call phase.
FAILURES: dict[str, str] = {
    "metric_missing": "the run did not report a metric that it must report",
    "metric_invalid": "a metric is NaN, infinite, negative or zero where only a positive figure makes sense",
    "loss_nan": "the training loss became NaN or infinite",
    "no_baseline": "there is no baseline to compare with",
    "worker_exit": "a process ended with a non-zero exit code",
    "worker_killed": "a process was killed by a signal",
    "out_of_memory": "a process used more memory than it may",
    "too_few_ranks": "fewer ranks reported than were asked for",
    "too_few_devices": "fewer devices were used than were asked for",
    "too_few_steps": "fewer steps were measured than were asked for",
    "wrong_device": "the run used another type of device than was asked for",
    "foreign_result": "the result carries the id of another run",
    "truncated_result": "the result is incomplete or damaged",
    "duplicate_result": "the run reported two results",
    "no_result": "the run ended without reporting a result",
    "wrong_result": "what the run computed, sent or read back was checked and is wrong",
    "data_exhausted": "the data set ended before the steps that were asked for",
    "data_unusable": "the data set is missing, damaged or of another shape than the workload takes",
    "build_failed": "what a program needs could not be built",
    "prepare_failed": "a run that a program needs failed",
    "sanity_failed": "the program's output does not match what its test wants in it",
    "target_missed": "the training ended before the quality that was asked for was reached",
    "clock_backwards": "a clock went backwards during the run",
    "time_limit": "the run did not end within its time limit",
    "output_limit": "the program's output exceeded the limit within which metrics are searched",
    "command_not_found": "the program does not exist or cannot be executed",
    "below_reference": "a judged metric is worse than what its test promises for the system",
    "regressed": "a judged metric is worse than its baseline and re-runs confirm it",
    "drifted": "the trailing median moved away from the baseline in git",
    "cannot_lower": "the compiler of the device cannot take this workload, so the test is skipped",
    "cancelled": "this session cancelled the run",
    "detached": "the run is still queued or running; a later session judges it",
}

#: Failures of what a run needs. The run was not made: a setup error.
NEEDED_FAILED = frozenset({"build_failed", "prepare_failed"})

#: Not the test's fault: a setup error, and mlhpc_infra_exit_code.
INFRASTRUCTURE: dict[str, str] = {
    "rejected": "the scheduler refused the allocation",
    "quota_exceeded": "a quota of the namespace or account has no room",
    "admission_denied": "an admission rule of the cluster refused the objects",
    "forbidden": "the user lacks a right that is needed",
    "unauthorized": "the credentials are not accepted (any more)",
    "never_scheduled": "the allocation did not start within its pending limit",
    "image_pull": "a container image could not be pulled",
    "container_config": "a container could not be made as it was described",
    "crash_loop": "a container ended and was started again, again and again",
    "launch_failed": "the launcher or the environment's interpreter could not be started",
    "import_failed": "the environment cannot import what the worker needs",
    "protocol_mismatch": "payload and controller are of different versions",
    "channel_broken": "the channel to the worker broke",
    "node_failure": "a node failed during the run",
    "cancelled_outside": "the allocation, or a run in it, was cancelled from outside",
    "not_begun": "the allocation that it shared with others ended before it began",
    "evicted": "the node ran out of a resource and threw the pod out",
    "preempted": "the scheduler took the nodes away for another job",
    "unfit_nodes": "not enough nodes are fit",
    "machine_busy": "other programs had the processors, and the run took many times as long as usual",
    "disk_full": "there is no room for a file",
    "not_writable": "a file or folder may not be written, or cannot be where it should",
    "unsafe_directory": "another user could have changed a file that would be obeyed",
    "volume_unusable": "a volume to be measured is missing, read-only, not ours to write, or cannot do what was asked",
    "not_supported": "torch or a library of the environment cannot do what the run needs",
    "reruns_incomplete": "too few re-runs ended to judge",
}


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong with one attempt: its name above, what was found, and where to read on."""

    outcome: str
    text: str
    log: str = ""  #: path of the log that shows it
    nodes: tuple[str, ...] = ()  #: that failed
    where: str = ""  #: which nodes and job it happened on

    @property
    def infrastructure(self) -> bool:
        """Whether this is the machine's fault (setup error) rather than the run's."""
        return self.outcome in INFRASTRUCTURE

    @property
    def given_up(self) -> bool:
        """Whether the session gave the run up, or left it to a later one: that says nothing of the run."""
        return self.outcome in {"cancelled", "detached"}

    def __str__(self) -> str:
        """Return ``outcome: text``, and where it happened and the log's path on lines of their own."""
        where = f"\n  ran on: {self.where}" if self.where else ""
        return f"{self.outcome}: {self.text}{where}" + (f"\n  log: {self.log}" if self.log else "")


#: The calibration kernel itself is not repeatable below this; smaller moves correct nothing.
CALIBRATION_NOISE = 0.015


def calibration_rate(measurement: Measurement) -> float | None:
    """Return the mean rate of the calibration kernel around a run (1/s), or None where it was not run."""
    rates = [rate for rate in (measurement.calibration_before, measurement.calibration_after) if rate]
    return sum(rates) / len(rates) if rates else None


def ratio(rate: float | None, reference: float | None) -> float:
    """Return *rate* over *reference*; 1 where either is not known or the difference is within the kernel's noise."""
    if not rate or not reference:
        return 1.0
    found = rate / reference
    return 1.0 if abs(found - 1.0) < CALIBRATION_NOISE else found


def scaled(value: float, unit: str, factor: float) -> float:
    """Return what *value* would have been on a machine that was not *factor* times as fast; only rates and times scale."""
    if unit.endswith("/s"):
        return value / factor
    return value * factor if unit == "s" else value


def excused(value: float, unit: str, factor: float) -> float:
    """Return *value* corrected for a slower machine.

    It only ever excuses: a machine that is faster than at the baseline corrects nothing, because one slow calibration
    back then would make every later run look bad.
    """
    return scaled(value, unit, factor) if factor < 1.0 else value


#: Parts of a run's environment that nodes and commit already say.
_ELSEWHERE = frozenset({"host", "commit"})


def nodes_of(record: Record) -> tuple[str, ...]:
    """Return the nodes of the run; as the run itself named them where the session did not know."""
    return record.nodes or (record.measurement.nodes if record.measurement else ())


def commit_of(record: Record) -> str:
    """Return the commit under test; where the session knew none, the one of the checkout that the run saw."""
    seen = record.measurement.environment.get("commit", "") if record.measurement else ""
    return record.commit or seen


def environment_of(record: Record) -> Mapping[str, str]:
    """Return what the run said of its environment (driver, kernel, image ...), without its host and commit."""
    found = record.measurement.environment if record.measurement else {}
    return {name: value for name, value in found.items() if name not in _ELSEWHERE}


def unfit_of(record: Record) -> Mapping[str, str]:
    """Return the nodes that vetting left out of the run or of its allocation, host -> reason."""
    return {**record.vetting.kept_out, **record.vetting.unfit} if record.vetting else {}


def without_samples(data: Any) -> Any:
    """Return the JSON form of a record with all its figures, without the observations behind them: most of its bytes.

    The best observation of a metric stays where it is better than the figure: it is a device's peak on the roofline page.
    What is not of the schema stays as it is, for the reader to refuse.
    """
    measurement = data.get("measurement") if isinstance(data, dict) else None
    if not isinstance(measurement, dict):
        return data
    found = _emptied(measurement, "step_times_s")
    found = _each(_each(found, "metrics", _metric_without_samples), "per_rank", _rank_without_samples)
    return {**data, "measurement": found}


def _metric_without_samples(metric: Any) -> Any:
    found = _emptied(metric, "samples")
    if found is metric or metric.get("better") != "higher" or not _are_numbers([metric.get("value")]):
        return found
    best = max(metric["samples"], default=metric["value"])
    return {**found, "samples": [best]} if best > metric["value"] else found


def _rank_without_samples(report: Any) -> Any:
    found = _emptied(report, "step_times_s", "losses")
    found = _each(found, "timed", lambda operation: _emptied(operation, "seconds"))
    return _each(found, "figures", lambda figure: _emptied(figure, "samples"))


def _emptied(data: Any, *names: str) -> Any:
    """Return *data* with the lists of numbers of these names empty."""
    lists = [name for name in names if isinstance(data, dict) and _are_numbers(data.get(name))]
    return {**data, **{name: [] for name in lists}} if lists else data


def _each(data: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Return *data* with each element of the list of this name changed."""
    if not isinstance(data, dict) or not isinstance(data.get(name), list):
        return data
    return {**data, name: [change(one) for one in data[name]]}


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} <= {int, float}


PURPOSES = ("nightly", "change", "manual")
#: Purpose of both sides of a comparison: no history takes it.
AGAINST = "against"
#: Sources of pipelines of GitLab and events of GitHub; all others are changes.
_PURPOSE_OF = {
    "schedule": "nightly", "web": "manual", "api": "manual", "trigger": "manual", "workflow_dispatch": "manual",
}  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """``commit`` and ``branch`` are empty outside a repository; ``root`` is pytest's root directory."""

    purpose: str = "manual"
    branch: str = ""
    commit: str = ""
    default_branch: str = "main"
    root: str = ""
    pipeline: str = ""  #: its id in GitLab CI or GitHub Actions


def purpose_of(environ: Mapping[str, str]) -> str:
    """Return nightly, change or manual, from ``$MLHPC_PURPOSE`` or the variables of a pipeline."""
    if (given := environ.get("MLHPC_PURPOSE", "")) in PURPOSES:
        return given
    event = environ.get("CI_PIPELINE_SOURCE") or environ.get("GITHUB_EVENT_NAME", "")
    return _PURPOSE_OF.get(event, "change" if event else "manual")


def provenance_of(root: Path, environ: Mapping[str, str] = os.environ) -> Provenance:
    """Return it from ``$MLHPC_PURPOSE``, the variables of GitLab CI or GitHub Actions, else from git itself.

    A pipeline that a person started is neither a night nor a change. A pipeline of a merge request is on no branch: the one that
    it merges is meant.
    """
    purpose = purpose_of(environ)
    commit = _first(environ, "CI_COMMIT_SHA", "GITHUB_SHA") or _git(root, "rev-parse", "HEAD")
    branch = _first(
        environ,
        "CI_COMMIT_BRANCH",
        "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME",
        "GITHUB_HEAD_REF",
        "GITHUB_REF_NAME",
    ) or _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    pipeline = _first(environ, "CI_PIPELINE_ID", "GITHUB_RUN_ID")
    return Provenance(purpose, branch, commit, default_branch_of(root, environ), str(root), pipeline)


def default_branch_of(root: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Return the branch whose nightly runs are the history of its series."""
    found = environ.get("CI_DEFAULT_BRANCH") or _git(root, "rev-parse", "--abbrev-ref", "origin/HEAD")
    return found.removeprefix("origin/") or "main"


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def user_name() -> str:
    """Return who is accepting; in a container the user may have a number but no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _git(root: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # git is not there, or its file system hangs: a record without commit is still a record
    # A branch may be called by any bytes; what is no UTF-8 is written out, as records go to places that take nothing else.
    return result.stdout.decode("utf-8", "backslashreplace").strip() if result.returncode == 0 else ""


class Verdict(enum.StrEnum):
    """The verdicts, from best to worst news. ``NEW`` has no accepted baseline yet."""

    PASSED = "passed"
    IMPROVED = "improved"
    WRONG_BASELINE = "wrong_baseline"  #: a month without a change lies at another level than the accepted one
    NEW = "new"
    INCONCLUSIVE = "inconclusive"
    SUSPECT = "suspect"  #: it may be a loss; the next nights decide
    DRIFTED = "drifted"
    REGRESSED = "regressed"
    BELOW_REFERENCE = "below_reference"  #: worse than what the test promises for the system
    UNJUDGED = "unjudged"  #: judge=False, or nothing was measured


#: The figure is worse than it may be: the test fails.
WORSE = (Verdict.BELOW_REFERENCE, Verdict.REGRESSED, Verdict.DRIFTED)
#: The test passes, and the figure should be looked at.
NOTABLE = (Verdict.SUSPECT, Verdict.INCONCLUSIVE, Verdict.WRONG_BASELINE, Verdict.IMPROVED)
#: There is nothing to look at.
FINE = (Verdict.PASSED, Verdict.NEW, Verdict.UNJUDGED)
#: The figure may be compared with others as what the program usually does.
GOOD = (Verdict.PASSED, Verdict.IMPROVED, Verdict.WRONG_BASELINE, Verdict.NEW)


@dataclass(frozen=True)
class MetricVerdict:
    """One judged metric. ``change`` is relative and positive when better; ``width`` is the fence as a fraction."""

    name: str
    value: float
    unit: str
    better: str
    baseline: float | None
    change: float | None
    width: float
    verdict: Verdict
    reruns: tuple[float, ...] = ()
    reason: str = ""
    epoch: str = ""  #: what changed since its baseline was accepted, which it is not judged by for that
    fence: tuple[float, float] | None = None  #: accepted value and width, where a reference decided
    settling: int | None = None  #: nights, tonight among them, of those that settle the level of a new series


@dataclass(frozen=True)
class Judgement:
    """The verdict of a run. ``explanation`` is lines of text for people; ``accept_command`` takes the new value."""

    verdict: Verdict
    metrics: tuple[MetricVerdict, ...] = ()
    explanation: tuple[str, ...] = ()
    accept_command: str = ""
    epoch: str = ""  #: what changed since its baseline, or its newest record: a new epoch begins
    reruns_wanted: int = 0  #: more attempts are needed before this can be final
