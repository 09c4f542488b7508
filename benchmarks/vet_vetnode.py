"""``vetnode`` 0.1.5 of PyPI (eth-cscs/vetnode) on the cases of the fault corpus that it can read, beside what ours says of them.

Its one check that reads a node's state, GPUEval, parses ``nvidia-smi -q -a``, so that each case with an NVML specification
is fed to it by a program of that name. Its others compute on real GPUs (CUDA, NCCL, RCCL), compare variables with a list that
a site writes, or connect to an address: the corpus has nothing for these.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row
from benchmarks.vet_corpus import Judged, judged
from benchmarks.vet_nvidia_smi import printed

VERSION = "0.1.5"

#: The highest temperature and share of used memory. Its own examples have 30 and 0.2 (examples/alps-ml-vetting, slurm-prolog);
#: as idle devices of the corpus have 31 C, a limit that lets healthy ones pass is used for the comparison.
MAX_TEMP, EXAMPLE_TEMP, MAX_USED = 60, 30, 0.2

#: The port where its ranks meet is built in.
PORT = 29500

#: What it prints where its own processes lose each other, which happens now and then at their end; how often one case is tried.
BROKEN, TRIES = ("unexpected exception", "Traceback"), 4

CONFIG = """\
name: Fault corpus
scheduler: standalone
evals:
- name: Check GPU
  type: vetnode.evaluations.gpu_eval.GPUEval
  max_temp: {temperature}
  max_used_memory: {used}
"""


class NotHereError(RuntimeError):
    """It cannot be installed or run on this machine, with the reason."""


@dataclass(frozen=True)
class Said:
    """Its exit code, and whether it skipped the check instead of judging."""

    code: int
    skipped: bool

    @property
    def word(self) -> str:
        """What a script that looks at the exit code does."""
        if self.code:
            return "unfit"
        return "fit (check skipped)" if self.skipped else "fit"


@dataclass(frozen=True)
class Compared:
    """One case: what ours says and what it says; ``shown``: what it is fed is not what a healthy node of the corpus prints."""

    ours: Judged
    theirs: Said
    shown: bool

    @property
    def word(self) -> str:
        """What it says, in the table."""
        hidden = self.ours.kind in ("bad", "unreadable") and not self.shown
        return f"{self.theirs.word} (sees a healthy one)" if hidden else self.theirs.word


@dataclass
class Vetnode:
    """An installation below *folder*; ``failures``: how often a run broke off in an error of its own and was tried again."""

    folder: Path
    failures: int = 0

    @property
    def _programs(self) -> Path:
        return self.folder / "environment/bin"

    def install(self) -> str:
        """Install it as its metadata says, and then what they forget; return what was the matter before.

        Raises:
            NotHereError: pip does not get it.
        """
        self._pip_made()
        self._pip(f"vetnode=={VERSION}")
        before = self._run("--help")
        if before.returncode == 0:
            return ""
        self._pip("tabulate")
        if (after := self._run("--help")).returncode:
            raise NotHereError(f"vetnode does not start: {after.stderr.strip()[-300:]}")
        return (before.stderr.strip().splitlines() or ["it ended with no word"])[-1]

    def _pip_made(self) -> None:
        argv = [sys.executable, "-m", "venv", str(self.folder / "environment")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise NotHereError(f"no virtual environment: {done.stderr.strip()[-300:]}")

    def _pip(self, name: str) -> None:
        argv = [
            str(self._programs / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            name,
        ]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotHereError(f"pip install {name} did not end in 600 s") from error
        if done.returncode:
            raise NotHereError(f"pip install {name}: {' '.join(done.stderr.split())[-300:]}")

    def _run(self, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
        environ = {
            "PATH": os.pathsep.join(filter(None, [path, str(self._programs), "/usr/bin", "/bin"])),
            "HOME": str(self.folder),
            "LC_ALL": "C.UTF-8",
        }
        argv = [str(self._programs / "vetnode"), *arguments]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120, check=False)

    def diagnose(self, case: Judged, temperature: int = MAX_TEMP) -> Said:
        """Have it look at one case."""
        place = self.folder / "node"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        text, code = printed(case.case.data["nvml"])
        (place / "text").write_text(text)
        program = place / "nvidia-smi"
        program.write_text(f'#!/bin/sh\ncat "$(dirname "$0")/text"\nexit {code}\n')
        program.chmod(0o755)
        config = self.folder / "config.yaml"
        config.write_text(CONFIG.format(temperature=temperature, used=MAX_USED))
        for _ in range(TRIES):
            done = self._run("diagnose", "--skip-install", "--verbose", str(config), path=str(place))
            output = done.stdout + done.stderr
            if done.returncode in (0, 1) and not any(sign in output for sign in BROKEN):
                return Said(done.returncode, "Skipped:" in output)
            self.failures += 1
        raise NotHereError(f"vetnode fails on {case.case.name}: {' '.join(output.split())[-300:]}")


def readable() -> list[Judged]:
    """Return the cases that have something for it to read."""
    return [one for one in judged() if one.case.data.get("nvml") is not None]


@dataclass(frozen=True)
class Comparison:
    """All cases that both could read; how it started as its metadata install it; healthy ones that pass its examples' limit."""

    cases: tuple[Compared, ...]
    start: str
    example: tuple[int, int]
    failures: int


