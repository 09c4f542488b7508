"""The client that uses pyslurm, and the choice between it and Slurm's commands.

pyslurm must be built for the cluster's own release. It has neither the limits of a QoS nor some options of a job: for these
Slurm's commands are run. Its calls run in this process and end by Slurm's own time limit, MessageTimeout, twice at most. It
subtracts 128 from exit codes of 128 and more. Attribute names are those of pyslurm 25.11; 22.5 and 24.11 have them too.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.agents.nodes import HostlistError, expand_hostlist
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.provision.scheduler.client import (
    JobStep,
    JobSubmission,
    PartitionLimits,
    QosLimits,
    Reservation,
    SchedulerError,
    SchedulerJob,
    SchedulerNode,
    SchedulerRefused,
    SchedulerState,
    SchedulerUnavailable,
    SlurmClient,
)
from pytest_mlhpc.provision.slurm import commands, parse
from pytest_mlhpc.provision.slurm.commands import CliClient, drain_reason, expand_or_refuse
from pytest_mlhpc.provision.slurm.parse import parse_duration_s

#: Time limit of the probe, in seconds; with the controller down pyslurm's first call takes 18 s.
PROBE_LIMIT_S = 25.0

#: The probe. It runs in a process of its own, because importing pyslurm without a cluster ends the process. The first two
#: numbers of its version are its release of Slurm. ``slurmctld`` came with 24.5; before, partitions are loaded instead.
PROBE_PROGRAM = """
import json, pyslurm
try:
    pyslurm.slurmctld.ping_primary()
except AttributeError:
    pyslurm.Partitions.load()
print("\\n" + json.dumps({"version": pyslurm.__version__}))
"""

_RELEASE = re.compile(r"0*(\d+)\.0*(\d+)")


#: Messages for jobs and steps that have ended or never existed.
_GONE_MESSAGES = (
    "invalid job id specified",
    "already completing or completed",
    "does not exist",
    "not found",
)

T = TypeVar("T")


@dataclass(frozen=True)
class PyslurmProbe:
    """Result of the probe: the version of pyslurm, or why it cannot be used."""

    version: str = ""
    trouble: str = ""


def choose_client(client: str, environ: Mapping[str, str] | None = None) -> tuple[SlurmClient, str]:
    """Return the client for the setting ``client:`` (cli, auto, pyslurm) and a line for the log, empty for cli.

    Raises:
        UsageError: ``pyslurm`` is configured and does not work here, or the setting is unknown.
    """
    environ = os.environ if environ is None else environ
    cli = CliClient(environ)
    if client == "cli":
        return cli, ""
    if client not in {"auto", "pyslurm"}:
        raise UsageError(f"slurm client {client!r}: there are cli, auto and pyslurm")
    trouble, version = check_pyslurm(cli, environ)
    if not trouble:
        return PyslurmClient(environ), f"slurm: pyslurm {version} is used"
    if client == "auto":
        return cli, f"slurm: Slurm's commands are used, not pyslurm: {trouble}"
    raise UsageError(f"slurm client 'pyslurm' cannot be used: {trouble}; set client: cli or client: auto")


def check_pyslurm(cli: CliClient, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return why pyslurm cannot be used here, empty if it can, and its version."""
    probe = probe_pyslurm(environ)
    if probe.trouble:
        return probe.trouble, ""
    try:
        cluster = cli.version()
    except SchedulerError as error:
        return f"the version of Slurm is unknown: {error}", probe.version
    if release_of(probe.version) != release_of(cluster):
        return f"pyslurm {probe.version} is not for Slurm {cluster}", probe.version
    return "", probe.version


def release_of(version: str) -> tuple[int, int] | None:
    """Return major and minor, None if there are none: pyslurm writes 22.5.3 for Slurm 22.05."""
    match = _RELEASE.match(version)
    return (int(match[1]), int(match[2])) if match else None


