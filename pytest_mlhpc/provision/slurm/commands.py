"""The client that runs Slurm's commands: complete, works with every version, and the default.

Read here how a command line is made, which variables of the environment it gets, and how its failure is classified.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.node.agents.nodes import HostlistError, expand_hostlist
from pytest_mlhpc.node.processes import copy_of, run_to_end
from pytest_mlhpc.provision.scheduler.client import (
    CALL_LIMIT_S,
    JobStep,
    JobSubmission,
    PartitionLimits,
    QosLimits,
    Reservation,
    SchedulerError,
    SchedulerJob,
    SchedulerNode,
    SchedulerRefused,
    SchedulerUnavailable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.slurm import parse

#: Most of a command's own output that an error quotes, in characters.
MAX_MESSAGE = 2000
#: Most of a command line that an error quotes, in characters.
MAX_DISPLAYED = 120

#: Variables that set defaults of these commands (their man pages, ENVIRONMENT VARIABLES), or describe a surrounding job.
#: Both would silently change a request.
DROPPED_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SQUEUE_",
    "SACCT_",
    "SCANCEL_",
    "SINFO_",
    "SALLOC_",
    "SRUN_",
    "SACCTMGR_",
    "SCONTROL_",
)

#: Variables that are passed on: how the cluster is found, the user's identity there, and the key for the accounting, which
#: changes nothing else of a job.
PRESERVED_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SBATCH_WCKEY"})

#: Messages, in lower case, of Slurm's commands that got no answer: from slurm_errno.h and from real clusters.
_NO_ANSWER = (
    "unable to contact slurm",
    "socket timed out",
    "connection refused",
    "connection timed out",
    "connection reset",
    "connect failure",
    "communication connection failure",
    "communication shutdown failure",
    "message send failure",
    "message receive failure",
    "zero bytes were transmitted",
    "insufficient bytes",
    "in standby mode",
    "munge encode failed",
    "munge decode failed",
    "if munged is up",
    "protocol authentication error",
    "unable to establish configuration source",
    "could not establish a configuration source",
    "resource temporarily unavailable",
    "temporarily unable to accept",
    "problem talking to the database",
    "unable to connect to database",
    "accounting storage is disabled",
    "accounting_storage/slurmdbd",
    "job completion is disabled",
    "slurm_persist_conn_open",
    "sending persistinit",
    "no route to host",
    "network is unreachable",
    "unable to resolve",
    "i/o error writing script",
)

#: Messages, in lower case, of commands that cannot read their configuration. A controller that does not serve it ("failed to
#: fetch remote configs") is an outage, which the list above matches.
_NO_CONFIGURATION = ("unable to process configuration file", "cannot stat file", "dns srv lookup failed")

#: Phrases, in lower case, of sbatch's refusals -> the key of a partition's `slurm:` that is to be checked.
_KEY_OF = (
    ("invalid account", "account"),
    ("invalid partition", "partition"),
    ("invalid qos", "qos"),
    ("reservation is invalid", "reservation"),
    ("invalid feature", "constraint"),
    ("invalid license", "licenses"),
)

#: Errors of a program that can never be started.
_NO_PROGRAM = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC})

#: Most ids or names on one command line: with 40 bytes each far below ARG_MAX, which is at least 128 kB a string.
MAX_PER_CALL = 500

JOB_ID = re.compile(r"[0-9][0-9_+]*(\.[0-9a-z_+]+)?")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:/-]*")
_EXPORT = re.compile(r"^#SBATCH\s.*--export[=\s]", re.MULTILINE)

#: scancel's messages for jobs and steps that have ended or never existed: nothing is left to cancel.
_GONE_MESSAGES = ("invalid job id specified", "already completing or completed", "job/step already")
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?\S*")
_CLUSTER = re.compile(r"(?m)^ClusterName\s*=\s*(\S+)\s*$")


class _UserUnknownError(SchedulerUnavailable):
    """This machine does not know the user, perhaps only at present."""


class CliClient:
    """Queries Slurm by its commands on PATH. See SlurmClient for what each method returns and raises."""

    title: str = "Slurm"
    key: str = "slurm"
    name: str = "cli"

    def __init__(self, environ: Mapping[str, str] | None = None, limit_s: float = CALL_LIMIT_S) -> None:
        self.calls: dict[str, int] = Counter()
        self._environ = command_environment(os.environ if environ is None else environ)
        self._limit_s = limit_s

    def version(self) -> str:
        """Return the version of the commands, like 24.11.5."""
        answer = self._run("sinfo", "-V")
        found = _VERSION.search(answer)
        if found is None:
            raise SchedulerUnavailable(f"sinfo -V: {answer.strip()!r} holds no version")
        return found[0]

    def cluster(self) -> str:
        """Return the cluster's name (ClusterName of slurm.conf), empty where it has none."""
        found = _CLUSTER.search(self._run("scontrol", "show", "config"))
        return found[1] if found and found[1] != "(null)" else ""

    def submit(self, submission: JobSubmission) -> str:
        """Submit the script from its directory; the job's environment is the one of its own lines."""
        argv = ["sbatch", "--parsable", str(submission.script)]
        if not sets_export(submission.script):
            argv.insert(2, "--export=NONE")
        environ = self._environ | command_environment(submission.environment)
        environ.pop("SLURM_TIME_FORMAT")  # the job would inherit it: SLURM_* go there whatever is exported
        answer = self._call(argv, environ, str(submission.directory))
        if answer.code != 0:
            raise command_error(argv, answer)
        lines = answer.out.strip().splitlines()  # a site's plug-in may greet before the id
        job = lines[-1].split(";")[0].strip() if lines else ""
        if not JOB_ID.fullmatch(job):
            raise SchedulerUnavailable(
                f"no job id in {answer.out.strip()[:200]!r} ({displayed_command(argv)})"
            )
        return job

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SchedulerJob]:
        """Return jobs with one of *ids* or of *names* (all if neither is given) of *user*.

        Without *user* they are anybody's; only this user's if too many ids or names are given for a command line.
        """
        id_filter, name_filter = set(validated(ids, JOB_ID, "job id")), set(names)
        if not (id_filter or name_filter or user):
            raise ValueError("jobs() needs a filter")
        mark = random_mark()
        argv = [
            "squeue",
            "--noheader",
            "--states=all",
            f"--Format={parse.squeue_format(parse.JOB_FIELDS, mark)}",
        ]
        listed_filter = ""
        if id_filter and not name_filter and len(id_filter) <= MAX_PER_CALL:
            listed_filter = f"--jobs={','.join(sorted(id_filter))}"
        elif name_filter and not id_filter and listable(name_filter):
            listed_filter = f"--name={','.join(sorted(name_filter))}"
        if not (listed_filter or user):
            user = self._own_uid()  # never the whole cluster: a filter that cannot be listed means own jobs
        users = [f"--user={user}"] if user else []
        filters = [listed_filter] if listed_filter else []
        try:
            answer = self._squeue([*argv, *users, *filters])
        except _UserUnknownError:
            if not listed_filter or user != self._own_uid():
                raise
            answer = self._squeue([*argv, *filters])  # the list suffices; a container may not know the user
        found = parse.parse_jobs(answer, mark)
        if not id_filter and not name_filter:
            return found
        return [job for job in found if job.id in id_filter or job.name in name_filter]

    def queue(self, partition: str) -> list[SchedulerJob]:
        """Return all users' pending jobs of *partition*, highest priority first."""
        mark = random_mark()
        return parse.parse_queue(
            self._run(
                "squeue", "--noheader", "--states=PENDING", "--sort=-p", f"--partition={validated_name(partition, 'partition')}",
                f"--Format={parse.squeue_format(parse.QUEUE_FIELDS, mark)}",
            ),
            mark,
        )  # fmt: skip

    def accounting(self, ids: Collection[str]) -> list[SchedulerJob]:
        """Return jobs with their steps from slurmdbd; without it from jobcomp, which knows no steps."""
        found: list[SchedulerJob] = []
        for part in in_batches(validated(ids, JOB_ID, "job id")):
            try:
                found.extend(self._sacct(part, parse.ACCOUNTING_FIELDS))
            except SchedulerUnavailable as error:
                if "accounting storage is disabled" not in str(error).lower():
                    raise
                found.extend(self._completed(part, error))
        return found

    def _completed(self, ids: Sequence[str], error: SchedulerUnavailable) -> list[SchedulerJob]:
        try:
            return self._sacct(ids, parse.COMPLETION_FIELDS, "--completion")
        except SchedulerError as second:
            raise SchedulerUnavailable(f"{error}; {second}") from second

    def _sacct(self, ids: Sequence[str], fields: Sequence[str], *more: str) -> list[SchedulerJob]:
        mark = random_mark()
        answer = self._run(
            "sacct", *more, "--noheader", "--parsable", f"--delimiter={mark}", f"--jobs={','.join(ids)}",
            f"--format={','.join(fields)}",
        )  # fmt: skip
        return parse.parse_accounting(answer, fields, mark)

    def steps(self, ids: Collection[str]) -> dict[str, tuple[JobStep, ...]]:
        """Return job id -> its running steps: slurmctld forgets ended ones."""
        found: dict[str, tuple[JobStep, ...]] = {}
        for part in in_batches(validated(ids, JOB_ID, "job id")):
            mark = random_mark()
            columns = parse.squeue_format(parse.STEP_FIELDS, mark)
            argv = ["squeue", "--noheader", "--steps", f"--jobs={','.join(part)}", f"--Format={columns}"]
            found |= parse.parse_steps(self._squeue(argv), mark)
        return {job: steps for job, steps in found.items() if job in set(ids)}

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs or steps, or send them *signal* ("TERM")."""
        for part in in_batches(validated(ids, JOB_ID, "job or step id")):
            argv = ["scancel", *([f"--signal={validated_name(signal, 'signal')}"] if signal else []), *part]
            answer = self._call(argv)
            messages = [line for line in answer.err.splitlines() if line.strip()]
            if answer.code != 0 and not (messages and all(means_ended(line) for line in messages)):
                raise command_error(argv, answer)

    def nodes(self, names: Collection[str] = ()) -> list[SchedulerNode]:
        """Return the named nodes, or all; names that Slurm does not know are not in the answer."""
        if not names:
            return parse.parse_nodes(self._run("scontrol", "--oneliner", "show", "node"))
        found: list[SchedulerNode] = []
        for part in in_batches(validated(names, NAME, "node")):
            argv = ["scontrol", "--oneliner", "show", "node", ",".join(part)]
            answer = self._call(argv)
            if answer.code != 0 and not re.search(
                r"(?m)^Node \S+ not found$", answer.out + "\n" + answer.err
            ):
                raise command_error(argv, answer)
            found.extend(parse.parse_nodes(answer.out))
        return found

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes; *reason* becomes one line."""
        line = drain_reason(reason)
        for part in in_batches(validated(names, NAME, "node")):
            # scontrol removes one pair of quotes.
            self._run("scontrol", "update", f"NodeName={','.join(part)}", "State=DRAIN", f'Reason="{line}"')

    def resume(self, names: Collection[str]) -> None:
        """Return drained and down nodes to service; others are skipped, as Slurm would refuse them."""
        drained = [node.name for node in self.nodes(names) if node.out_of_service] if names else []
        for part in in_batches(drained):
            self._run("scontrol", "update", f"NodeName={','.join(part)}", "State=RESUME")

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits."""
        answer = self._run("scontrol", "--oneliner", "show", "partition", validated_name(name, "partition"))
        found = parse.parse_partition(answer)
        if found is None:
            raise SchedulerRefused(f"scontrol show partition {name}: {answer.strip()[:200]!r}")
        return found

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits."""
        columns = "format=Name,MaxWall,MaxTRES,UsageFactor"
        try:
            answer = self._run(
                "sacctmgr", "-nP", "show", "qos", f"name={validated_name(name, 'QoS')}", columns
            )
        except SchedulerError:
            return None
        return parse.parse_qos(answer, name)

    def reservations(self) -> list[Reservation]:
        """Return all reservations."""
        return parse.parse_reservations(self._run("scontrol", "--oneliner", "show", "reservation"))

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list; needs no query."""
        return expand_or_refuse(hostlist)

    def _own_uid(self) -> str:
        return str(os.getuid())

    def _run(self, *argv: str) -> str:
        answer = self._call(argv)
        if answer.code != 0:
            raise command_error(argv, answer)
        return answer.out

    def _squeue(self, argv: Sequence[str]) -> str:
        """Return squeue's answer, empty if it knows none of the jobs: for a single unknown id it fails."""
        answer = self._call(argv)
        if "invalid user" in answer.err.lower():  # with exit code 0 and no jobs, as if there were none
            message = " ".join(answer.err.split())
            raise _UserUnknownError(
                f"{message}: do the directory services of this machine work? ({displayed_command(argv)})"
            )
        if answer.code != 0 and "invalid job id specified" in answer.err.lower():
            return ""
        if answer.code != 0:
            raise command_error(argv, answer)
        return answer.out

    def _call(
        self, argv: Sequence[str], environ: Mapping[str, str] | None = None, directory: str = ""
    ) -> CommandResult:
        self.calls[argv[0]] += 1
        return run_command(argv, self._environ if environ is None else environ, self._limit_s, directory)


