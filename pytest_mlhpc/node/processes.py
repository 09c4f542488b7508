"""Processes on a node: every descendant of the batch stays below it and none outlives it; job steps, and processes killed for their memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import clean

#: ``prctl`` option that has the kernel send a signal when the thread that made this process ends (linux/prctl.h).
PR_SET_PDEATHSIG = 1

#: ``prctl`` option that makes orphans of our tree our own children, Linux >= 3.4 (linux/prctl.h).
PR_SET_CHILD_SUBREAPER = 36

#: prctl(2), None where there is no Linux. It is found before anything is forked: a child of threads may not look for it.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)

#: Exit code of a program that SIGTERM ended, as shells report it.
EXIT_TERMINATED = 128 + signal.SIGTERM

#: How long a process that got SIGKILL may take to vanish (device drivers can hold it) before we give up, in seconds.
KILL_LIMIT_S = 10.0

#: Most connections that have not proved what they are, beside the two of each rank: a descriptor each.
MOST_STRANGERS = 128


def become_subreaper() -> str:
    """Make this process the parent of every orphan below it; return why not, or an empty string."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0:
            return ""
        return os.strerror(ctypes.get_errno())
    except (OSError, AttributeError) as error:
        return str(error)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when *parent* dies, however that happens; end now if it has died already."""
    if _PRCTL is None:
        return
    _PRCTL(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), number)


def stat_fields(pid: int) -> List[str]:
    """Return the fields of /proc/PID/stat after the command's name (state first), or nothing if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - hundreds of these in one walk
            return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return []


