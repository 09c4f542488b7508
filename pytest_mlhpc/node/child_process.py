"""A child process that may hang, die or babble: both ends of the one protocol with it.

The owner (``ChildProcess``) sends orders as JSON lines to its standard input, ``{"id": 1, "do": "gemm", "args": {...}}``, and reads
answers from a descriptor of their own, as libraries print to standard output. It waits for nothing: what takes too long, dies,
or answers what is no message is killed with all its descendants, and named with its last output. The child (``Orders``,
``Answers``) ends when its owner is gone, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import runpy
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import describe_exit, die_with_parent, last_lines

#: Longest answer, and how much of what it prints is stored, in bytes.
MOST_BYTES, TAIL_BYTES = 16 * 1024 * 1024, 4096

#: Longest order, in bytes: it has a dozen short fields.
MOST_ORDER = 1 << 20

#: How long what was killed may take to vanish before it is left behind, in seconds.
VANISH_S = 2.0

#: What it runs first; a module of the user's working directory must not take another one's place.
_START = "import sys; sys.path[:] = [path for path in sys.path if path]; from pytest_mlhpc.node.child_process import hold; hold()"

#: Names a zip with this package alone, for an interpreter that is not ours: the folder that we are imported from may hold
#: modules beside it that another interpreter cannot use.
PAYLOAD = "MLHPC_VET_PAYLOAD"


def package_root() -> str:
    """Return the folder or zip that this package is imported from."""
    return str(Path(__file__).parents[2])


class ChildProcess:
    """Starts ``python -m MODULE ARGUMENTS --answers FD``.

    ``watch`` names what is to be waited for, ``read`` takes what is there. ``trouble`` says what is wrong with what it sent, empty
    while nothing is. ``number`` and ``what`` are its order, -1 and nothing without one, and ``doing`` is the part that it said it
    has begun; ``limit`` is when it is overdue (monotonic).

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, module: str, *, python: str = "", arguments: Sequence[str] = (), environ: Mapping[str, str]
    ) -> None:
        self.trouble = ""
        self.idle()
        self._in, self._out, self._tail = bytearray(), bytearray(), b""
        self.answers, answering = os.pipe()
        self.printed, printing = os.pipe()
        lifeline, self._lifeline = os.pipe()
        environment = dict(environ)
        root = environment.get(PAYLOAD, "") if python else ""
        paths = [root or package_root(), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        argv = [
            python or sys.executable,
            "-c",
            _START,
            str(lifeline),
            module,
            *arguments,
            "--answers",
            str(answering),
        ]
        try:
            self._process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=printing,
                stderr=printing,
                pass_fds=(answering, lifeline),
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            for fd in (self.answers, self.printed, self._lifeline):
                os.close(fd)
            raise
        finally:
            for fd in (answering, printing, lifeline):
                os.close(fd)
        self.pid = self._process.pid
        for fd in (self.answers, self.printed, self._stdin):
            os.set_blocking(fd, False)

    @property
    def _stdin(self) -> int:
        return self._process.stdin.fileno() if self._process.stdin is not None else -1

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have *selector* wait for what it says, and for room where an order waits to be sent."""
        for fd in (self.answers, self.printed):
            selector.register(fd, selectors.EVENT_READ)
        if self._out:
            selector.register(self._stdin, selectors.EVENT_WRITE)

    def expect(self, number: int, what: str, limit_s: float) -> None:
        """Note what it is at, and for how many seconds it may be."""
        self.number, self.what, self.doing, self._limit_s = number, what, "", limit_s
        self.limit = time.monotonic() + limit_s

    def idle(self) -> None:
        """Note that it has nothing to do."""
        self.number, self.what, self.doing, self._limit_s = -1, "", "", float("inf")
        self.limit = float("inf")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one order, as far as that goes now; ``read`` sends the rest."""
        self._out += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self._stdin, memoryview(self._out)[: 1 << 16])]
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._out.clear()  # it is gone, which its exit code will tell

    def read(self) -> List[Dict[str, Any]]:
        """Return the answers that have arrived; take what it has printed, and send what waits."""
        self._flush()
        self._listen()
        found: List[Dict[str, Any]] = []
        for data in _arrived(self.answers):
            self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        for line in lines:
            message = _parsed(line)
            if message is None:
                self.trouble = self.trouble or f"it answered something that is no message: {line[:80]!r}"
            else:
                found.append(message)
        if len(rest) > MOST_BYTES:
            self.trouble = self.trouble or "it answered a line that is too long"
            self._in.clear()
        return found

    def _listen(self) -> None:
        for data in _arrived(self.printed):
            self._tail = (self._tail + data)[-TAIL_BYTES:]

    @property
    def ended(self) -> Optional[int]:
        """How it ended, as by ``Popen.returncode``; None while it has not."""
        return self._process.poll()

    def how(self) -> str:
        """Say how it ended, with its last output."""
        self._listen()
        code = self._process.poll()
        text = "does not end although it got SIGKILL" if code is None else describe_exit(code)
        last = last_lines(self._tail, 1, 300).strip()
        return f"{text}: {last}" if last else text

    def failed(self) -> Tuple[str, bool]:
        """Return how it failed, empty if it did not, and whether it hung."""
        if self.trouble:
            return self.trouble, False
        if self.ended is not None:
            return f"its process {self.how()}", False
        if time.monotonic() > self.limit:
            return f"did not end within {self._limit_s:g} s", True
        return "", False

    def answer(self) -> Tuple[Optional[Mapping[str, Any]], bool]:
        """Wait for its first answer until it has failed; return it, None where there is none, and whether it hung."""
        while True:
            ended = self.ended is not None  # before its last output is read
            for message in self.read():
                return message, False
            how, hung = self.failed()
            if (how and hung) or self.trouble or ended:
                return None, hung
            with selectors.DefaultSelector() as selector:
                self.watch(selector)
                selector.select(min(0.1, max(0.0, self.limit - time.monotonic())))  # its end wakes nothing

    def kill(self) -> None:
        """Send SIGKILL to it and all in its process group. It may take its time to vanish, or never do."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and give back what it took here; ``ended`` still tells whether it is gone."""
        self.kill()
        for fd in (self.answers, self.printed, self._lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.answers = self.printed = self._lifeline = -1
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def wait(self, limit_s: float) -> bool:
        """Wait until it has ended, at most *limit_s* seconds; return whether it has."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> str:
        """End it; return what there is to say if it does not go."""
        gone = self.ended is not None
        self.close()
        if gone or self.wait(VANISH_S):
            return ""
        return f"; not even SIGKILL ends it: process {self.pid} is left behind"


def _arrived(fd: int) -> List[bytes]:
    found: List[bytes] = []
    with contextlib.suppress(BlockingIOError, OSError):
        for _ in range(64):  # who babbles is heard no longer than that in one go
            data = os.read(fd, 1 << 16)
            if not data:
                break
            found.append(data)
    return found


def _parsed(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        data = read_json(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def hold() -> None:
    """Be the child process: arguments are the lifeline's descriptor, a module, and the module's arguments."""
    lifeline, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(os.getppid())  # one that has died already, the lifeline tells
    if os.fork() == 0:
        _keep(lifeline)
    os.close(lifeline)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _keep(lifeline: int) -> None:
    """Kill the process group as soon as nobody holds the other end of the pipe."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            if int(name) != lifeline:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(name))
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(0)


class OwnerLost(BaseException):
    """The owner does not read the answers any more."""


@dataclass(frozen=True)
class Order:
    """One line of standard input, or what was wrong with it."""

    id: Any
    do: str
    args: Mapping[str, Any]
    problem: str = ""


def parse_order(line: bytes) -> Order:
    """Return the order in one line; its ``problem`` says what is wrong with anything else."""
    text = line.decode("utf-8", "replace")
    try:
        data = read_json(text)
    except ValueError as error:
        return Order(None, "", {}, f"{text[:60]!r} is no JSON: {error}")
    if not isinstance(data, dict):
        return Order(None, "", {}, f"{text[:60]!r} is no JSON object")
    name, args = data.get("do"), data.get("args", {})
    identity = data.get("id")
    if not isinstance(name, str):
        return Order(identity, "", {}, f"do is {name!r:.60}, not a text")
    if not isinstance(args, dict):
        return Order(identity, name, {}, f"args is {args!r:.60}, not an object")
    return Order(identity, name, args)


class Orders:
    """Standard input, read by a thread of its own: its end ends this process, whatever an order hangs in."""

    def __init__(self, descriptor: int = 0, ended: Callable[[], None] = lambda: os._exit(0)) -> None:
        self._descriptor, self._ended = descriptor, ended
        self._queue: queue.Queue[Order] = queue.Queue()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def next(self) -> Order:
        """Wait for the next order."""
        return self._queue.get()

    def _read(self) -> None:
        """Read lines until the end; one that is too long is given up, and its rest skipped."""
        rest, skipping = b"", False
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:
                data = b""
            if not data:
                self._ended()
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not skipping and line.strip():
                    self._queue.put(parse_order(line))
                skipping = False
            if len(rest) > MOST_ORDER:
                if not skipping:
                    self._queue.put(Order(None, "", {}, f"a line has more than {MOST_ORDER} bytes"))
                rest, skipping = b"", True


class Answers:
    """The descriptor of ``--answers``. Lines of several threads never mix."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # nothing that a library starts may hold it open
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, answer: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            OwnerLost: nothing reads them any more.
        """
        text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
        view = memoryview(text.encode("utf-8") + b"\n")
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                raise OwnerLost(str(error)) from error

    def error(self, identity: Any, text: str, why: str = "") -> None:
        """Answer an order that could not be carried out."""
        answer: Dict[str, Any] = {"id": identity, "error": text}
        self.send({**answer, "why": why} if why else answer)

    def begun(self, identity: Any) -> Callable[[str], None]:
        """Return what says that something of an order has begun, and with its argument what."""
        return lambda what: self.send({"id": identity, "begun": what})
