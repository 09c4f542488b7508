"""What goes onto a command line of Slurm, and is checked before: ids, names, and not too many of them."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from pytest_mlhpc.provision.slurm.client import SlurmRefused

#: Most ids or names on one command line: with 40 bytes each far below ARG_MAX, which is at least 128 kB a string.
PER_CALL = 500

JOB_ID = re.compile(r"[0-9][0-9_+]*(\.[0-9a-z_+]+)?")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:/-]*")
_EXPORT = re.compile(r"^#SBATCH\s.*--export[=\s]", re.MULTILINE)

#: scancel's words for jobs and steps that have ended or never were: nothing is left to cancel.
_GONE = ("invalid job id specified", "already completing or completed", "job/step already")


def mark() -> str:
    """Return a word that nobody could put into a job's name beforehand; it begins with no digit (squeue's width)."""
    return f"<{secrets.token_hex(8)}>"


def parts(words: Collection[str]) -> Iterator[list[str]]:
    """Return the words in parts that fit one command line."""
    rest = iter(words)
    while part := list(itertools.islice(rest, PER_CALL)):
        yield part


def checked(words: Collection[str], form: re.Pattern[str], what: str) -> list[str]:
    """Return the words, each checked: none may be taken for an option or for several."""
    for word in words:
        if not form.fullmatch(word):
            raise SlurmRefused(f"{word!r} is no {what}")
    return list(dict.fromkeys(words))


def one(word: str, what: str) -> str:
    """Return one checked name."""
    return checked([word], NAME, what)[0]


def listable(names: Collection[str]) -> bool:
    """Whether squeue --name can be asked for exactly these."""
    return len(names) <= PER_CALL and not any("," in name for name in names)


def says_export(script: Path) -> bool:
    """Whether a line of the script says what the job's environment is. A script that cannot be read is sbatch's to name."""
    try:
        return bool(_EXPORT.search(script.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False


def gone(line: str) -> bool:
    """Whether this line of scancel says that there is nothing to cancel any more."""
    lower = line.lower()
    return any(words in lower for words in _GONE)
