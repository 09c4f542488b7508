"""The client that uses Slurm's commands: complete, works with every version, and the default."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.provision.slurm import calls, entities, hostlist, text
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

#: Most ids or names on one command line: with 40 bytes each far below ARG_MAX, which is at least 128 kB a string.
PER_CALL = 500

_ID = re.compile(r"[0-9][0-9_+]*(\.[0-9a-z_+]+)?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:/-]*")
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?\S*")
_EXPORT = re.compile(r"^#SBATCH\s.*--export[=\s]", re.MULTILINE)

#: scancel's words for jobs and steps that have ended or never were: nothing is left to cancel.
_GONE = ("invalid job id specified", "already completing or completed", "job/step already")


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

    def submit(self, submission: Submission) -> str:
        """Submit the script from its directory; the job's environment is that of its own lines alone."""
        argv = ["sbatch", "--parsable", str(submission.script)]
        if not _says_export(submission.script):
            argv.insert(2, "--export=NONE")
        environ = self._environ | calls.environment(submission.environment)
        environ.pop("SLURM_TIME_FORMAT")  # the job would inherit it: SLURM_* go there whatever is exported
        answer = self._call(argv, environ, str(submission.directory))
        if answer.code != 0:
            raise calls.failure(argv, answer)
        lines = answer.out.strip().splitlines()  # a site's plug-in may greet before the id
        job = lines[-1].split(";")[0].strip() if lines else ""
        if not _ID.fullmatch(job):
            raise SlurmUnavailable(f"{calls.shown(argv)}: said no job id but {answer.out.strip()[:200]!r}")
        return job

    def jobs(self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = "") -> list[Job]:
        """Return jobs with one of *ids* or of *names* (all if neither is given) of *user* (anyone if not given)."""
        wanted_ids, wanted_names = set(_checked(ids, _ID, "job id")), set(names)
        if not (wanted_ids or wanted_names or user):
            raise ValueError("jobs() needs a filter")
        mark = _mark()
        argv = ["squeue", "--noheader", "--states=all", f"--Format={text.long_format(text.JOB_FIELDS, mark)}"]
        if user:
            argv.append(f"--user={user}")
        if wanted_ids and not wanted_names and len(wanted_ids) <= PER_CALL:
            argv.append(f"--jobs={','.join(sorted(wanted_ids))}")
        elif wanted_names and not wanted_ids and _listable(wanted_names):
            argv.append(f"--name={','.join(sorted(wanted_names))}")
        found = text.parse_jobs(self._known(argv), mark)
        if not wanted_ids and not wanted_names:
            return found
        return [job for job in found if job.id in wanted_ids or job.name in wanted_names]

    def queue(self, partition: str) -> list[Job]:
        """Return all users' pending jobs of *partition*, highest priority first."""
        mark = _mark()
        return text.parse_queue(
            self._run(
                "squeue", "--noheader", "--states=PENDING", "--sort=-p", f"--partition={_one(partition, 'partition')}",
                f"--Format={text.long_format(text.QUEUE_FIELDS, mark)}",
            ),
            mark,
        )  # fmt: skip

    def accounting(self, ids: Collection[str]) -> list[Job]:
        """Return jobs with their steps from slurmdbd; without it what jobcomp kept, which knows no steps."""
        found: list[Job] = []
        for part in _parts(_checked(ids, _ID, "job id")):
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
        mark = _mark()
        answer = self._run(
            "sacct", *more, "--noheader", "--parsable", f"--delimiter={mark}", f"--jobs={','.join(ids)}",
            f"--format={','.join(fields)}",
        )  # fmt: skip
        return text.parse_accounting(answer, fields, mark)

    def steps(self, ids: Collection[str]) -> dict[str, tuple[Step, ...]]:
        """Return job id -> its running steps: slurmctld forgets those that ended."""
        found: dict[str, tuple[Step, ...]] = {}
        for part in _parts(_checked(ids, _ID, "job id")):
            mark = _mark()
            wanted = text.long_format(text.STEP_FIELDS, mark)
            argv = ["squeue", "--noheader", "--steps", f"--jobs={','.join(part)}", f"--Format={wanted}"]
            found |= text.parse_steps(self._known(argv), mark)
        return {job: steps for job, steps in found.items() if job in set(ids)}

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs or steps, or send them *signal* ("TERM")."""
        for part in _parts(_checked(ids, _ID, "job or step id")):
            argv = ["scancel", *([f"--signal={_one(signal, 'signal')}"] if signal else []), *part]
            answer = self._call(argv)
            words = [line for line in answer.err.splitlines() if line.strip()]
            if answer.code != 0 and not (words and all(_gone(line) for line in words)):
                raise calls.failure(argv, answer)

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """Return the named nodes, or all; names that Slurm does not know are not in the answer."""
        if not names:
            return entities.parse_nodes(self._run("scontrol", "--oneliner", "show", "node"))
        found: list[Node] = []
        for part in _parts(_checked(names, _NAME, "node")):
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
        for part in _parts(
            _checked(names, _NAME, "node")
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
        for part in _parts(wanted):
            self._run("scontrol", "update", f"NodeName={','.join(part)}", "State=RESUME")

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits."""
        answer = self._run("scontrol", "--oneliner", "show", "partition", _one(name, "partition"))
        found = entities.parse_partition(answer)
        if found is None:
            raise SlurmRefused(f"scontrol show partition {name}: {answer.strip()[:200]!r}")
        return found

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits."""
        wanted = "format=Name,MaxWall,MaxTRES,UsageFactor"
        try:
            answer = self._run("sacctmgr", "-nP", "show", "qos", f"name={_one(name, 'QoS')}", wanted)
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


def _mark() -> str:
    """Return a word that nobody could put into a job's name beforehand; it begins with no digit (squeue's width)."""
    return f"<{secrets.token_hex(8)}>"


def _parts(words: Collection[str]) -> Iterator[list[str]]:
    """Return the words in parts that fit one command line."""
    rest = iter(words)
    while part := list(itertools.islice(rest, PER_CALL)):
        yield part


def _checked(words: Collection[str], form: re.Pattern[str], what: str) -> list[str]:
    """Return the words, each checked: none may be taken for an option or for several."""
    for word in words:
        if not form.fullmatch(word):
            raise SlurmRefused(f"{word!r} is no {what}")
    return list(dict.fromkeys(words))


def _one(word: str, what: str) -> str:
    return _checked([word], _NAME, what)[0]


def _listable(names: Collection[str]) -> bool:
    """Whether squeue --name can be asked for exactly these."""
    return len(names) <= PER_CALL and not any("," in name for name in names)


def _says_export(script: Path) -> bool:
    """Whether a line of the script says what the job's environment is. A script that cannot be read is sbatch's to name."""
    try:
        return bool(_EXPORT.search(script.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False


def _gone(line: str) -> bool:
    lower = line.lower()
    return any(words in lower for words in _GONE)
