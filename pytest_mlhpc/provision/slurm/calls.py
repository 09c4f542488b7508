"""One call of one of Slurm's commands: its environment, its time limit, and whose fault it is when it fails."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_mlhpc.provision.slurm.client import SlurmError, SlurmRefused, SlurmUnavailable

#: How long to wait for the ends of the pipes of a command that was killed, in seconds; then they are left.
DRAIN_S = 2.0

#: Most of a command's own words that an error quotes, in characters.
MAX_WORDS = 2000

#: Variables by which a user sets defaults of these commands (their man pages, ENVIRONMENT VARIABLES), and by which a
#: surrounding job describes itself; both would change what we ask for without a word.
_DROPPED = (
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

#: These stay: how the cluster is found, who we are there, and the key under which a user's work is accounted, which changes
#: nothing else of a job.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SBATCH_WCKEY"})

#: Words, in lower case, that Slurm's commands use when nobody answered them (texts of slurm_errno.h, and as seen on real clusters).
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


@dataclass(frozen=True)
class Answer:
    """What a command said: exit code and output, decoded leniently."""

    code: int
    out: str
    err: str


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return *base* without what silently changes Slurm's commands; times in epoch seconds, messages in English."""
    kept = {name: value for name, value in base.items() if name in _KEPT or not name.startswith(_DROPPED)}
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def call(argv: Sequence[str], environ: Mapping[str, str], limit_s: float, directory: str = "") -> Answer:
    """Run a command to its end, at most *limit_s* seconds, in *directory* if one is given; stdin is empty.

    Raises:
        SlurmUnavailable: the command does not exist, was killed, or did not end in time; nothing of it is left running.
    """
    try:
        process = subprocess.Popen(
            _found(argv, environ), env=environ, cwd=directory or None, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # one group to kill; and a Ctrl-C of the terminal does not cut a submission
        )  # fmt: skip
    except OSError as error:
        raise SlurmUnavailable(f"{shown(argv)}: cannot be started: {error}") from error
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        said = _killed(process)
        raise SlurmUnavailable(f"{shown(argv)}: no answer within {limit_s:g} s{_quote(said)}") from None
    except BaseException:  # Ctrl-C: nothing may be left running
        _killed(process)
        raise
    answer = Answer(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    if answer.code < 0:
        raise SlurmUnavailable(f"{shown(argv)}: killed by {_signal(-answer.code)}{_quote(answer.err)}")
    return answer


def shown(argv: Sequence[str]) -> str:
    """Return a command line for people, without its environment."""
    return shlex.join(argv)


def failure(argv: Sequence[str], answer: Answer) -> SlurmError:
    """Return the error for a command that failed: unavailable by its words, else refused."""
    words = answer.err.strip() or answer.out.strip()
    kind = SlurmUnavailable if no_answer(words) else SlurmRefused
    return kind(f"{shown(argv)}: exit code {answer.code}{_quote(words)}")


def no_answer(words: str) -> bool:
    """Whether *words* are Slurm's way to say that nobody answered."""
    lower = words.lower()
    return any(phrase in lower for phrase in _NO_ANSWER)


def _found(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return *argv* with the command's own path: the PATH of *environ* counts, not this process's."""
    path = shutil.which(argv[0], path=environ.get("PATH", os.defpath))
    if path is None:
        raise SlurmUnavailable(f"{shown(argv)}: the command {argv[0]!r} is not on PATH")
    return [path, *argv[1:]]


def _killed(process: subprocess.Popen[bytes]) -> str:
    """Kill the whole group of *process*, reap it, and return what it had said on standard error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group's id is the process's: start_new_session
    try:
        _, err = process.communicate(timeout=DRAIN_S)
    except (
        subprocess.TimeoutExpired
    ):  # a child in another session still holds the pipes: that is not ours to wait for
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait(timeout=DRAIN_S)
        return ""
    return err.decode(errors="replace")


def _quote(words: str) -> str:
    """Return ``: words`` on one line, printable and not endless; nothing for no words."""
    line = "; ".join(part.strip() for part in words.splitlines() if part.strip())
    line = "".join(character if character.isprintable() else "?" for character in line)
    if len(line) > MAX_WORDS:
        line = line[:MAX_WORDS] + " ..."
    return f": {line}" if line else ": it said nothing"


def _signal(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
