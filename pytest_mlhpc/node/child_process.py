"""A child process that may hang, die or print without end: started, read without waiting, and killed with all its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import describe_exit, die_with_parent

#: Longest answer, and how much of what it prints is kept, in bytes.
MOST_BYTES, TAIL_BYTES = 16 * 1024 * 1024, 4096

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

    ``answers`` and ``words`` are descriptors to be watched; ``read`` and ``listen`` take what is there. ``trouble`` says what is
    wrong with what it sent, empty while nothing is.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, module: str, *, python: str = "", arguments: Sequence[str] = (), environ: Mapping[str, str]
    ) -> None:
        self.trouble = ""
        self.killed = False
        self._in, self._out, self._tail = bytearray(), bytearray(), b""
        self.answers, answering = os.pipe()
        self.words, printing = os.pipe()
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
            for fd in (self.answers, self.words, self._lifeline):
                os.close(fd)
            raise
        finally:
            for fd in (answering, printing, lifeline):
                os.close(fd)
        self.pid = self._process.pid
        for fd in (self.answers, self.words, self._stdin):
            os.set_blocking(fd, False)

    @property
    def _stdin(self) -> int:
        return self._process.stdin.fileno() if self._process.stdin is not None else -1

    @property
    def waiting(self) -> int:
        """The descriptor to be watched for room, if something waits to be sent, else -1."""
        return self._stdin if self._out else -1

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one command, as far as that goes now."""
        self._out += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as that goes now."""
        try:
            while self._out:
                del self._out[: os.write(self._stdin, memoryview(self._out)[: 1 << 16])]
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._out.clear()  # it is gone, which its exit code will tell

    def read(self) -> List[Dict[str, Any]]:
        """Return the answers that have arrived."""
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

    def listen(self) -> None:
        """Take what it has printed."""
        for data in _arrived(self.words):
            self._tail = (self._tail + data)[-TAIL_BYTES:]

    @property
    def ended(self) -> Optional[int]:
        """How it ended, as by ``Popen.returncode``; None while it has not."""
        return self._process.poll()

    def how(self) -> str:
        """Say how it ended, with its last words."""
        self.listen()
        code = self._process.poll()
        text = "does not end although it got SIGKILL" if code is None else describe_exit(code)
        tail = self._tail.decode("utf-8", "replace")
        clean = "".join(
            one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in tail
        )
        last = clean.strip().splitlines()[-1:]
        return f"{text}: {last[0].strip()[-300:]}" if last else text

    def kill(self) -> None:
        """Send SIGKILL to it and all in its process group. It may take its time to vanish, or never do."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and give back what it took here; ``ended`` still tells whether it is gone."""
        self.kill()
        for fd in (self.answers, self.words, self._lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.answers = self.words = self._lifeline = -1
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