def copy_of(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return a copy of *environ*, such as ``os.environ``, while another thread sets and removes variables.

    A copy of ``os.environ`` takes its names first and then their values: one that is gone by then is a KeyError. pytest sets
    and removes ``PYTEST_CURRENT_TEST`` in each phase of each test.
    """
    while True:
        with contextlib.suppress(KeyError):
            return dict(environ)


#: Most starts of one program by :func:`start_in_new_session`: a terminal sends each of its signals once.
MAX_STARTS = 3

#: Flag of a process that was forked and has executed no program (include/linux/sched.h of Linux: PF_FORKNOEXEC).
FORKED_ONLY = 0x40


def start_in_new_session(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start *argv* in a session of its own, which no signal to our process group ends: not Ctrl-C, not SIGHUP.

    A new process is in our group until it calls setsid(2), a moment after fork(2). A signal of the terminal in that moment
    kills it before it is the program. Such a process did nothing, so it is started again. *options* are Popen's.

    Raises:
        OSError: the program cannot be started.
        ValueError: an argument has a null byte.
    """
    for number in range(1, MAX_STARTS + 1):
        process = subprocess.Popen(list(argv), start_new_session=True, **options)
        if number == MAX_STARTS or not _killed_before_exec(process.pid):
            break
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return process


def _killed_before_exec(pid: int) -> bool:
    """Return whether child *pid*, which Popen returned and nobody waited for, has executed no program and never will.

    Popen returns once the child has executed the program, said why it cannot, or begins to end.
    """
    fields = stat_fields(pid)
    # proc(5): after the name come the state, five numbers, and the flags.
    return len(fields) > 6 and int(fields[6]) & FORKED_ONLY != 0


#: How long a killed program and its pipes are waited for, in seconds: what left its group may hold them for ever.
DRAIN_S = 2.0


def run_to_end(
    argv: Sequence[str], limit_s: float, *, given: bytes = b"", **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run *argv* in a session of its own to its end, at most *limit_s* seconds, with *given* on its standard input.

    Its whole process group is killed where it takes longer, and where this process is interrupted. *options* are Popen's.

    Raises:
        OSError: the program cannot be started.
        subprocess.TimeoutExpired: it did not end in time; ``stderr`` is what it printed.
    """
    pipes = {
        "stdin": subprocess.PIPE if given else subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    process = start_in_new_session(argv, **{**pipes, **options})
    try:
        out, err = process.communicate(given or None, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        error.stderr = _kill_group(process)
        raise
    except BaseException:  # Ctrl-C: nothing may be left running
        _kill_group(process)
        raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _kill_group(process: subprocess.Popen[bytes]) -> bytes:
    """Kill the process group, reap the process, and return its standard error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group's id is the process's: it leads its session
    try:
        return process.communicate(timeout=DRAIN_S)[1] or b""
    except (
        subprocess.TimeoutExpired
    ):  # a child in another session still has the pipes open: it is not waited for
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written is of no use any more
                    pipe.close()
        # Where it sleeps in the kernel, on a file server that is away, it dies later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=DRAIN_S)
    return b""


def descendants(root: int) -> List[int]:
    """Return all live processes below *root*, found by one walk of /proc; zombies are dead."""
    parent_of: Dict[int, int] = {}
    dead = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone, hundreds of them
        if name.isdigit():
            fields = stat_fields(int(name))
            if len(fields) > 1:
                parent_of[int(name)] = int(fields[1])
                # The first thread of a process may have ended before the others: a zombie that still runs (field 20, proc(5)).
                if fields[0] in "ZX" and not (len(fields) > 17 and int(fields[17]) > 1):
                    dead.add(int(name))
    children: Dict[int, List[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, []).append(pid)
    found: List[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [pid for pid in found if pid not in dead]


def reap() -> Dict[int, int]:
    """Take the exit statuses of all children that have ended: pid -> exit code, or minus the signal's number."""
    ended: Dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = exit_code(status)


def exit_code(status: int) -> int:
    """Turn a wait status into an exit code, or minus the number of the signal that killed."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def exit_code_of_foreign(pid: int) -> Optional[int]:
    """Return how a process that is not our child ended, while its parent has not reaped it; None if that is unknown.

    Field 52 of /proc/PID/stat is the wait status of a process that is ending (proc(5), since Linux 3.5).
    """
    fields = stat_fields(pid)
    if len(fields) < 50 or fields[0] not in "ZX":
        return None
    return exit_code(int(fields[49]))


def end_descendants(
    root: int, grace_s: float, wakeup: int, spared: Collection[int] = ()
) -> Tuple[Dict[int, int], List[int]]:
    """End everything below *root* but the *spared* processes: SIGTERM, and after *grace_s* seconds SIGKILL.

    *wakeup* is a descriptor that becomes readable when a child ends. Returns the exit codes of our own children, and
    the pids that not even SIGKILL ended within ``KILL_LIMIT_S``.
    """
    ended = reap()
    start = time.monotonic()
    signalled: Dict[int, int] = {}
    while True:
        ended.update(reap())
        left = [pid for pid in descendants(root) if pid not in spared]
        passed = time.monotonic() - start
        if not left or passed > grace_s + KILL_LIMIT_S:
            ended.update(reap())  # what ended between the two reads
            return ended, left
        number = signal.SIGTERM if passed < grace_s else signal.SIGKILL
        for pid in left:
            if signalled.get(pid) != number:
                signalled[pid] = number
                with contextlib.suppress(ProcessLookupError, PermissionError):  # gone by itself, or set-uid
                    os.kill(pid, number)
        if select.select([wakeup], [], [], 0.05)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)


def describe_exit(code: int) -> str:
    """Say how a process ended, for people."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel does that when memory runs out)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


#: Bytes of an output among which its last lines are found: it may have any size.
_END_BYTES = 1 << 16


def last_lines(output: bytes, lines: int = 20, characters: int = 2000) -> str:
    """Return the end of a program's output as text that is safe to print."""
    text = clean(output[-_END_BYTES:].decode("utf-8", "replace"))
    return "\n".join(text.strip().splitlines()[-lines:])[-characters:]


class CappedLog:
    """A log file of at most *cap* bytes; what does not fit is counted, and the last lines are remembered.

    Raises:
        OSError: the file cannot be made or written, with ``filename`` set.
    """

    def __init__(self, path: Path, cap: int) -> None:
        self.path = path
        self.written = 0
        self.dropped = 0
        self._cap = cap
        self._tail = b""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(str(path), flags, 0o600)

    def write(self, data: bytes) -> None:
        """Append *data* as far as the cap allows."""
        self._tail = (self._tail + data)[-16384:]
        room = max(0, self._cap - self.written)
        self.dropped += max(0, len(data) - room)
        rest = data[:room]
        try:
            while rest:
                count = os.write(self._fd, rest)
                self.written += count
                rest = rest[count:]
        except OSError as error:
            error.filename = str(self.path)
            raise

    def tail(self, lines: int = 5, characters: int = 600) -> str:
        """Return the last lines as text that is safe to print."""
        return last_lines(self._tail, lines, characters)

    def close(self) -> None:
        """Close the file, and say in it how much was dropped. Idempotent."""
        if self._fd < 0:
            return
        if self.dropped:
            with contextlib.suppress(OSError):  # a note about missing bytes may be missing itself
                os.write(self._fd, f"\n[{self.dropped} more bytes were dropped]\n".encode())
        os.close(self._fd)
        self._fd = -1


#: Most bytes of a program's standard error that are logged apart, beside its output.
ERRORS_CAP = 1024 * 1024

#: Most bytes that wait for the end of the other stream's line.
LONGEST_WAIT = 65536


class JoinedLines:
    """Joins standard output and standard error line by line, in the order in which they are read.

    A stream whose line has begun goes on at once. Only what the other one prints meanwhile waits for the end of that line.
    """

    def __init__(self) -> None:
        self._begun: Optional[bool] = (
            None  #: whose line is unfinished: standard error's (True), the other's, or none
        )
        self._waiting = b""  #: of the other stream

    def feed(self, data: bytes, *, error: bool) -> bytes:
        """Take what was read of standard error, or of standard output; return what the log gets now."""
        if self._begun is None or self._begun is error:
            cut = data.rfind(b"\n") + 1
            if not (self._waiting and cut):
                self._begun = None if cut == len(data) else error
                return data
            line, rest, waiting = data[:cut], data[cut:], self._waiting
            self._waiting, self._begun = b"", None
            joined = line + self.feed(waiting, error=not error)
            return joined + (self.feed(rest, error=error) if rest else b"")
        self._waiting += data
        return self.finish() if len(self._waiting) > LONGEST_WAIT else b""

    def finish(self) -> bytes:
        """Return what still waits."""
        waiting, self._waiting, self._begun = self._waiting, b"", None
        return waiting


def say(text: str) -> None:
    """Write one line to the batch's own log, whatever state that is in."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - standard error is the batch's log


#: Longest wait for one answer of squeue or scancel, in seconds.
CALL_LIMIT_S = 20.0

#: How long a step may take to vanish, and the time between two checks, in seconds. After SIGKILL of its srun a step's record
#: was there for 4 s although its tasks were gone at once.
GONE_LIMIT_S, LOOK_S = 15.0, 1.0

#: Names under which OpenMPI 4 and 5 start their daemons by srun.
MPI_DAEMONS = ("orted", "prted")


def end(job_id: str, run_id: str) -> bool:
    """Cancel the steps of one run that are still there; return whether none is left. Never raises."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while True:
        left = find(job_id, run_id)
        if not left:
            return True
        if time.monotonic() > deadline:
            say(f"run {run_id}: these job steps do not end: {', '.join(left)}")
            return False
        if _call("scancel", "--signal=KILL", *left) is None:
            return False  # most likely the whole job is being ended, by Slurm itself
        time.sleep(LOOK_S)  # nothing tells of a step's end but asking again


def find(job_id: str, run_id: str) -> List[str]:
    """Return the ids of the job's steps that carry the run's name, or that of OpenMPI's daemons."""
    said = _call("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i|%j")
    pairs = [line.partition("|") for line in (said or "").splitlines()]
    return [step.strip() for step, _, name in pairs if name.strip() in (run_id, *MPI_DAEMONS)]


def _call(*argv: str) -> Optional[str]:
    """Return what a command printed; None, and a line in the log, if it failed."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = run_to_end(argv, CALL_LIMIT_S)
        if done.returncode == 0:
            return done.stdout.decode("utf-8", "replace")
        message = done.stderr.decode("utf-8", "replace").strip()[-300:]
        say(f"{' '.join(argv)} ended with exit code {done.returncode}: {message}")
        return None
    say(f"{' '.join(argv)} could not be started, or did not answer within {CALL_LIMIT_S:g} s")
    return None


#: Where a container sees its own counts, under cgroup v2 and v1 (Linux, admin-guide/cgroup-v2.rst and
#: cgroup-v1/memory.rst; the count in v1 is there since Linux 4.13).
COUNTERS: Tuple[str, ...] = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

#: A count of kills, or the lone number of a counter of failures.
_COUNT = re.compile(r"^(?:oom_kill )?(\d+)$", re.MULTILINE)

#: The folder of a Slurm job in the path of a cgroup (slurm.schedmd.com/cgroups.html, "Slurm Cgroup hierarchy").
_JOB = re.compile(r"^\d+:([^:\n]*):(/\S*?/job_\d+)(?=/|$)", re.MULTILINE)


def job_counters(
    own: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")
) -> Tuple[str, ...]:
    """Return the files that count how often this Slurm job met its memory limit; none where Slurm sets no limit.

    They outlive a job step, and slurmstepd does not report every kill within one. In cgroup v2 the job's count has the
    kills of all its steps. In v1 each cgroup counts its own kills alone, so that the job's refused allocations
    (``memory.failcnt``) have to do: together with a SIGKILL they mean that the limit was the reason.
    """
    with contextlib.suppress(OSError, ValueError):
        for controllers, path in _JOB.findall(own.read_text(encoding="utf-8")):
            if not controllers:
                return (f"{tree}{path}/memory.events",)
            if "memory" in controllers.split(","):
                return (f"{tree}/memory{path}/memory.failcnt",)
    return ()


def count_memory_events(counters: Tuple[str, ...] = COUNTERS) -> int:
    """Return the number in the first file of *counters* that can be read; 0 where none can be.

    Of a container it is the number of processes that were killed for its memory limit.
    """
    for path in counters:
        with contextlib.suppress(OSError, ValueError):
            found = _COUNT.search(Path(path).read_text(encoding="ascii"))
            if found:
                return int(found.group(1))
    return 0


class GrowthWatch:
    """Whether the count has grown since this was made."""

    def __init__(self, counters: Tuple[str, ...] = COUNTERS) -> None:
        self._counters = counters
        self._before = count_memory_events(counters)

    def grown(self) -> bool:
        """Return whether something has been killed for the memory limit."""
        return count_memory_events(self._counters) > self._before


def raise_file_limit(ranks: int) -> None:
    """Allow as many open files as the hard limit does, if two connections a rank and some strangers need it.

    Otherwise the limit stays as it is, because what we start inherits it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= 2 * (2 * ranks + MOST_STRANGERS):
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        say(f"the limit of open files stays as it is: {error}")
