"""A scheduler by the commands of a definition: the client that runs them, the rules of its job scripts, and its provisioner.

Read ``definition.py`` for what a definition holds.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.ledger_entry import user_name
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.processes import copy_of, last_lines, run_to_end
from pytest_mlhpc.node.protocol.plan import HELD, JobRules, Plan
from pytest_mlhpc.provision.payload import cannot_write, write_private
from pytest_mlhpc.provision.scheduler.client import (
    CALL_LIMIT_S,
    JobStep,
    JobSubmission,
    SchedulerJob,
    SchedulerNode,
    SchedulerRefused,
    SchedulerState,
    SchedulerUnavailable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.scheduler.definition import (
    QueryModel,
    ResultModel,
    SchedulerDefinition,
    fill,
    filled,
)
from pytest_mlhpc.provision.scheduler.provisioner import JobProvisioner
from pytest_mlhpc.provision.scheduler.script import ScriptRules

#: The scheduler's name in systems.yaml, and the key of its options.
COMMANDS: Final = "commands"

#: The job's own output, in the plan's directory, and the file there by which a later session ends the job.
OUTPUT, SCHEDULER_FILE = "job.out", "scheduler.json"

#: Larger output of a command is no answer, in bytes: a job takes a kilobyte, and a user has fewer than 10,000.
MAX_OUTPUT: Final = 64 << 20

#: What a line for the scheduler cannot hold: each scheduler reads blanks, quotes and signs of a shell in its own way.
_SPECIAL = re.compile(r"[\s\"'`\\$;&|<>\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class _Answer:
    """What a command printed, and its exit code."""

    shown: str
    code: int
    text: str

    @property
    def ended(self) -> str:
        """Say with what exit code it ended, if that is none of success."""
        return f"ended with exit code {self.code}" if self.code else ""

    def failure(self, what: str) -> str:
        """Return a text that says *what* is wrong with it and quotes its last lines."""
        lines = last_lines(self.text.encode("utf-8", "replace"))
        return f"{self.shown} {what}" + (f"; its last lines:\n{lines}" if lines else "; it printed nothing")


class DefinitionClient:
    """Asks a scheduler by the commands of a definition. See SchedulerClient for what each method returns and raises.

    Args:
        definition: how the scheduler is asked.
        environ: the environment of its commands.
    """

    key: str = COMMANDS

    def __init__(
        self, definition: SchedulerDefinition, environ: Mapping[str, str], limit_s: float = CALL_LIMIT_S
    ) -> None:
        self.title: str = definition.title
        self.calls: dict[str, int] = Counter()
        self._definition = definition
        self._environ = copy_of(environ)
        self._limit_s = limit_s
        self._user = user_name()

    def submit(self, submission: JobSubmission) -> str:
        """Submit the script; a refusal is what the definition calls one, any other failure no answer."""
        rules = self._definition.submit
        given = submission.script.read_bytes() if rules.script_on_stdin else b""
        values = {"script": submission.script, "name": submission.name, "directory": submission.directory}
        answer = self._call(filled(rules.argv, {**values, "user": self._user}), given, submission.directory)
        if answer.code == 0 and (found := re.search(rules.id, answer.text)):
            return found["id"]
        if answer.code and rules.refused and (found := re.search(rules.refused, answer.text)):
            raise SchedulerRefused(f"{self.title} refused the job: {found.group().strip()[:2000]}")
        what = answer.ended or f"printed nothing that submit.id matches ({rules.id!r})"
        raise SchedulerUnavailable(answer.failure(what))

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SchedulerJob]:
        """Return this user's jobs; *user* is no other."""
        del user
        rules: QueryModel = self._definition.query
        answer = self._call(filled(rules.argv, {"user": self._user}))
        found = [self._job(match) for match in re.finditer(rules.job, answer.text)]
        none = not (answer.code or answer.text.strip()) or bool(
            rules.none and re.search(rules.none, answer.text)
        )
        if not (found or none):
            what = f"printed nothing that query.job or query.none matches ({rules.job!r:.200})"
            raise SchedulerUnavailable(answer.failure(answer.ended or what))
        return [job for job in found if job.id in ids or job.name in names]

    def _job(self, match: re.Match[str]) -> SchedulerJob:
        states = self._definition.query.states
        text, more = match["state"], match.groupdict()
        state = SchedulerState.UNKNOWN
        for known, meant in (
            (states.pending, SchedulerState.PENDING),
            (states.stuck, SchedulerState.PENDING),
            (states.running, SchedulerState.RUNNING),
            (states.ended, SchedulerState.COMPLETED),
        ):
            state = meant if text in known else state
        reason = (more.get("reason") or "").strip() or f"state {text}"
        return SchedulerJob(
            match["id"], match["name"], self._user, state, reason=reason, stuck=text in states.stuck
        )

    def queue(self, partition: str) -> list[SchedulerJob]:
        """Return nothing: definitions do not tell of other users' jobs."""
        del partition
        return []

    def accounting(self, ids: Collection[str]) -> list[SchedulerJob]:
        """Return the jobs that have ended; nothing of those that are not known, or not yet."""
        rules = self._definition.result
        if rules is None:
            return []
        found = [self._ended(job_id, rules) for job_id in ids]
        return [job for job in found if job is not None]

    def _ended(self, job_id: str, rules: ResultModel) -> SchedulerJob | None:
        answer = self._call(filled(rules.argv, {"id": job_id, "user": self._user}))
        text = answer.text
        if rules.entry and (begins := list(re.finditer(rules.entry, text))):
            text = text[begins[-1].end() :]
        name, code = re.search(rules.name, text), re.search(rules.exit, text)
        if name is None or code is None:
            if re.search(rules.unknown, answer.text):
                return None
            missing = "result.name" if name is None else "result.exit"
            what = answer.ended or f"printed nothing that {missing} matches"
            raise SchedulerUnavailable(answer.failure(what))
        number = int(code["exit"]) if code["exit"].strip("-").isdigit() else 0  # a dash: it has none
        state = SchedulerState.FAILED if number else SchedulerState.COMPLETED
        patterns = rules.states.model_dump(exclude_none=True)
        matching = [key for key, pattern in patterns.items() if re.search(pattern, text)]
        if matching:
            state = SchedulerState[matching[0].upper()]
        signal = number - 128 if 128 < number < 192 else 0
        return SchedulerJob(job_id, name["name"], self._user, state, exit_code=number, signal=signal)

    def steps(self, ids: Collection[str]) -> dict[str, tuple[JobStep, ...]]:
        """Return nothing: jobs have no steps."""
        del ids
        return {}

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs one by one."""
        del signal
        rules = self._definition.cancel
        for job_id in ids:
            answer = self._call(filled(rules.argv, {"id": job_id}))
            if answer.code and not re.search(rules.gone, answer.text):
                raise SchedulerUnavailable(answer.failure(answer.ended))

    def nodes(self, names: Collection[str] = ()) -> list[SchedulerNode]:
        """Return nothing: definitions do not tell of nodes."""
        del names
        return []

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the names between commas."""
        return tuple(filter(None, hostlist.split(",")))

    def _call(self, argv: Sequence[str], given: bytes = b"", directory: Path | None = None) -> _Answer:
        """Run a command to its end, at most CALL_LIMIT_S.

        Raises:
            SchedulerUnusable: it cannot be started.
            SchedulerUnavailable: it did not end in time, or printed more than MAX_OUTPUT.
        """
        shown = " ".join(argv)[:200]
        self.calls[argv[0]] += 1
        try:
            done = run_to_end(argv, self._limit_s, given=given, env=self._environ, cwd=directory)
        except subprocess.TimeoutExpired as error:
            raise SchedulerUnavailable(f"{shown} did not end within {self._limit_s:g} s") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            text = f"cannot start {argv[0]!r} of the definition of {self.title}: {why}"
            raise SchedulerUnusable(f"{text}; is it on PATH?") from error
        output = done.stdout + b"\n" + done.stderr
        if len(output) > MAX_OUTPUT:
            raise SchedulerUnavailable(f"{shown} printed {len(output):,} bytes, which is no answer")
        return _Answer(shown, done.returncode, output.decode("utf-8", "replace"))