def expand_or_refuse(text: str) -> tuple[str, ...]:
    """Return the nodes of a host list.

    Raises:
        SchedulerRefused: *text* is no host list.
    """
    try:
        return expand_hostlist(text)
    except HostlistError as error:
        raise SchedulerRefused(str(error)) from error


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command, decoded leniently."""

    code: int
    out: str
    err: str


def command_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return *base* without variables that silently change Slurm's commands; times are epoch seconds, messages English."""
    passed_on = {
        name: value
        for name, value in copy_of(base).items()
        if name in PRESERVED_VARIABLES or not name.startswith(DROPPED_PREFIXES)
    }
    return passed_on | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], limit_s: float, directory: str = ""
) -> CommandResult:
    """Run a command to its end, at most *limit_s* seconds, in *directory* if one is given; stdin is empty.

    Raises:
        SchedulerUnusable: the command does not exist, cannot be started, or finds no configuration.
        SchedulerUnavailable: it was killed, or did not end in time; none of its processes is left.
    """
    try:
        ended = run_to_end(_resolve_program(argv, environ), limit_s, env=environ, cwd=directory or None)
    except subprocess.TimeoutExpired as error:
        message = (error.stderr or b"").decode(errors="replace")
        kind = SchedulerUnusable if _contains_any(message, _NO_CONFIGURATION) else SchedulerUnavailable
        quoted = f": {_one_line(message)}" if message.strip() else ""
        raise kind(
            f"no answer from {argv[0]} within {limit_s:g} s{quoted} ({displayed_command(argv)})"
        ) from None
    except OSError as error:
        kind = SchedulerUnusable if error.errno in _NO_PROGRAM else SchedulerUnavailable
        raise kind(f"{argv[0]} cannot be started: {error}") from error
    answer = CommandResult(
        ended.returncode, ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace")
    )
    if answer.code < 0:
        killed = f"{argv[0]} was killed by {_signal_name(-answer.code)}: {_one_line(answer.err)}"
        raise SchedulerUnavailable(f"{killed} ({displayed_command(argv)})")
    return answer


