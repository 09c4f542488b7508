"""All that checks read of a node, in one place, so that a recorded or made-up node can take its place."""

from __future__ import annotations

import errno
import importlib
import math
import os
import re
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    FrozenSet,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

from pytest_mlhpc.node.agents.nodes import HostlistError, number_list
from pytest_mlhpc.node.processes import run_to_end
from pytest_mlhpc.node.vet.policy import ExpectedNode, Policy

T = TypeVar("T")
D = TypeVar("D")

#: Largest file of /proc or /sys that is read, in bytes.
MOST_BYTES = 8 << 20

#: Files are read in parts of so many bytes: those of /proc/sys refuse larger reads with ENOMEM.
PART_BYTES = 64 << 10

#: Longest run of a vendor's program, in seconds, unless the check says otherwise.
COMMAND_S = 20.0


#: Longest run of a program that shows the kernel's log, in seconds.
LOG_S = 5.0


#: Errors that say that there is no such file or device, rather than that we may not see it.
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO)


class Unreadable(RuntimeError):  # noqa: N818 - it says what is the matter, as FileNotFoundError does not for users
    """Something that a check needs cannot be read: ``str(error)`` says what, why, and what would help.

    ``code`` is the system's error number where there is one.
    """

    def __init__(self, text: str, code: Optional[int] = None) -> None:
        super().__init__(text)
        self.code = code


class Absent(Unreadable):
    """There is no such file, module or program: whether the node should have it is for the check to say."""


def _refused(name: str, error: OSError) -> Unreadable:
    if error.errno in NOT_THERE:
        return Absent(f"{name} is not there", error.errno)
    return Unreadable(f"{name} cannot be read: {error.strerror}", error.errno)


@dataclass(frozen=True)
class Done:
    """A program's end: exit code and output, decoded with replacement."""

    code: int
    output: str
    errors: str


@dataclass(frozen=True)
class ClockState:
    """What the kernel says of its clock: whether someone disciplines it, and its largest error in seconds (adjtimex(2))."""

    synced: bool
    error_s: float


@dataclass(frozen=True)
class Room:
    """What is free on a file system: bytes, and files that may still be made (None: it does not count them)."""

    free: int
    files: Optional[int]


#: Most of a log that is looked at, its end, in bytes: kernels keep 16 MiB at most by their usual configurations.
LOG_BYTES = 8 << 20

#: Longest time that reading /dev/kmsg may take, in seconds.
KMSG_S = 2.0

#: One record of /dev/kmsg is smaller than this (Linux, PRINTK_MESSAGE_MAX is 2048, LOG_LINE_MAX 1024 before).
_RECORD = 16 << 10

#: The kernel's own facility (RFC 5424, table 1).
_KERNEL = 0

_KMSG = re.compile(r"(\d{1,5}),\d+,(\d{1,18}),[^;]*;(.*)")
_DMESG = re.compile(r"(?:<(\d{1,5})>)?(?:\[ *(\d{1,12}\.\d+)\](?:\[[^\]]*\])? ?)?(.*)")
_JOURNAL = re.compile(r"(\d{1,12}\.\d+) \S+ kernel: (.*)")


@dataclass(frozen=True)
class KernelMessage:
    """One message; ``at`` in seconds since 1970, None where the log does not say."""

    text: str
    at: Optional[float] = None


@dataclass(frozen=True)
class KernelLog:
    """What was read, oldest first; ``source`` says where; ``up_s`` is how long the kernel runs, None where unknown."""

    source: str
    messages: Tuple[KernelMessage, ...]
    up_s: Optional[float] = None


