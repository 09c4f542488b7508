"""The compliance checker of mlperf-logging, as it is: another process, whose verdict and words are taken over."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_mlhpc.errors import MlhpcError, UsageError
from pytest_mlhpc.papers.mlperf.limits import RULESET, USAGE
from pytest_mlhpc.papers.mlperf.writing import INSTALL

#: Seconds for one log, which takes less than one on a machine with nothing else to do.
LIMIT_S: Final = 600.0
#: More than any log: 65,536 lines of 1,000 bytes.
LARGEST: Final = 64 << 20
_MODULE: Final = "mlperf_logging.compliance_checker"
#: How it ends, and what it says then, where it does not know a set of rules (argparse's).
_USAGE_ERROR: Final = 2
_OPTION: Final = re.compile(r"error: argument --(usage|ruleset): (.+)")
_SEPARATOR: Final = re.compile(r"\n-{30}\n")
_CONTEXT: Final = re.compile(r"\ncurrent (?:context\[s\]|line\[v\])=", re.MULTILINE)


@dataclass(frozen=True)
class Checked:
    """The checker's verdict on one file; ``complaints`` are in its own words."""

    path: Path
    accepted: bool
    complaints: tuple[str, ...] = ()


def check_file(
    path: Path, *, usage: str = USAGE, ruleset: str = RULESET, limit_s: float = LIMIT_S
) -> Checked:
    """Return the checker's verdict on the log at *path*.

    It runs by itself: its rules are code that it evaluates, a log that it does not expect ends it with a traceback, and it
    keeps state from one log to the next.

    Raises:
        UsageError: the file cannot be read, there are no such rules, or mlperf-logging is not installed.
        MlhpcError: the checker came to no verdict.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        raise UsageError(f"logs are checked by mlperf-logging, which is not installed: {INSTALL}")
    _readable(path)
    words = [sys.executable, "-m", _MODULE, str(path.resolve()), "--usage", usage, "--ruleset", ruleset]
    try:
        ended = subprocess.run(
            [*words, "--log_output", os.devnull],
            capture_output=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MlhpcError(
            f"{path}: the compliance checker came to no verdict within {limit_s:.0f} s"
        ) from error
    told = ended.stderr.decode(errors="replace")
    if ended.returncode == 0 and "SUCCESS" in told:
        return Checked(path, accepted=True)
    refused = _OPTION.search(told) if ended.returncode == _USAGE_ERROR else None
    if refused:
        raise UsageError(f"the compliance checker has no such --{refused[1]}: {refused[2]}")
    if ended.returncode == 1:
        return Checked(path, accepted=False, complaints=_complaints(told))
    raise MlhpcError(f"{path}: the compliance checker ended with {ended.returncode}: {told.strip()[-300:]}")


def _readable(path: Path) -> None:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(f"{path} is no file")
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if size > LARGEST:
        raise UsageError(f"{path} has {size >> 20} MiB, more than any log ({LARGEST >> 20} MiB)")


def _complaints(told: str) -> tuple[str, ...]:
    """Return what the checker had against a log, each without the context that it prints, which is most of it."""
    if "Traceback (most recent call last)" in told:
        last = told.strip().splitlines()[-1]
        return (f"the checker cannot read it and ended with {last}",)
    lines = [
        line
        for line in told.splitlines()
        if not re.match(r"(INFO|ERROR) - ", line) and "** Logging output" not in line
    ]
    text = re.sub(r"^WARNING -\s*", "", "\n".join(lines), flags=re.MULTILINE)
    found = (" ".join(_CONTEXT.split(part)[0].split()) for part in _SEPARATOR.split(text))
    return tuple(one for one in found if one) or ("the checker did not say why",)
