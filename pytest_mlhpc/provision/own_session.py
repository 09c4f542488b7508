"""Start a process in a session of its own, which no signal to our process group ends: not Ctrl-C, not SIGHUP.

A new process is in our group until it calls setsid(2), a moment after fork(2). A signal of the terminal in that moment kills
it before it is the program. Such a process did nothing, so that it is started again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Most starts of one program: a terminal sends each of its signals once.
MAX_STARTS = 3

#: Flag of a process that was forked and has executed no program (include/linux/sched.h of Linux: PF_FORKNOEXEC).
FORKED_ONLY = 0x40


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start *argv* as the leader of a new session; *options* are those of :class:`subprocess.Popen`.

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
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return bool(
            int(fields[6]) & FORKED_ONLY
        )  # proc(5): after the name come the state, five numbers, the flags
    except (OSError, ValueError, IndexError):
        return False