def probe_pyslurm(environ: Mapping[str, str], limit_s: float = PROBE_LIMIT_S) -> PyslurmProbe:
    """Import pyslurm and ping the controller, in a process of its own."""
    argv = [sys.executable, "-P", "-c", PROBE_PROGRAM]  # -P: no pyslurm.py of the current directory
    try:
        answer = commands.run_command(argv, dict(environ), limit_s)
    except SchedulerError as error:
        return PyslurmProbe(trouble=f"its probe: {error}")
    if answer.code != 0:
        lines = [line.strip() for line in answer.err.splitlines() if line.strip()]
        return PyslurmProbe(
            trouble=f"its probe ended with exit code {answer.code}: {lines[-1] if lines else 'no word'}"
        )
    try:
        return PyslurmProbe(version=str(read_json(answer.out.strip().splitlines()[-1])["version"]))
    except (ValueError, IndexError, KeyError, TypeError):
        return PyslurmProbe(trouble=f"its probe said {answer.out.strip()[-200:]!r}")


class PyslurmClient:
    """Queries Slurm by its library. See SlurmClient for what each method returns and raises."""

    title: str = "Slurm"
    key: str = "slurm"
    name: str = "pyslurm"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        # Importing it without a cluster ends the process: only after probe_pyslurm().
        self._pyslurm: Any = importlib.import_module("pyslurm")
        self._environ = os.environ if environ is None else environ
        self._cli = CliClient(environ)
        self.calls: dict[str, int] = self._cli.calls

    def version(self) -> str:
        """Return the version of the cluster's commands, which is that of the library: check_pyslurm() compared them."""
        return self._cli.version()

    def submit(self, submission: JobSubmission) -> str:
        """Submit the script; by sbatch if pyslurm lacks one of its options."""
        try:
            script = submission.script.read_text(encoding="utf-8")
            description = submit_attributes(script, self._environ)
        except (
            OSError,
            ValueError,
        ):  # UnsupportedOptionError, or shlex's: sbatch supports it or reports the mistake
            return self._cli.submit(submission)
        description.setdefault("working_directory", str(submission.directory))
        description["script"] = str(submission.script)
        return str(self._call("submit", lambda: self._pyslurm.JobSubmitDescription(**description).submit()))

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SchedulerJob]:
        """Return jobs with one of *ids* or of *names* (all if neither is given) of *user* (anyone if not given)."""
        if not (ids or names or user):
            raise ValueError("jobs() needs a filter")
        return [
            queued_job(job)
            for job in self._all_jobs()
            if (not (ids or names) or str(job.id) in ids or job.name in names)
            and (not user or user in {job.user_name, str(job.user_id)})
        ]

    def queue(self, partition: str) -> list[SchedulerJob]:
        """Return all users' pending jobs of *partition*, highest priority first."""
        found = [
            queued_job(job)
            for job in self._all_jobs()
            if partition in (job.partition or "").split(",")
            and parse.parse_state(job.state or "") is SchedulerState.PENDING
        ]
        return sorted(found, key=lambda job: -job.priority)

    def _all_jobs(self) -> list[Any]:
        return self._call("Jobs.load", lambda: list(self._pyslurm.Jobs.load().values()))

    def accounting(self, ids: Collection[str]) -> list[SchedulerJob]:
        """Return jobs with their steps from slurmdbd."""
        if not ids:
            return []
        job_ids = [int(job) for job in ids]
        db = self._pyslurm.db
        try:
            found = self._call("db.Jobs.load", lambda: list(db.Jobs.load(db.JobFilter(ids=job_ids)).values()))
        except SchedulerRefused as error:  # without slurmdbd the message only states that it failed
            raise SchedulerUnavailable(str(error)) from error
        return [accounted_job(job) for job in found]

    def steps(self, ids: Collection[str]) -> dict[str, tuple[JobStep, ...]]:
        """Return job id -> its running steps."""
        found = self._call("JobSteps.load_all", self._pyslurm.JobSteps.load_all)
        return {
            str(job): tuple(running_step(step) for step in steps.values())
            for job, steps in found.items()
            if str(job) in ids
        }

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs or steps, or send them *signal* ("TERM")."""
        for id_ in ids:
            job, _, step = id_.partition(".")
            if not job.isdecimal():
                raise SchedulerRefused(f"{id_!r} is no job or step id")
            self._end(int(job), step, f"SIG{signal.removeprefix('SIG')}" if signal else "")

    def _end(self, job: int, step: str, signal: str) -> None:
        if step:
            target = self._pyslurm.JobStep(job, int(step) if step.isdecimal() else step)
        else:
            target = self._pyslurm.Job(job)
        try:
            self._call("cancel", lambda: target.send_signal(signal) if signal else target.cancel())
        except SchedulerRefused as error:
            if not any(message in str(error).lower() for message in _GONE_MESSAGES):
                raise

    def nodes(self, names: Collection[str] = ()) -> list[SchedulerNode]:
        """Return the named nodes, or all; names that Slurm does not know are not in the answer."""
        found = self._call("Nodes.load", lambda: list(self._pyslurm.Nodes.load().values()))
        return [node_of(node) for node in found if not names or node.name in names]

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes; *reason* becomes one line."""
        line = drain_reason(reason)
        for name in names:
            self._modify(name, state="DRAIN", reason=line)

    def resume(self, names: Collection[str]) -> None:
        """Return drained and down nodes to service; others are skipped, as Slurm would refuse them."""
        for node in self.nodes(names) if names else []:
            if node.out_of_service:
                self._modify(node.name, state="RESUME")

    def _modify(self, name: str, **changes: str) -> None:
        node = self._pyslurm.Node
        self._call("Node.modify", lambda: node(name).modify(node(**changes)))

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits."""
        return partition_limits(self._call("Partition.load", lambda: self._pyslurm.Partition.load(name)))

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits, from sacctmgr: pyslurm has none."""
        return self._cli.qos(name)

    def reservations(self) -> list[Reservation]:
        """Return all reservations; of their flags MAINT alone."""
        maintenance = self._pyslurm.ReservationFlags.MAINTENANCE
        found = self._call("Reservations.load", lambda: list(self._pyslurm.Reservations.load().values()))
        return [reservation_of(one, maintenance in one.flags) for one in found]

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list; needs no query."""
        return expand_or_refuse(hostlist)

    def _call(self, function: str, call: Callable[[], T]) -> T:
        """Call pyslurm; its errors become SchedulerError with its own message."""
        self.calls[function] += 1
        try:
            return call()
        except (self._pyslurm.PyslurmError, ValueError, TypeError, OverflowError) as error:
            kind = SchedulerUnavailable if commands.means_no_answer(str(error)) else SchedulerRefused
            raise kind(f"pyslurm {function}: {error}") from error


# The ``#SBATCH`` lines of a job script as attributes of pyslurm.JobSubmitDescription. pyslurm's own parser,
# ``load_sbatch_options``, sets an attribute that does not exist for ``--partition`` (as of 25.11.2), and loses values with
# spaces or a second equals sign.

#: Options whose value is that of the attribute.
_TEXT_OPTIONS = {
    "job-name": "name", "qos": "qos", "account": "account", "constraint": "constraints", "nodes": "nodes",
    "chdir": "working_directory", "output": "standard_output", "error": "standard_error",
    "input": "standard_in", "open-mode": "log_files_open_mode", "comment": "comment", "signal": "signal",
    "gpus-per-task": "gpus_per_task", "gpus": "gpus",
}  # fmt: skip

_LIST_OPTIONS = {"partition": "partitions", "reservation": "reservations", "licenses": "licenses"}

_NODE_OPTIONS = {"nodelist": "required_nodes", "exclude": "excluded_nodes"}

_NUMBER_OPTIONS = {
    "ntasks": "ntasks", "ntasks-per-node": "ntasks_per_node", "cpus-per-task": "cpus_per_task",
    "threads-per-core": "threads_per_core", "priority": "priority",
}  # fmt: skip

_MEMORY_OPTIONS = {"mem": "memory_per_node", "mem-per-cpu": "memory_per_cpu"}

_FLAG_OPTIONS: dict[str, tuple[str, Any]] = {
    "exclusive": ("resource_sharing", "no"), "requeue": ("is_requeueable", True), "no-requeue": ("is_requeueable", False),
    "hold": ("priority", 0),
}  # fmt: skip

_SHORT_OPTIONS = {
    "J": "job-name", "p": "partition", "q": "qos", "A": "account", "C": "constraint", "N": "nodes", "n": "ntasks",
    "c": "cpus-per-task", "t": "time", "o": "output", "e": "error", "D": "chdir", "w": "nodelist", "x": "exclude",
    "L": "licenses", "H": "hold", "G": "gpus",
}  # fmt: skip


class UnsupportedOptionError(ValueError):
    """pyslurm has no attribute for an option, or does not take this value; sbatch does."""


def submit_attributes(script: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes for the lines of *script*, the job's environment among them.

    Raises:
        UnsupportedOptionError: the text names the option.
    """
    found: dict[str, Any] = {"environment": _job_environment(environ)}
    gres: dict[str, int] = {}
    for option, value in _script_options(script):
        if option in {"gres", "gpus-per-node"}:
            gres |= _gres(option, value)
        else:
            found |= _attribute(option, value)
    return found | ({"gres_per_node": gres} if gres else {})


