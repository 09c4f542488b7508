"""Looks at a running Slurm job or at pods: one watcher on each node (``node/watch.py``), whose samples come back on its output.

The watcher needs nothing on the nodes but Python 3.9: its code goes in through its standard input. Programs are started by
lists of arguments, never through a shell.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from pytest_mlhpc.errors import InfrastructureError, UsageError
from pytest_mlhpc.results.schema import SchemaError, from_json
from pytest_mlhpc.screen.node.samples import Sample
from pytest_mlhpc.screen.node.watch import MARK

#: Seconds beyond those asked for in which a watcher must have started and ended.
PATIENCE_S = 60.0

#: Longest answer of squeue, in seconds.
ASK_S = 30.0

#: Pieces of one sample that are believed (a node with thousands of processes has some hundreds).
MOST_PIECES = 10_000

#: How lines of kubectl's own log begin (klog): level, month, day. What it says to people comes after them.
LOGGED = re.compile(r"[IWEF]\d{4} ")

#: Reads so many bytes of a zip from standard input, and runs the watcher from it. What travels is this text and a number.
BOOT = """
import os, sys, tempfile
left = int(sys.argv.pop(1))
with tempfile.NamedTemporaryFile(suffix=".zip", delete=False) as file:
    while left > 0:
        part = sys.stdin.buffer.read(min(left, 65536))
        if not part:
            sys.exit("the watcher's code did not arrive")
        file.write(part)
        left -= len(part)
sys.path.insert(0, file.name)
try:
    from pytest_mlhpc.screen.node.watch import main
    code = main(sys.argv[1:])
finally:
    os.unlink(file.name)
sys.exit(code)
"""


@dataclass
class Assembly:
    """Puts lines together again; what is not a watcher's or is damaged is counted and left out."""

    samples: list[Sample] = field(default_factory=list)
    damaged: int = 0
    _open: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    _behind_s: dict[str, float] = field(
        default_factory=dict
    )  # what a node's clock lacks to ours, and what came soonest took

    def on_our_clock(self) -> list[Sample]:
        """Return the samples with times of this machine's monotonic clock: clocks of nodes have no common zero."""
        return [replace(one, time_s=one.time_s + self._behind_s[one.node.host]) for one in self.samples]

    def feed(self, line: str) -> None:
        """Take one line in, as it comes."""
        words = line.split()
        if len(words) != 6 or words[0] != MARK:
            return
        host, number, place, count, text = words[1:]
        if not (place.isdigit() and count.isdigit()) or not int(place) < int(count) <= MOST_PIECES:
            self.damaged += 1
            return
        parts = self._open.setdefault((host, number), {})
        parts[int(place)] = text
        if len(parts) == int(count):
            del self._open[host, number]
            self._add("".join(parts[at] for at in sorted(parts)))

    def _add(self, text: str) -> None:
        try:
            data = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
            sample = from_json(Sample, data)
        except (ValueError, zlib.error, SchemaError):
            self.damaged += 1
            return
        self.samples.append(sample)
        host, behind_s = sample.node.host, time.monotonic() - sample.time_s
        self._behind_s[host] = min(behind_s, self._behind_s.get(host, behind_s))


def code() -> bytes:
    """Return the zip that the watcher runs from: the node's half of screening, and what it imports."""
    from pytest_mlhpc import payload

    wanted = ("pytest_mlhpc/__init__.py", "pytest_mlhpc/screen/", "pytest_mlhpc/results/", "pytest_mlhpc/worker/__init__.py",
              "pytest_mlhpc/worker/contention.py")  # fmt: skip
    own = [(name, path) for name, path in payload.own_files() if name.startswith(wanted)]
    return payload.pack(dict(sorted([*own, *payload.nvml()])))