def definition_of(partition: Partition) -> SchedulerDefinition:
    """Return the definition of a partition whose scheduler is `commands`; it was checked before."""
    return SchedulerDefinition.model_validate(partition.scheduler_options["definition"])


def script_rules(partition: Partition) -> ScriptRules:
    """Return what job scripts of *partition* have of their own."""
    definition = definition_of(partition)
    hosts = definition.hosts
    return ScriptRules(
        output=OUTPUT,
        directives=_directives,
        launcher_options=lambda *_, **__: (),
        batch="pytest_mlhpc.node.batch.job_nodes",
        job=JobRules(
            title=definition.title,
            id=hosts.id,
            hosts=hosts.file or hosts.variable or "",
            in_file=hosts.file is not None,
            host=hosts.host,
            start=tuple(definition.start),
        ),
    )


def _directives(plan: Plan, partition: Partition, environment: Environment, name: str) -> list[str]:
    """Return the lines for the scheduler.

    Raises:
        UsageError: one would hold what schedulers read in different ways.
    """
    del environment
    definition = definition_of(partition)
    values = job_values(plan, partition, name)
    lines = []
    for templates in (*definition.directives.arguments, *partition.scheduler_options.get("arguments", ())):
        arguments = filled(templates, values)
        for word in arguments:
            if "${" not in word and (bad := _SPECIAL.search(word)):  # else a variable that is shown
                text = f"holds {bad.group()!r}, which a line for {definition.title} cannot say"
                raise UsageError(f"{partition.id}: {word!r:.200} {text}")
        lines.append(" ".join([definition.directives.prefix, *arguments]))
    return lines