def _script_options(script: str) -> list[tuple[str, str | None]]:
    """Return long names and values, from the lines before the script's first command, as sbatch reads them."""
    options: list[tuple[str, str | None]] = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            arguments = shlex.split(line.removeprefix("#SBATCH"))
            while arguments:
                options.append(_next_option(arguments))
    return options


def _next_option(arguments: list[str]) -> tuple[str, str | None]:
    """Take one option off the front of *arguments*."""
    word = arguments.pop(0)
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        if equals:
            return name, value
    elif word.startswith("-") and word[1:2] in _SHORT_OPTIONS:
        name, value = _SHORT_OPTIONS[word[1]], word[2:]
        if value:
            return name, value
    else:
        raise UnsupportedOptionError(f"pyslurm cannot say {word!r}")
    if name in _FLAG_OPTIONS:
        return name, None
    if not arguments:
        raise UnsupportedOptionError(f"pyslurm cannot say {word!r} without a value")
    return name, arguments.pop(0)


def _attribute(option: str, value: str | None) -> dict[str, Any]:
    """Return the attribute of one option."""
    if value is None and option in _FLAG_OPTIONS:
        return dict([_FLAG_OPTIONS[option]])
    if value is not None and option in _TEXT_OPTIONS:
        return {_TEXT_OPTIONS[option]: value}
    if value is not None and option in _LIST_OPTIONS:
        return {_LIST_OPTIONS[option]: value.split(",")}
    if value is not None and option in _NODE_OPTIONS:
        return {_NODE_OPTIONS[option]: _hosts(option, value)}
    return _number_attribute(option, value or "")