def slurm_argv(job: str, python: str) -> list[str]:
    """Return the command that starts a watcher on each node of a running job.

    Raises:
        UsageError: there is no such job, or it does not run.
        InfrastructureError: Slurm does not answer.
    """
    if not re.fullmatch(r"\d{1,12}([_+]\d{1,6})?", job):
        raise UsageError(f"--job {job!r} is no id of a Slurm job, which is a number (4711, 4711_2, 4711+1)")
    if shutil.which("srun") is None or shutil.which("squeue") is None:
        raise UsageError("--job needs srun and squeue: run it where jobs are submitted, on a login node")
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%T|%D|%A"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError("scheduler_error", f"squeue has not answered for {ASK_S:.0f} s") from error
    lines = asked.stdout.split()
    if asked.returncode != 0 and "Invalid job id" not in asked.stderr:
        said = " ".join(asked.stderr.split()) or "no word"
        raise InfrastructureError(
            "scheduler_error", f"Slurm does not answer: squeue ended with {asked.returncode}: {said}"
        )
    if asked.returncode != 0 or not lines:
        raise UsageError(
            f"Slurm knows no job {job} that has not ended: {asked.stderr.strip() or 'squeue shows nothing'}"
        )
    state, nodes, own = lines[0].split("|")
    if state != "RUNNING":
        raise UsageError(f"job {job} is {state}: only what runs can be looked at")
    return [
        *(
            "srun",
            "--overlap",
            f"--jobid={job}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
        ),
        *("--cpu-bind=none", "--quiet", "--job-name=mlhpc-screen", python, "-c", BOOT),
        *(str(len(code())), "--job", own),
    ]


def pod_argv(pod: str, namespace: str, container: str, python: str) -> list[str]:
    """Return the command that starts a watcher in a running pod.

    Raises:
        UsageError: a name cannot be one, or kubectl is missing.
    """
    for what, name in (("--pod", pod), ("--namespace", namespace), ("--container", container)):
        if name and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            raise UsageError(
                f"{what} {name!r} is no name of Kubernetes: lower-case letters, digits, hyphens, dots"
            )
    if shutil.which("kubectl") is None:
        raise UsageError("--pod needs kubectl, with a kubeconfig that may exec in the pod's namespace")
    where = [
        *(["--namespace", namespace] if namespace else []),
        *(["--container", container] if container else []),
    ]
    return ["kubectl", "exec", "--stdin", pod, *where, "--", python, "-c", BOOT, str(len(code()))]


def look(
    commands: Sequence[Sequence[str]], seconds: float, interval_s: float
) -> tuple[list[Sample], list[str]]:
    """Run watchers side by side to their end; return their samples, and what went wrong in the programs' own words.

    Times of samples are of this machine's monotonic clock, as well as what came soonest of each node can tell.
    """
    every = [_Watcher([*argv, "--seconds", str(seconds), "--interval", str(interval_s)]) for argv in commands]
    deadline = time.monotonic() + seconds + PATIENCE_S
    try:
        for one in every:
            one.join(deadline)
    except KeyboardInterrupt:  # what was seen so far is told
        pass
    finally:
        for one in every:
            one.close()
    samples = [sample for one in every for sample in one.assembly.on_our_clock()]
    return samples, [words for one in every for words in one.words()]


class _Watcher:
    """One started program: a thread reads its lines, another what it complains of."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.assembly = Assembly()
        self._complaints: list[str] = []
        self._name = argv[0]
        self._late = False
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        work = (
            (self._write, self._process.stdin),
            (self._read, self._process.stdout),
            (self._hear, self._process.stderr),
        )
        self._threads = [threading.Thread(target=do, args=(stream,), daemon=True) for do, stream in work]
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float) -> None:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._late = True

    def close(self) -> None:
        """End it: srun and kubectl end what they started when they get SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10.0)
        for thread in self._threads:
            thread.join(5.0)

    def words(self) -> list[str]:
        said = []
        if self._late:
            said.append(f"{self._name} was ended, as it had not come to its own end")
        elif self._process.returncode != 0:
            told = [line for line in self._complaints if not LOGGED.match(line)] or self._complaints
            said.append(f"{self._name} ended with {self._process.returncode}: {' '.join(told[-3:])[:300]}")
        if self.assembly.damaged:
            said.append(f"{self.assembly.damaged} samples came damaged")
        return said

    def _write(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stream:  # it ended at once; its own words tell why
            stream.write(code())

    def _read(self, stream: IO[bytes]) -> None:
        for line in _lines(stream):
            self.assembly.feed(line)

    def _hear(self, stream: IO[bytes]) -> None:
        for line in _lines(stream):
            if line.strip() and len(self._complaints) < 100:
                self._complaints.append(line.strip())


def _lines(stream: IO[bytes]) -> Iterable[str]:
    with stream:
        for line in stream:
            yield line.decode("utf-8", "replace")