def displayed_command(argv: Sequence[str]) -> str:
    """Return a command line for an error text: printable, without its environment, at most MAX_DISPLAYED characters."""
    line = _printable(shlex.join(argv))
    return line if len(line) <= MAX_DISPLAYED else f"{line[:MAX_DISPLAYED]} ..."


def command_error(argv: Sequence[str], answer: CommandResult) -> SchedulerError:
    """Return the error of a failed command: SchedulerUnusable or SchedulerUnavailable by its message, else SchedulerRefused."""
    message = answer.err.strip() or answer.out.strip()
    kind: type[SchedulerError] = SchedulerUnavailable if means_no_answer(message) else SchedulerRefused
    if _contains_any(message, _NO_CONFIGURATION):
        kind = SchedulerUnusable
    key = next((key for phrase, key in _KEY_OF if phrase in message.lower()), "")
    advice = f"; check `{key}` under `slurm:` of the partition in systems.yaml" if key else ""
    return kind(f"{_one_line(message)}{advice} (exit code {answer.code} of {displayed_command(argv)})")


def means_no_answer(message: str) -> bool:
    """Return whether *message* means that Slurm did not answer."""
    return _contains_any(message, _NO_ANSWER)


def _contains_any(message: str, phrases: Sequence[str]) -> bool:
    lower = message.lower()
    return any(phrase in lower for phrase in phrases)