@functools.cache
def compare() -> Comparison:
    """Install it and feed it all.

    Raises:
        NotHereError: it cannot be installed or run here.
    """
    with tempfile.TemporaryDirectory(prefix="mlhpc-bench-vetnode-") as name:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", PORT))  # noqa: S104 - as vetnode itself does in a moment
            except OSError as error:
                raise NotHereError(f"vetnode's port {PORT} is taken: {error.strerror}") from error
        tool = Vetnode(Path(name))
        start = tool.install()
        good = [one for one in readable() if one.kind == "good"]
        healthy = {printed(one.case.data["nvml"]) for one in good}
        cases = tuple(
            Compared(one, tool.diagnose(one), printed(one.case.data["nvml"]) not in healthy)
            for one in readable()
        )
        passed = sum(tool.diagnose(one, EXAMPLE_TEMP).code == 0 for one in good)
    return Comparison(cases, start, (passed, len(good)), tool.failures)


def rows() -> list[Row]:
    """Count what it says; where it is not here, say that."""
    try:
        found = compare()
    except NotHereError as error:
        return [Row(f"vetnode {VERSION} on the same corpus", "-", f"not on this machine: {error}", None)]
    least = len(found.cases)
    texts = []
    for kind, wanted, words in (("bad", 1, "bad called unfit"), ("good", 0, "good called fit")):
        of_kind = [one for one in found.cases if one.ours.kind == kind]
        shown = (
            f" ({sum(one.shown for one in of_kind)} of them look other than healthy ones to it)"
            if wanted
            else ""
        )
        texts.append(f"{sum(one.theirs.code == wanted for one in of_kind)} of {len(of_kind)} {words}{shown}")
    unread = [one for one in found.cases if one.ours.kind == "unreadable"]
    texts.append(f"{sum(one.theirs.code == 0 for one in unread)} of {len(unread)} unreadable called fit")
    passed, good = found.example
    return [
        Row(f"vetnode {VERSION} on the {least} cases of {len(judged())} that it can read", "-", "; ".join(texts), None),
        Row("... ours on the same cases", "-", _ours(found.cases), None),
        Row(f"... good ones that it calls fit with its examples' limit of {EXAMPLE_TEMP} C", "-", f"{passed} of {good}", None),
        Row("... runs that broke off in an error of their own and were repeated", "-", f"{found.failures} of {least + good}", None),
        Row("... started as installed from PyPI", "-", found.start or "it starts", None),
    ]  # fmt: skip


def _ours(cases: Iterable[Compared]) -> str:
    said = [one.ours for one in cases]
    texts = []
    for kind, words, fine in (
        ("bad", "bad said to be", ("CRITICAL", "WARNING", "UNKNOWN")),
        ("good", "good passed", ("PASS",)),
        ("unreadable", "unreadable UNKNOWN or worse", ("UNKNOWN", "CRITICAL")),
    ):
        of_kind = [one for one in said if one.kind == kind]
        texts.append(f"{sum(one.word in fine for one in of_kind)} of {len(of_kind)} {words}")
    return "; ".join(texts)


def by_kind() -> str:
    """Return a Markdown table of how many cases of each kind get which word from each, of those that vetnode can read.

    Raises:
        NotHereError: it is not here.
    """
    found = Counter((one.ours.kind, one.ours.word, one.word) for one in compare().cases)
    lines = ["| kind | ours | vetnode | cases |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {ours} | {theirs} | {count} |" for (kind, ours, theirs), count in sorted(found.items())
    ]
    return "\n".join(lines)
