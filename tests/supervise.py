"""Run a command, and end whatever it leaves behind: ``python tests/supervise.py [--quiet] -- COMMAND ...``.

Every process below the command becomes a child of this one when its parent dies, whatever session or group it has made for
itself (PR_SET_CHILD_SUBREAPER of prctl(2)). What still runs a while after the command has ended is killed and listed, and a
command that succeeded fails for it. If this process itself is killed, the command is interrupted; if its parent is, the
command is terminated.

The last line tells the CPU seconds of all these processes, which is what a test suite costs on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
#: How long what the command started may go on after it: the watcher of a test cluster takes its daemons down in 20 s.
GRACE_S = 90.0
#: Exit code of a command that ran past ``--limit``, as of timeout(1).
EXIT_LIMIT = 124
#: What is waited for while the command runs.
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_DAY_S = 86400.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code, 1 if it succeeded and left a process."""
    parser = argparse.ArgumentParser(prog="supervise.py", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="S", help="seconds until what is left is killed"
    )
    parser.add_argument("--limit", type=float, metavar="S", help="kill the command after so many seconds")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing, and let what is left be no failure"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(argv)
    start = time.monotonic()
    code, left = run(options.command, grace_s=options.grace, limit_s=options.limit)
    if options.quiet:
        return code
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [f"left running, and killed: {line}" for line in left]
    lines.append(f"{spent.ru_utime + spent.ru_stime:.0f} CPU seconds in {time.monotonic() - start:.0f} s")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return 1 if left and code == 0 else code


def run(command: Sequence[str], *, grace_s: float, limit_s: float | None = None) -> tuple[int, list[str]]:
    """Run a command to its end.

    Returns:
        Its exit code (128 + N where signal N ended it, 124 past the limit), and the command lines of the processes that
        had to be killed after it.

    Raises:
        OSError: The command cannot be started.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # Blocked, and waited for: the handler of a signal that comes just before waitpid(2) would run after it only.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # of whoever waits for it, such as make
    try:
        child = subprocess.Popen(command, preexec_fn=_interrupt_with_parent)  # noqa: PLW1509 - there is one thread
        code = _await(child, limit_s)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return code, _end_descendants(grace_s)


def _interrupt_with_parent() -> None:
    """Let the kernel interrupt the command when this process dies; pytest then runs its fixtures to their end."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _await(child: subprocess.Popen[bytes], limit_s: float | None) -> int:
    """Wait for the command, and collect every orphan that ends meanwhile: tests look whether processes are gone.

    Signals are passed on to the command. A terminal sends Ctrl-C to both, so that this one is not.
    """
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    late = False
    while True:
        came = signal.sigtimedwait(_AWAITED, min(max(deadline - time.monotonic(), 0), _DAY_S))
        if came is None and time.monotonic() >= deadline:
            late, deadline = True, math.inf
            os.kill(child.pid, signal.SIGKILL)
        elif came is not None and came.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid not in {0, child.pid}:
                pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child.pid:
                child.returncode = code = os.waitstatus_to_exitcode(status)
                return EXIT_LIMIT if late else code if code >= 0 else 128 - code
        elif came is not None and not (came.si_signo == signal.SIGINT and os.isatty(0)):
            os.kill(child.pid, came.si_signo)


def _end_descendants(grace_s: float) -> list[str]:
    deadline = time.monotonic() + grace_s
    while (alive := _reap()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not alive:
        return []
    killed: dict[int, str] = {}
    while alive:  # whoever is orphaned by a killing becomes a child of ours and is next
        for pid in alive:
            killed.setdefault(pid, _command_line(pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        alive = _reap()
    return list(killed.values())


def _reap() -> list[int]:
    """Collect all children that have ended; return the live descendants."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0:
            return _descendants()


def _descendants() -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    above = {os.getpid()}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above}
        found += sorted(above)
    return found


def _command_line(pid: int) -> str:
    try:
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except OSError:
        words = ""
    return f"{words or '(ended)'} (pid {pid})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