def records(path: str) -> bytes:
    """Return what /dev/kmsg holds now, its end if that is much, without waiting for more.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found: Deque[bytes] = deque()
    size, end = 0, time.monotonic() + KMSG_S
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
            while size > LOG_BYTES:
                size -= len(found.popleft())
    finally:
        os.close(fd)
    return b"".join(found)


def _lines(data: bytes) -> List[str]:
    lines = data[-LOG_BYTES:].decode("utf-8", "replace").split("\n")
    return lines[1:] if len(data) > LOG_BYTES else lines  # the first may be the end of one


def _dated(seconds: float, now: float, up_s: Optional[float]) -> Optional[float]:
    """Return when something happened that many seconds after boot; what is in the future happened now."""
    return None if up_s is None else min(now - up_s + seconds, now)


def from_kmsg(data: bytes, now: float, up_s: Optional[float]) -> Tuple[KernelMessage, ...]:
    """Return the messages of /dev/kmsg. Lines that are no records stay, without a time: a fault in one still counts."""
    found = []
    for line in _lines(data):
        match = _KMSG.match(line)
        if match is None:
            if line.strip() and not line.startswith(" "):  # " KEY=value" belongs to the record before it
                found.append(KernelMessage(line))
        elif int(match[1]) >> 3 == _KERNEL:
            found.append(KernelMessage(match[3], _dated(int(match[2]) / 1e6, now, up_s)))
    return tuple(found)


def from_dmesg(text: str, now: float, up_s: Optional[float]) -> Tuple[KernelMessage, ...]:
    """Return the messages of ``dmesg -r``."""
    found = []
    for line in _lines(text.encode("utf-8", "replace")):
        match = _DMESG.match(line)
        if match is None or not match[3].strip() or (match[1] and int(match[1]) >> 3 != _KERNEL):
            continue
        found.append(KernelMessage(match[3], _dated(float(match[2]), now, up_s) if match[2] else None))
    return tuple(found)


def from_journal(text: str, now: float) -> Tuple[KernelMessage, ...]:
    """Return the messages of ``journalctl -k -o short-unix``; its remarks and other lines are left out."""
    found = []
    for line in _lines(text.encode("utf-8", "replace")):
        match = _JOURNAL.match(line)
        if match is not None:
            found.append(KernelMessage(match[2], min(float(match[1]), now)))
    return tuple(found)


@dataclass
class Machine:
    """This node, or one below *root*.

    ``modules`` replaces vendors' Python modules by name, ``commands`` programs: the whole argv joined by blanks, or
    its first word -> Done (None: not installed);
    where either is None the real ones are used.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    modules: Optional[Mapping[str, Any]] = None
    commands: Optional[Mapping[str, Optional[Done]]] = None

    def path(self, name: str) -> Path:
        """Return where ``/proc/...`` lies here."""
        return self.root / name.lstrip("/")

    def exists(self, name: str) -> bool:
        """Return whether there is such a file.

        Raises:
            Unreadable: we may not look.
        """
        try:
            self._require(name)
        except OSError as error:
            refused = _refused(name, error)
            if isinstance(refused, Absent):
                return False
            raise refused from error
        return True

    def text(self, name: str) -> str:
        """Return a file's text, stripped.

        Raises:
            Absent: there is none.
            Unreadable: it is closed to us, or too large.
        """
        try:
            data = self._read(name, MOST_BYTES + 1)
        except OSError as error:
            raise _refused(name, error) from error
        if len(data) > MOST_BYTES:
            raise Unreadable(f"{name} has more than {MOST_BYTES} bytes")
        return data.decode("utf-8", "replace").strip()

    def head(self, name: str, most: int) -> bytes:
        """Return the first *most* bytes of a file, however large.

        Raises:
            Absent: there is none.
            Unreadable: it is closed to us, or broken.
        """
        try:
            return self._read(name, most)
        except OSError as error:
            raise _refused(name, error) from error

    def _read(self, name: str, most: int) -> bytes:
        """Return the first *most* bytes of a file; a recorded node denies some here."""
        with self.path(name).open("rb", buffering=0) as file:
            parts, size = [], 0
            while size < most:
                part = file.read(min(most - size, PART_BYTES))
                if not part:
                    break
                parts.append(part)
                size += len(part)
            return b"".join(parts)

    def _require(self, name: str) -> None:
        """Raise OSError unless there is such a file."""
        self.path(name).stat()

    def number(self, name: str) -> int:
        """Return a file's one integer (decimal, or hexadecimal with 0x).

        Raises:
            Unreadable: as :meth:`text`, or there is something else in it.
        """
        text = self.text(name)
        try:
            return int(text, 0) if text[:2].lower() == "0x" else int(text)
        except ValueError as error:
            raise Unreadable(f"{name} holds {text[:40]!r}, not a number") from error

    def names(self, pattern: str) -> List[str]:
        """Return the paths that match, as absolute names on the node, sorted; folders closed to us match nothing."""
        found = self.root.glob(pattern.lstrip("/"))
        return sorted("/" + str(path.relative_to(self.root)) for path in found)

    def names_in(self, folder: str) -> List[str]:
        """Return the names in a folder, sorted; unlike :meth:`names` it tells one closed to us from an empty one.

        Raises:
            Absent: there is none.
            Unreadable: it is closed to us.
        """
        try:
            return sorted(path.name for path in self.path(folder).iterdir())
        except OSError as error:
            raise _refused(folder, error) from error

    def numbered(self, folder: str, prefix: str) -> List[str]:
        """Return the names in a folder that are *prefix* and a number, such as cpu0; none where there is no such folder.

        Raises:
            Unreadable: it is closed to us.
        """
        none: List[str] = []
        size = len(prefix)
        names = or_else(self.names_in, folder, none)
        return [name for name in names if name[:size] == prefix and name[size:].isdecimal()]

    def room(self, folder: str) -> Room:
        """Return what is free for us on the file system of a folder.

        Raises:
            Absent: there is no such folder.
            Unreadable: it may not be asked.
        """
        try:
            found = os.statvfs(self.path(folder))
        except OSError as error:
            raise _refused(folder, error) from error
        return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)

    def module(self, name: str) -> Any:
        """Return a vendor's Python module, such as ``pynvml``.

        Raises:
            Absent: it is not installed.
            Unreadable: it cannot be imported.
        """
        if self.modules is not None:
            if name not in self.modules:
                raise Absent(f"the Python module {name} is not installed")
            return self.modules[name]
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name:
                raise Absent(f"the Python module {name} is not installed") from error
            raise Unreadable(f"the Python module {name} cannot be imported: {error}") from error
        except Exception as error:  # vendors' modules raise anything when their driver is missing
            raise Unreadable(f"the Python module {name} cannot be imported: {error}") from error

    def command(self, argv: Sequence[str], timeout_s: float = COMMAND_S) -> Done:
        """Run a vendor's or system's program.

        Raises:
            Absent: it is not installed.
            Unreadable: it cannot be started, or did not end in time.
        """
        if self.commands is not None:
            done = self.commands.get(" ".join(argv), self.commands.get(argv[0]))
            if done is None:
                raise Absent(f"{argv[0]} is not installed")
            return done
        try:
            ended = run_to_end(argv, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise Unreadable(f"{argv[0]} did not end within {timeout_s:g} s") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise Absent(f"{argv[0]} is not installed") from error
            raise Unreadable(f"{argv[0]} cannot be started: {error.strerror}", error.errno) from error
        decoded: Tuple[str, str] = (
            ended.stdout.decode("utf-8", "replace"),
            ended.stderr.decode("utf-8", "replace"),
        )
        return Done(ended.returncode, *decoded)

    def connect(self, address: str, port: int, timeout_s: float) -> bool:
        """Make a TCP connection and close it; return whether somebody listens there. A refusal is an answer as well.

        Raises:
            Unreadable: nobody answers, with the system's message.
        """
        try:
            with socket.create_connection((address, port), timeout=timeout_s):
                return True
        except ConnectionRefusedError:
            return False
        except socket.timeout as error:  # no TimeoutError before Python 3.10
            raise Unreadable(f"{address} does not answer within {timeout_s:g} s") from error
        except OSError as error:
            message = error.strerror or str(error)
            raise Unreadable(f"{address} cannot be reached: {message}", error.errno) from error

    def clock(self) -> float:
        """Return the node's time, in seconds since 1970."""
        return time.time()

    def up_s(self) -> float:
        """Return for how long the kernel runs, in seconds: what the times in its log count.

        This machine's clock is asked, not /proc/uptime, which shows a container its own age where lxcfs is mounted there.

        Raises:
            Unreadable: nobody says.
        """
        if self.root == Path("/"):
            return time.clock_gettime(time.CLOCK_MONOTONIC)
        text = self.text("/proc/uptime")
        try:
            found = float(text.split()[0])
        except (ValueError, IndexError):
            found = math.nan
        if not 0 <= found < math.inf:
            raise Unreadable(f"/proc/uptime holds {text[:40]!r}, no time")
        return found

    def kernel_log(self) -> KernelLog:
        """Return the kernel's log since boot from the first that shows it: /dev/kmsg, ``dmesg -r``, ``journalctl -k -b``.

        Every node has a kernel, so a log that nobody shows us, or that is empty, is unreadable and never absent.

        Raises:
            Unreadable: none of them shows anything; says why for each.
        """
        now = self.clock()
        try:
            up_s: Optional[float] = self.up_s()
        except Unreadable:
            up_s = None
        refused = []
        try:
            found = from_kmsg(self._records(), now, up_s)
            if found:
                return KernelLog("/dev/kmsg", found, up_s)
            refused.append("/dev/kmsg is empty")
        except OSError as error:
            refused.append(str(_refused("/dev/kmsg", error)))
        for argv in (
            ("dmesg", "-r"),
            ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-unix", "-n", "50000"),
        ):
            try:
                done = self.command(argv, timeout_s=LOG_S)
            except Unreadable as error:
                refused.append(str(error))
                continue
            dmesg = argv[0] == "dmesg"
            found = from_dmesg(done.output, now, up_s) if dmesg else from_journal(done.output, now)
            if found and done.code == 0:
                return KernelLog(argv[0], found, up_s)
            message = done.errors.strip().splitlines()
            refused.append(message[-1] if message else f"{argv[0]} shows nothing")
        raise Unreadable(f"the kernel's log cannot be read: {'; '.join(refused)}")

    def _records(self) -> bytes:
        """Return what /dev/kmsg holds; a recorded node has a file there."""
        return records(str(self.path("/dev/kmsg")))

    def clock_state(self) -> ClockState:
        """Return what the kernel says of its clock.

        Raises:
            Unreadable: it says nothing, or this is no Linux.
        """
        import ctypes

        # struct timex of Linux on 64 bits: modes, offset, freq, maxerror, esterror, status; the rest is not looked at.
        fields = (ctypes.c_long * 32)()
        try:
            state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(fields))
        except (OSError, AttributeError) as error:
            raise Unreadable(f"the kernel's clock cannot be asked: {error}") from error
        if state < 0:
            code = ctypes.get_errno()
            raise Unreadable(f"the kernel's clock cannot be asked: {os.strerror(code)}", code)
        status = fields[5] & 0xFFFFFFFF
        return ClockState(synced=not status & 0x40, error_s=fields[3] / 1e6)

    def boot_id(self) -> str:
        """Return what is equal for all that runs on one kernel; nodes with the same one share a machine."""
        return self.text("/proc/sys/kernel/random/boot_id")

    def status(self, pid: object, key: str) -> Optional[str]:
        """Return a value of ``/proc/PID/status``, of several the first (of Uid: the real one); None: it is not visible."""
        values = or_else(self.key_values, f"/proc/{pid}/status", {}, Unreadable).get(key, "").split()
        return values[0] if values else None

    def mount_of(self, path: str) -> Tuple[str, Tuple[str, ...], str]:
        """Return type, options and place of the mount on which *path* lies (proc_pid_mounts(5)); the last is on top."""
        best: Tuple[str, Tuple[str, ...], str] = ("", (), "/")
        for line in self.text("/proc/self/mounts").splitlines():
            message = line.split()
            place = message[1].replace("\\040", " ") if len(message) > 3 else ""
            inside = (path + "/").startswith(place.rstrip("/") + "/")
            if place and inside and len(place) >= len(best[2]):
                best = (message[2], tuple(message[3].split(",")), place)
        return best

    def key_values(self, name: str, separator: str = ":") -> Dict[str, str]:
        """Return a file's ``key: value`` lines, such as those of /proc/meminfo; the first of equal keys counts."""
        found: Dict[str, str] = {}
        for line in self.text(name).splitlines():
            key, between, value = line.partition(separator)
            if between:
                found.setdefault(key.strip(), value.strip())
        return found


