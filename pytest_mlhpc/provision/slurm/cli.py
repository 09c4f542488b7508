"""The client that uses Slurm's commands: complete, works with every version, and the default."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pytest_mlhpc.provision.slurm import arguments, calls, entities, hostlist, text
from pytest_mlhpc.provision.slurm.client import (
    CALL_LIMIT_S,
    Job,
    Node,
    PartitionLimits,
    QosLimits,
    Reservation,
    SlurmError,
    SlurmRefused,
    SlurmUnavailable,
    Step,
    Submission,
)

_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?\S*")
_CLUSTER = re.compile(r"(?m)^ClusterName\s*=\s*(\S+)\s*$")


class _UserUnknown(SlurmUnavailable):
    """This machine does not know the user, perhaps only for the moment."""


class CliClient:
    """Asks Slurm by its commands on PATH. See SlurmClient for what each method returns and raises."""

    name: str = "cli"

    def __init__(self, environ: Mapping[str, str] | None = None, limit_s: float = CALL_LIMIT_S) -> None:
        self.calls: dict[str, int] = Counter()
        self._environ = calls.environment(os.environ if environ is None else environ)
        self._limit_s = limit_s

    def version(self) -> str:
        """Return the version of the commands, like 24.11.5."""
        answer = self._run("sinfo", "-V")
        found = _VERSION.search(answer)
        if found is None:
            raise SlurmUnavailable(f"sinfo -V: {answer.strip()!r} holds no version")
        return found[0]

    def cluster(self) -> str:
        """Return the cluster's name (ClusterName of slurm.conf), empty where it has none."""
        found = _CLUSTER.search(self._run("scontrol", "show", "config"))
        return found[1] if found and found[1] != "(null)" else ""

    def submit(self, submission: Submission) -> str:
        """Submit the script from its directory; the job's environment is that of its own lines alone."""
        argv = ["sbatch", "--parsable", str(submission.script)]
        if not arguments.says_export(submission.script):
            argv.insert(2, "--export=NONE")
        environ = self._environ | calls.environment(submission.environment)
        environ.pop("SLURM_TIME_FORMAT")  # the job would inherit it: SLURM_* go there whatever is exported
        answer = self._call(argv, environ, str(submission.directory))
        if answer.code != 0:
            raise calls.failure(argv, answer)
        lines = answer.out.strip().splitlines()  # a site's plug-in may greet before the id
        job = lines[-1].split(";")[0].strip() if lines else ""
        if not arguments.JOB_ID.fullmatch(job):
            raise SlurmUnavailable(f"{calls.shown(argv)}: said no job id but {answer.out.strip()[:200]!r}")
        return job

    def jobs(self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = "") -> list[Job]:
        """Return jobs with one of *ids* or of *names* (all if neither is given) of *user*.

        If none is given that is anyone, but only this user where there are too many ids or names for a command line.
        """
        wanted_ids, wanted_names = set(arguments.checked(ids, arguments.JOB_ID, "job id")), set(names)
        if not (wanted_ids or wanted_names or user):
            raise ValueError("jobs() needs a filter")
        mark = arguments.mark()
        argv = ["squeue", "--noheader", "--states=all", f"--Format={text.long_format(text.JOB_FIELDS, mark)}"]
        few = ""
        if wanted_ids and not wanted_names and len(wanted_ids) <= arguments.PER_CALL:
            few = f"--jobs={','.join(sorted(wanted_ids))}"
        elif wanted_names and not wanted_ids and arguments.listable(wanted_names):
            few = f"--name={','.join(sorted(wanted_names))}"
        if not (few or user):
            user = str(os.getuid())  # never the whole cluster: what cannot be listed is ours
        whose = [f"--user={user}"] if user else []
        listed = [few] if few else []
        try:
            answer = self._known([*argv, *whose, *listed])
        except _UserUnknown:
            if not few or user != str(os.getuid()):
                raise
            answer = self._known([*argv, *listed])  # the list is enough; a container may not know our name
        found = text.parse_jobs(answer, mark)
        if not wanted_ids and not wanted_names:
            return found
        return [job for job in found if job.id in wanted_ids or job.name in wanted_names]

    def queue(self, partition: str) -> list[Job]:
        """Return all users' pending jobs of *partition*, highest priority first."""
        mark = arguments.mark()
        return text.parse_queue(
            self._run(
                "squeue", "--noheader", "--states=PENDING", "--sort=-p", f"--partition={arguments.one(partition, 'partition')}",
                f"--Format={text.long_format(text.QUEUE_FIELDS, mark)}",
            ),
            mark,
        )  # fmt: skip

    def accounting(self, ids: Collection[str]) -> list[Job]:
        """Return jobs with their steps from slurmdbd; without it what jobcomp kept, which knows no steps."""
        found: list[Job] = []
        for part in arguments.parts(arguments.checked(ids, arguments.JOB_ID, "job id")):
            try:
                found.extend(self._sacct(part, text.ACCOUNTING_FIELDS))
            except SlurmUnavailable as error:
                if "accounting storage is disabled" not in str(error).lower():
                    raise
                found.extend(self._completed(part, error))
        return found

    def _completed(self, ids: Sequence[str], error: SlurmUnavailable) -> list[Job]:
        try:
            return self._sacct(ids, text.COMPLETION_FIELDS, "--completion")
        except SlurmError as second:
            raise SlurmUnavailable(f"{error}; {second}") from second

    def _sacct(self, ids: Sequence[str], fields: Sequence[str], *more: str) -> list[Job]:
        mark = arguments.mark()
        answer = self._run(
            "sacct", *more, "--noheader", "--parsable", f"--delimiter={mark}", f"--jobs={','.join(ids)}",
            f"--format={','.join(fields)}",
        )  # fmt: skip
        return text.parse_accounting(answer, fields, mark)

    def steps(self, ids: Collection[str]) -> dict[str, tuple[Step, ...]]:
        """Return job id -> its running steps: slurmctld forgets those that ended."""
        found: dict[str, tuple[Step, ...]] = {}
        for part in arguments.parts(arguments.checked(ids, arguments.JOB_ID, "job id")):
            mark = arguments.mark()
            wanted = text.long_format(text.STEP_FIELDS, mark)
            argv = ["squeue", "--noheader", "--steps", f"--jobs={','.join(part)}", f"--Format={wanted}"]
            found |= text.parse_steps(self._known(argv), mark)
        return {job: steps for job, steps in found.items() if job in set(ids)}

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs or steps, or send them *signal* ("TERM")."""
        for part in arguments.parts(arguments.checked(ids, arguments.JOB_ID, "job or step id")):
            argv = ["scancel", *([f"--signal={arguments.one(signal, 'signal')}"] if signal else []), *part]
            answer = self._call(argv)
            words = [line for line in answer.err.splitlines() if line.strip()]
            if answer.code != 0 and not (words and all(arguments.gone(line) for line in words)):
                raise calls.failure(argv, answer)

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """Return the named nodes, or all; names that Slurm does not know are not in the answer."""
        if not names:
            return entities.parse_nodes(self._run("scontrol", "--oneliner", "show", "node"))
        found: list[Node] = []
        for part in arguments.parts(arguments.checked(names, arguments.NAME, "node")):
            argv = ["scontrol", "--oneliner", "show", "node", ",".join(part)]
            answer = self._call(argv)
            if answer.code != 0 and not re.search(
                r"(?m)^Node \S+ not found$", answer.out + "\n" + answer.err
            ):
                raise calls.failure(argv, answer)
            found.extend(entities.parse_nodes(answer.out))
        return found

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes; *reason* becomes one line."""
        line = " ".join(reason.split())
        if not line:
            raise ValueError("Slurm drains no node without a reason")
        for part in arguments.parts(
            arguments.checked(names, arguments.NAME, "node")
        ):  # scontrol takes one pair of quotes off: give it one
            self._run("scontrol", "update", f"NodeName={','.join(part)}", "State=DRAIN", f'Reason="{line}"')

    def resume(self, names: Collection[str]) -> None:
        """Return drained and down nodes to service; others are left alone, for Slurm would refuse them."""
        if not names:
            return
        wanted = [
            node.name
            for node in self.nodes(names)
            if node.state in {"down", "error"} or node.flags & {"drain", "fail"}
        ]
        for part in arguments.parts(wanted):
            self._run("scontrol", "update", f"NodeName={','.join(part)}", "State=RESUME")

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits."""
        answer = self._run("scontrol", "--oneliner", "show", "partition", arguments.one(name, "partition"))
        found = entities.parse_partition(answer)
        if found is None:
            raise SlurmRefused(f"scontrol show partition {name}: {answer.strip()[:200]!r}")
        return found

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits."""
        wanted = "format=Name,MaxWall,MaxTRES,UsageFactor"
        try:
            answer = self._run("sacctmgr", "-nP", "show", "qos", f"name={arguments.one(name, 'QoS')}", wanted)
        except SlurmError:
            return None
        return entities.parse_qos(answer, name)

    def reservations(self) -> list[Reservation]:
        """Return all reservations."""
        return entities.parse_reservations(self._run("scontrol", "--oneliner", "show", "reservation"))

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list; asks nobody."""
        return expanded(hostlist)

    def _run(self, *argv: str) -> str:
        answer = self._call(argv)
        if answer.code != 0:
            raise calls.failure(argv, answer)
        return answer.out

    def _known(self, argv: Sequence[str]) -> str:
        """Return squeue's answer, empty if it knows none of the jobs: asked for a single unknown id it fails."""
        answer = self._call(argv)
        if "invalid user" in answer.err.lower():  # with exit code 0 and no jobs, as if there were none
            words = " ".join(answer.err.split())
            raise _UserUnknown(
                f"{calls.shown(argv)}: {words} (do the directory services of this machine work?)"
            )
        if answer.code != 0 and "invalid job id specified" in answer.err.lower():
            return ""
        if answer.code != 0:
            raise calls.failure(argv, answer)
        return answer.out

    def _call(
        self, argv: Sequence[str], environ: Mapping[str, str] | None = None, directory: str = ""
    ) -> calls.Answer:
        self.calls[argv[0]] += 1
        return calls.call(argv, self._environ if environ is None else environ, self._limit_s, directory)


def expanded(text: str) -> tuple[str, ...]:
    """Return the nodes of a host list.

    Raises:
        SlurmRefused: it is none.
    """
    try:
        return hostlist.expand(text)
    except hostlist.HostlistError as error:
        raise SlurmRefused(str(error)) from error