def _number_attribute(option: str, value: str) -> dict[str, Any]:
    """Return the attribute of an option whose value is a number, a time, a size, or NONE."""
    if option in _NUMBER_OPTIONS and value.isdecimal():
        return {_NUMBER_OPTIONS[option]: int(value)}
    if option in _MEMORY_OPTIONS and value.strip("0KMGT"):  # 0 means all memory, pyslurm reads it as no value
        return {_MEMORY_OPTIONS[option]: value}
    seconds = parse_duration_s(value) if option == "time" else None
    if seconds is not None:
        return {"time_limit": math.ceil(seconds / 60)}  # whole minutes: text of digits raises TypeError
    if (option, value) == ("export", "NONE"):
        return {}  # see _job_environment
    raise UnsupportedOptionError(f"pyslurm cannot say --{option}={value}")


def _hosts(option: str, value: str) -> list[str]:
    try:
        return list(expand_hostlist(value))
    except HostlistError as error:
        raise UnsupportedOptionError(f"pyslurm cannot say --{option}={value}: {error}") from error


def _gres(option: str, value: str | None) -> dict[str, int]:
    """Return ``gpu:h100`` -> 4 of ``gpu:h100:4``; one of what has no count."""
    found: dict[str, int] = {}
    for part in (value or "").split(","):
        arguments = part.split(":") if option == "gres" else ["gpu", *part.split(":")]
        count = int(arguments.pop()) if len(arguments) > 1 and arguments[-1].isdecimal() else 1
        if not 0 < len(arguments) < 3 or not all(arguments):
            raise UnsupportedOptionError(f"pyslurm cannot say --{option}={value}")
        found[":".join(arguments)] = count
    return found