def job_values(plan: Plan, partition: Partition, name: str) -> dict[str, str]:
    """Return what ``{name}`` in templates of a job's request means: see JOB_NAMES, and values of definition and partition."""
    nodes, limit_s = plan.nodes + plan.spares, max(1, math.ceil(plan.time_limit_s))
    given: dict[str, object] = {
        "name": name,
        "nodes": nodes,
        "cores": partition.nodes.cores,
        "cores_in_all": nodes * partition.nodes.cores,
        "devices": partition.nodes.devices,
        "memory_mib": partition.nodes.memory >> 20,
        "time_limit_s": limit_s,
        "time_limit_min": math.ceil(limit_s / 60),
        "time_limit": f"{limit_s // 3600:02d}:{limit_s // 60 % 60:02d}:{limit_s % 60:02d}",
        "directory": plan.directory,
        "output": PurePosixPath(plan.directory, OUTPUT),
        "user": user_name(),
    }
    job = {key: str(value) for key, value in given.items()}
    own = {**definition_of(partition).values, **partition.scheduler_options.get("values", {})}
    return {**{key: fill(value, job) for key, value in own.items()}, **job}


class DefinedProvisioner(JobProvisioner):
    """Runs plans in jobs of a scheduler that a definition describes. Arguments are those of JobProvisioner."""

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run here, or an empty string."""
        if spec.workload == HELD and spec.nodes > 1:
            return "the fixture `allocation` starts programs on several nodes by srun, which only Slurm has"
        return super().validate(spec)

    def _write(self, plan: Plan) -> None:
        super()._write(plan)
        path = Path(plan.directory) / SCHEDULER_FILE
        try:
            write_private(path, json.dumps(self._partition.scheduler_options["definition"]))
        except OSError as error:
            raise cannot_write(error, path.parent) from error


def make_provisioner(
    partition: Partition, payload: Callable[[str], Path | None], environ: Mapping[str, str]
) -> DefinedProvisioner:
    """Return the provisioner of *partition*; *payload* returns the path of a zip by its hash."""
    return DefinedProvisioner(
        partition,
        DefinitionClient(definition_of(partition), environ),
        payload,
        rules=script_rules(partition),
        pending_limit_s=float(partition.scheduler_options["pending_limit"]),
    )


def client_of_allocation(directory: Path, environ: Mapping[str, str]) -> DefinitionClient:
    """Return the client by which the job of an earlier session is found, whose folder is *directory*.

    Raises:
        OSError: the folder does not say how; ``ValueError``: what it says is no definition.
    """
    found = read_json(read_private(directory / SCHEDULER_FILE))
    return DefinitionClient(SchedulerDefinition.model_validate(found), environ)


def missing_commands(partition: Partition, environ: Mapping[str, str]) -> list[str]:
    """Return the commands of the definition that are not on PATH."""
    import shutil

    definition = definition_of(partition)
    models = (definition.submit, definition.query, definition.result, definition.cancel)
    names = dict.fromkeys(model.argv[0] for model in models if model is not None)
    return [name for name in names if shutil.which(name, path=environ.get("PATH", os.defpath)) is None]