def _resolve_program(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return *argv* with the command's own path: the PATH of *environ* counts, not this process's."""
    path = shutil.which(argv[0], path=environ.get("PATH", os.defpath))
    if path is None:
        raise SchedulerUnusable(f"the command {argv[0]!r} is not on PATH ({environ.get('PATH', os.defpath)})")
    return [path, *argv[1:]]


def _one_line(message: str) -> str:
    """Return a command's message on one line: printable, at most MAX_MESSAGE characters."""
    line = _printable("; ".join(part.strip() for part in message.splitlines() if part.strip()))
    if len(line) > MAX_MESSAGE:
        line = line[:MAX_MESSAGE] + " ..."
    return line or "it said nothing"


def _printable(line: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in line)


def _signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def random_mark() -> str:
    """Return a separator that no job's name can hold by intent. It begins with no digit, which squeue reads as a width."""
    return f"<{secrets.token_hex(8)}>"


def in_batches(arguments: Collection[str]) -> Iterator[list[str]]:
    """Yield the arguments in lists that fit one command line."""
    rest = iter(arguments)
    while part := list(itertools.islice(rest, MAX_PER_CALL)):
        yield part


def validated(arguments: Collection[str], form: re.Pattern[str], what: str) -> list[str]:
    """Return the arguments without duplicates; none can be read as an option or as several arguments.

    Raises:
        SchedulerRefused: an argument is no *what*.
    """
    for argument in arguments:
        if not form.fullmatch(argument):
            raise SchedulerRefused(f"{argument!r} is no {what}")
    return list(dict.fromkeys(arguments))


def validated_name(name: str, what: str) -> str:
    """Return *name*. Raises as :func:`validated` does."""
    return validated([name], NAME, what)[0]


def drain_reason(reason: str) -> str:
    """Return *reason* as one line.

    Raises:
        ValueError: it is empty.
    """
    line = " ".join(reason.split())
    if not line:
        raise ValueError("Slurm drains no node without a reason")
    return line


def listable(names: Collection[str]) -> bool:
    """Return whether ``squeue --name`` can filter by exactly these."""
    return len(names) <= MAX_PER_CALL and not any("," in name for name in names)


def sets_export(script: Path) -> bool:
    """Return whether the script sets ``--export``. A script that cannot be read is reported by sbatch."""
    try:
        return bool(_EXPORT.search(script.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False


def means_ended(line: str) -> bool:
    """Return whether this line of scancel means that nothing is left to cancel."""
    return _contains_any(line, _GONE_MESSAGES)
