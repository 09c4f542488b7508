"""PAYLOAD. The kernel's log as messages with times, from whatever shows it: /dev/kmsg, dmesg, or the journal.

Programs may write into the log as well: their messages carry another facility than 0, and are left out.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import deque
from dataclasses import dataclass
from typing import Deque, List, Optional, Tuple

#: Most of a log that is looked at, its end, in bytes: kernels keep 16 MiB at most by their usual configurations.
MOST_BYTES = 8 << 20

#: Longest time that reading /dev/kmsg may take, in seconds.
LONGEST_S = 2.0

#: One record of /dev/kmsg is smaller than this (Linux, PRINTK_MESSAGE_MAX is 2048, LOG_LINE_MAX 1024 before).
_RECORD = 16 << 10

#: The kernel's own facility (RFC 5424, table 1).
_KERNEL = 0

_KMSG = re.compile(r"(\d{1,5}),\d+,(\d{1,18}),[^;]*;(.*)")
_DMESG = re.compile(r"(?:<(\d{1,5})>)?(?:\[ *(\d{1,12}\.\d+)\](?:\[[^\]]*\])? ?)?(.*)")
_JOURNAL = re.compile(r"(\d{1,12}\.\d+) \S+ kernel: (.*)")


@dataclass(frozen=True)
class Message:
    """One message; ``at`` in seconds since 1970, None where the log does not say."""

    text: str
    at: Optional[float] = None


@dataclass(frozen=True)
class KernelLog:
    """What was read, oldest first; ``source`` says where; ``up_s`` is how long the kernel runs, None where unknown."""

    source: str
    messages: Tuple[Message, ...]
    up_s: Optional[float] = None


def records(path: str) -> bytes:
    """Return what /dev/kmsg holds now, its end if that is much, without waiting for more.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found: Deque[bytes] = deque()
    size, end = 0, time.monotonic() + LONGEST_S
    try:
        while time.monotonic() < end:
            try:
                record = os.read(fd, _RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: the next one is there
                    continue
                raise
            if not record:
                break
            found.append(record)
            size += len(record)
            while size > MOST_BYTES:
                size -= len(found.popleft())
    finally:
        os.close(fd)
    return b"".join(found)


def _lines(data: bytes) -> List[str]:
    lines = data[-MOST_BYTES:].decode("utf-8", "replace").split("\n")
    return lines[1:] if len(data) > MOST_BYTES else lines  # the first may be the end of one


def _dated(seconds: float, now: float, up_s: Optional[float]) -> Optional[float]:
    """Return when something happened that many seconds after boot; what is in the future happened now."""
    return None if up_s is None else min(now - up_s + seconds, now)


def from_kmsg(data: bytes, now: float, up_s: Optional[float]) -> Tuple[Message, ...]:
    """Return the messages of /dev/kmsg. Lines that are no records are kept, without a time: a fault in one still counts."""
    found = []
    for line in _lines(data):
        match = _KMSG.match(line)
        if match is None:
            if line.strip() and not line.startswith(" "):  # " KEY=value" belongs to the record before it
                found.append(Message(line))
        elif int(match[1]) >> 3 == _KERNEL:
            found.append(Message(match[3], _dated(int(match[2]) / 1e6, now, up_s)))
    return tuple(found)


def from_dmesg(text: str, now: float, up_s: Optional[float]) -> Tuple[Message, ...]:
    """Return the messages of ``dmesg -r``."""
    found = []
    for line in _lines(text.encode("utf-8", "replace")):
        match = _DMESG.match(line)
        if match is None or not match[3].strip() or (match[1] and int(match[1]) >> 3 != _KERNEL):
            continue
        found.append(Message(match[3], _dated(float(match[2]), now, up_s) if match[2] else None))
    return tuple(found)


def from_journal(text: str, now: float) -> Tuple[Message, ...]:
    """Return the messages of ``journalctl -k -o short-unix``; its remarks and other lines are left out."""
    found = []
    for line in _lines(text.encode("utf-8", "replace")):
        match = _JOURNAL.match(line)
        if match is not None:
            found.append(Message(match[2], min(float(match[1]), now)))
    return tuple(found)
