"""Watchers on the nodes of a screening: how a running Slurm job or pods are entered, and how samples come back."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
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
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.telemetry.sampler import MARK
from pytest_mlhpc.node.telemetry.samples import Sample
from pytest_mlhpc.provision.scheduler.client import SchedulerError, SchedulerUnusable
from pytest_mlhpc.provision.slurm import commands
from pytest_mlhpc.screen.usage import MOST_PROCESSES, SampleBuffer

#: Longest answer of squeue, in seconds.
ASK_S = 30.0

#: Reads so many bytes of a zip from standard input, and runs the watcher from it. What travels is this text and a number.
#: The zip has no name: whoever ends the watcher, and however, leaves nothing on the node.
BOOT = """
import sys, tempfile
left = int(sys.argv.pop(1))
file = tempfile.TemporaryFile()
while left > 0:
    part = sys.stdin.buffer.read(min(left, 65536))
    if not part:
        sys.exit("the watcher's code did not arrive")
    file.write(part)
    left -= len(part)
file.flush()
sys.path.insert(0, "/proc/self/fd/%d" % file.fileno())
from pytest_mlhpc.node.telemetry.sampler import main
sys.exit(main(sys.argv[1:]))
"""


def code() -> bytes:
    """Return the zip that the watcher runs from: the node's half of screening, and what it imports."""
    from pytest_mlhpc.provision import payload

    wanted = ("pytest_mlhpc/__init__.py", "pytest_mlhpc/node/__init__.py", "pytest_mlhpc/node/files.py",
              "pytest_mlhpc/node/protocol/", "pytest_mlhpc/node/telemetry/")  # fmt: skip
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
    argv = ["squeue", "--noheader", "--jobs", job, "--format", "%T|%D|%A"]
    try:
        asked = commands.run_command(argv, commands.command_environment(os.environ), ASK_S)
        unknown = "Invalid job id" in asked.err
        if asked.code != 0 and not unknown:
            raise commands.command_error(argv, asked)
    except SchedulerUnusable as error:
        raise UsageError(f"{error}: run it on a login node, with SLURM_CONF as jobs are submitted") from error
    except SchedulerError as error:
        raise InfrastructureError("scheduler_error", f"Slurm does not answer: {error}") from error
    lines = asked.out.split()
    if unknown or not lines:
        raise UsageError(
            f"Slurm knows no job {job} that has not ended: {asked.err.strip() or 'squeue shows nothing'}"
        )
    state, nodes, own = lines[0].split("|")
    if state != "RUNNING":
        raise UsageError(f"job {job} is {state}: only a running job can be screened")
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
        if (name or what == "--pod") and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
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


#: Seconds beyond those asked for in which a watcher must have started and ended.
PATIENCE_S = 60.0

#: Seconds for srun and kubectl to end.
END_S = 10.0

#: Pieces of one sample that are believed (a node with thousands of processes has some hundreds).
MOST_PIECES = 10_000

#: How lines of kubectl's own log begin (klog): level, month, day. What it says to people comes after them.
LOGGED = re.compile(r"[IWEF]\d{4} ")


@dataclass
class Assembly:
    """Puts lines together again; what is not a watcher's or is damaged is counted and left out."""

    buffer: SampleBuffer = field(default_factory=SampleBuffer)
    damaged: int = 0
    _open: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    _behind_s: dict[str, float] = field(
        default_factory=dict
    )  # what a node's clock lacks to ours, and what came soonest took

    def on_our_clock(self) -> list[Sample]:
        """Return the samples with times of this machine's monotonic clock: clocks of nodes have no common zero."""
        return [
            replace(one, time_s=one.time_s + self._behind_s[one.node.host]) for one in self.buffer.samples()
        ]

    def feed(self, line: str) -> None:
        """Take one line in, as it comes."""
        fields = line.split()
        if len(fields) != 6 or fields[0] != MARK:
            return
        host, number, place, count, text = fields[1:]
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
            data = read_json(zlib.decompress(base64.b64decode(text, validate=True)))
            sample = from_json(Sample, data)
        except (ValueError, zlib.error, SchemaError):
            self.damaged += 1
            return
        self.buffer.add(sample)
        host, behind_s = sample.node.host, time.monotonic() - sample.time_s
        self._behind_s[host] = min(behind_s, self._behind_s.get(host, behind_s))


def watch(
    commands: Sequence[Sequence[str]], seconds: float, interval_s: float
) -> tuple[list[Sample], list[str]]:
    """Run watchers side by side to their end; return their samples, and what went wrong in the programs' own messages.

    Times of samples are of this machine's monotonic clock, as well as what came soonest of each node can tell.
    """
    more = ["--seconds", str(seconds), "--interval", str(interval_s)]
    most = MOST_PROCESSES // max(1, len(commands))
    every: list[_Watcher] = []
    deadline = time.monotonic() + seconds + PATIENCE_S
    try:
        every.extend(
            _Watcher([*argv, *more], most) for argv in commands
        )  # those that started, whatever comes then
        for one in every:
            one.join(deadline)
    except KeyboardInterrupt:  # what was observed so far is reported
        pass
    finally:
        _close(every)
    samples = [sample for one in every for sample in one.assembly.on_our_clock()]
    return samples, [fields for one in every for fields in one.problems()]


def _close(every: Sequence[_Watcher]) -> None:
    """End them: srun and kubectl end what they started when they get SIGTERM. Who presses Ctrl-C again waits for none."""
    deadline = time.monotonic() + END_S
    try:
        for one in every:
            one.send(signal.SIGTERM)
        for one in every:
            one.wait(deadline)
    finally:
        for one in every:
            one.send(signal.SIGKILL)
    for one in every:
        one.close()


class _Watcher:
    """One started program: a thread reads its lines, another what it complains of."""

    def __init__(self, argv: Sequence[str], most: int) -> None:
        self.assembly = Assembly(SampleBuffer(most))
        self._complaints: list[str] = []
        self._name = argv[0]
        self._late = False
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - one call into the C library
        )
        work = (
            (self._write, self._process.stdin),
            (self._read_samples, self._process.stdout),
            (self._read_complaints, self._process.stderr),
        )
        self._threads = [threading.Thread(target=do, args=(stream,), daemon=True) for do, stream in work]
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float) -> None:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._late = True

    def send(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.wait(time.monotonic() + END_S)
        for thread in self._threads:
            thread.join(5.0)

    def problems(self) -> list[str]:
        said = []
        if self._late:
            said.append(f"{self._name} was ended, as it had not come to its own end")
        elif self._process.returncode != 0:
            complaints = [line for line in self._complaints if not LOGGED.match(line)] or self._complaints
            said.append(
                f"{self._name} ended with {self._process.returncode}: {' '.join(complaints[-3:])[:300]}"
            )
        if self.assembly.damaged:
            said.append(f"{self.assembly.damaged} samples arrived damaged")
        return said

    def _write(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stream:  # it ended at once; its own message says why
            stream.write(code())

    def _read_samples(self, stream: IO[bytes]) -> None:
        for line in _lines(stream):
            self.assembly.feed(line)

    def _read_complaints(self, stream: IO[bytes]) -> None:
        for line in _lines(stream):
            if line.strip() and len(self._complaints) < 100:
                self._complaints.append(line.strip())


def _lines(stream: IO[bytes]) -> Iterable[str]:
    with stream:
        for line in stream:
            yield line.decode("utf-8", "replace")
