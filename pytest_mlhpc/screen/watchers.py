"""Runs the programs that watch nodes (srun, kubectl: ``attach.py``) side by side; samples come back on their output."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.telemetry.samples import Sample
from pytest_mlhpc.node.telemetry.watch import MARK
from pytest_mlhpc.screen.attach import code
from pytest_mlhpc.screen.kept import MOST_PROCESSES, Kept

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

    kept: Kept = field(default_factory=Kept)
    damaged: int = 0
    _open: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    _behind_s: dict[str, float] = field(
        default_factory=dict
    )  # what a node's clock lacks to ours, and what came soonest took

    def on_our_clock(self) -> list[Sample]:
        """Return the samples with times of this machine's monotonic clock: clocks of nodes have no common zero."""
        return [
            replace(one, time_s=one.time_s + self._behind_s[one.node.host]) for one in self.kept.samples()
        ]

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
            data = read_json(zlib.decompress(base64.b64decode(text, validate=True)))
            sample = from_json(Sample, data)
        except (ValueError, zlib.error, SchemaError):
            self.damaged += 1
            return
        self.kept.add(sample)
        host, behind_s = sample.node.host, time.monotonic() - sample.time_s
        self._behind_s[host] = min(behind_s, self._behind_s.get(host, behind_s))


def look(
    commands: Sequence[Sequence[str]], seconds: float, interval_s: float
) -> tuple[list[Sample], list[str]]:
    """Run watchers side by side to their end; return their samples, and what went wrong in the programs' own words.

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
    except KeyboardInterrupt:  # what was seen so far is told
        pass
    finally:
        _close(every)
    samples = [sample for one in every for sample in one.assembly.on_our_clock()]
    return samples, [words for one in every for words in one.words()]


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
        self.assembly = Assembly(Kept(most))
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