@dataclass(frozen=True)
class Context:
    """What a check is given: policy and expectation, where this node stands, and when vetting began.

    ``hosts`` are all nodes in order. ``window_s``: events older than this are history. ``python`` is the interpreter that the
    job will run, empty: ``python3``.
    """

    policy: Policy
    wanted: ExpectedNode = field(default_factory=ExpectedNode)
    host: str = ""
    hosts: Tuple[str, ...] = ()
    window_s: float = 86400.0
    python: str = ""

    @property
    def world(self) -> int:
        """How many ranks the whole job will have, as far as is known."""
        return max(1, self.wanted.ranks) * max(1, len(self.hosts))


def or_else(read: Callable[[str], T], name: str, otherwise: D, but: Type[Unreadable] = Absent) -> Union[T, D]:
    """Return what *read* says of *name*, or *otherwise* where there is no such thing (or, by *but*, it cannot be read)."""
    try:
        return read(name)
    except but:
        return otherwise


def size(value: float) -> str:
    """Return bytes as text: ``64 MiB``."""
    if not math.isfinite(value):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} PiB"


def is_number(text: str) -> bool:
    """Return whether a text is a whole number that an int can be made of: ASCII digits, at most 18 of them."""
    return len(text) <= 18 and text.isascii() and text.isdigit()


def numbers(text: str) -> FrozenSet[int]:
    """Return the numbers of a list as the kernel writes it, ``0-3,8``.

    Raises:
        Unreadable: it is none.
    """
    listed = ",".join(filter(None, map(str.strip, text.replace("\n", ",").split(","))))
    try:
        return frozenset(number_list(listed) if listed else ())
    except HostlistError as error:
        raise Unreadable(f"{text[:40]!r} is no list of numbers") from error


def some(names: Tuple[str, ...], most: int = 4) -> str:
    """Return at most *most* of them, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
