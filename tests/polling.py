"""Waiting for a condition, with a hang guard that no machine is too slow for."""

import time
from pathlib import Path

LIMIT_S = 300.0


def poll(condition):
    """Return what *condition* returns, once that is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "a condition did not come true"
        time.sleep(0.05)
    return found


def ended(pid):
    """Whether a process has ended; its parent need not have taken its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
