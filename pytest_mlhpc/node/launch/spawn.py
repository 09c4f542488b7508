"""Launcher `spawn`: the ranks of a program on one node, without MPI and without torch; each learns its rank from RANK.

Run as a module it is the process that starts them: ``python -m pytest_mlhpc.node.launch.spawn COUNT -- PROGRAM ...``.
Exit code: that of the first rank that ends badly (128 + the signal's number), which ends the others; 0 where none does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import step
from pytest_mlhpc.node.protocol.plan import RunPlan

#: Exit code where a rank cannot be started, as of a shell.
NOT_STARTED = 127


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of one process that starts all ranks on the only node.

    Raises:
        ValueError: several nodes.
    """
    if len(nodes) != 1:
        raise ValueError(f"launcher spawn starts ranks on one node, not on {len(nodes)}")
    argv = [sys.executable, "-m", __name__, str(run.started), "--", *step.worker_argv(run)]
    return argv, step.with_threads(run, environment)


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, wait for all of them, and return the exit code."""
    count, argv = int(arguments[0]), list(arguments[2:])
    ranks: Dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(count):
        place = step.rank_variables(rank, rank, count)
        try:
            process = subprocess.Popen(argv, env={**os.environ, **place}, stdin=subprocess.DEVNULL)
        except OSError as error:
            sys.stderr.write(f"cannot start {argv[0]!r}: {error.strerror}\n")
            _end(ranks)
            return NOT_STARTED
        ranks[process.pid] = process
    while ranks:
        pid, status = os.wait()
        ended = ranks.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if ended is not None:
            ended.returncode = code  # reaped here, not by Popen
            if code:
                _end(ranks)  # those that do not end by this are ended by the batch
                return 128 - code if code < 0 else code
    return 0


def _end(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for process in ranks.values():
        process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