def _job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ``--export=NONE`` gives a job: its user's own, loaded on the node. An empty one would mean this process's."""
    return {"SLURM_GET_USER_ENV": "1", "PATH": environ.get("PATH", os.defpath)}


# pyslurm's objects as dataclasses of client.py.


def queued_job(job: Any) -> SchedulerJob:
    """Return a job of slurmctld."""
    return _job_of(job, job.allocated_nodes, restarts=job.requeue_count or 0)


def accounted_job(job: Any) -> SchedulerJob:
    """Return a job of slurmdbd with its steps."""
    return _job_of(job, job.nodelist, steps=tuple(_accounted_step(step) for step in job.steps.values()))


def _job_of(job: Any, hostlist: str | None, **more: Any) -> SchedulerJob:
    return SchedulerJob(
        id=str(job.id),
        name=job.name or "",
        user=job.user_name or str(job.user_id),
        state=parse.parse_state(job.state or ""),
        reason=parse.value_or_empty(job.state_reason or ""),
        partition=job.partition or "",
        account=job.account or "",
        nodes=parse.nodes_of(hostlist or ""),
        node_count=job.num_nodes or 0,
        time_limit_s=_seconds(job.time_limit) or 0.0,
        priority=job.priority or 0,
        submit_ns=_ns(job.submit_time),
        start_ns=_ns(job.start_time),
        end_ns=_ns(job.end_time),
        exit_code=job.exit_code or 0,
        signal=job.exit_code_signal or 0,
        **more,
    )


def _accounted_step(step: Any) -> JobStep:
    return JobStep(
        id=str(step.id),
        name=step.name or "",
        state=parse.parse_state(step.state or ""),
        exit_code=step.exit_code or 0,
        signal=step.exit_code_signal or 0,
        nodes=parse.nodes_of(step.nodelist or ""),
        energy_j=parse.parse_energy_j(str(step.stats.consumed_energy or "")),
        start_ns=_ns(step.start_time),
        end_ns=_ns(step.end_time),
    )


def running_step(step: Any) -> JobStep:
    """Return a running step."""
    return JobStep(
        id=str(step.id),
        name=step.name or "",
        state=parse.parse_state(step.state or ""),
        nodes=parse.nodes_of(step.allocated_nodes or ""),
        start_ns=_ns(step.start_time),
    )


def node_of(node: Any) -> SchedulerNode:
    """Return a node."""
    base, flags = parse.parse_node_state(node.state or "")
    return SchedulerNode(
        name=node.name,
        state=base,
        flags=flags,
        reason=node.reason or "",
        address=node.address or "",
        hostname=node.hostname or "",
        cpus=node.total_cpus or 0,
        memory=(node.real_memory or 0) * parse.MIB,
        gres=",".join(f"{name}:{count}" for name, count in (node.configured_gres or {}).items()),
        features=frozenset(node.available_features or ()),
        partitions=frozenset(node.partitions or ()),
    )


def partition_limits(found: Any) -> PartitionLimits:
    """Return a partition's limits."""
    return PartitionLimits(
        name=found.name,
        up=found.state == "UP",
        max_time_s=_seconds(found.max_time),
        max_nodes=found.max_nodes if isinstance(found.max_nodes, int) else None,
        min_nodes=found.min_nodes or 0,
        total_nodes=found.total_nodes or 0,
        nodes=parse.nodes_of(found.nodes or ""),
        allow_accounts=_names_or_all(found.allowed_accounts),
        allow_qos=_names_or_all(found.allowed_qos),
        qos=found.qos or "",
    )


def reservation_of(found: Any, maintenance: bool) -> Reservation:
    """Return a reservation; of its flags MAINT alone, if *maintenance*."""
    return Reservation(
        name=found.name,
        start_ns=_ns(found.start_time),
        end_ns=_ns(found.end_time),
        nodes=parse.nodes_of(found.nodes or ""),
        partition=found.partition or "",
        users=_names_or_all(found.users),
        accounts=_names_or_all(found.accounts),
        flags=frozenset({"MAINT"}) if maintenance else frozenset(),
    )


def _seconds(minutes: Any) -> float | None:
    """Return seconds of whole minutes; None for UNLIMITED and nothing."""
    return 60.0 * minutes if isinstance(minutes, int) else None


def _ns(seconds: Any) -> int:
    return int(seconds) * parse.NS if seconds else 0


def _names_or_all(names: Iterable[str] | None) -> frozenset[str]:
    """Return the names; an empty set for ALL."""
    found = frozenset(names or ())
    return frozenset() if found == {"ALL"} else found
