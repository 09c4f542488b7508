"""Starts the ranks of a program on one node, without MPI and without torch; each learns its rank from RANK.

``python -m pytest_mlhpc.node.spawn COUNT -- PROGRAM ...`` is what launcher ``spawn`` of ``node/launch.py`` starts.
Exit code: that of the first rank that ends badly (128 + the signal's number), which ends the others; 0 where none does.
With ``label`` in place of COUNT it is around one rank, whose number is in RANK, and ends as that does (``node/batch/podrun.py``, ``node/launch.py``).

Each line is printed with its rank before it (:class:`RankLines` reads that), as by ``srun --label``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from typing import BinaryIO, Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.processes import LONGEST_WAIT

#: Exit code where a rank cannot be started, as of a shell.
NOT_STARTED = 127

#: Launchers that print the rank before each line of a program.
LABELLING = ("spawn", "srun", "podrun", "torchrun")

#: In place of a number of ranks: the process is around one, which has its number already.
LABEL = "label"

#: What is before a line: the rank, then a sign of the stream. ``srun --label`` has ``:`` alone.
_LABEL = re.compile(rb" *(\d{1,7})([:!;?]) ?")
#: Signs of standard output and standard error, of a whole line and of a part that its rank has not ended yet.
_WHOLE, _PART = (b":", b"!"), (b";", b"?")

#: Bytes after which srun ends a labelled line whose rank has not: the rest follows as a line of its own (MAX_MSG_LEN in Slurm's
#: src/slurmd/slurmstepd/io.c). A whole line of just so many bytes is followed by an empty one.
SRUN_PART = 1024

#: Longest line that is put together again, in bytes.
LONGEST_LINE = 1 << 20

#: How long output may come after its rank has ended, in seconds: from what the rank has left running.
AFTER_END_S = 1.0


class RankLines:
    """Takes the labels off what a launcher prints. Bytes are *error* if they come from its standard error, and *srun*'s if it is that."""

    def __init__(self, ranks: int, *, error: bool, srun: bool = False) -> None:
        self._ranks, self._error = ranks, error
        self._part = SRUN_PART if srun else 0  #: bytes of a line that its rank has not ended
        self._rest = b""
        self._parts: Dict[Tuple[int, bool], bytes] = {}

    def feed(self, data: bytes, *, last: bool = False) -> List[Tuple[int, bool, bytes]]:
        """Return (rank, whether it is of standard error, text) of each whole line; the rank is -1 where the launcher speaks."""
        lines = re.findall(rb"[^\n]*\n|[^\n]+", self._rest + data)
        self._rest = b""
        if (
            lines
            and not last
            and not lines[-1].endswith(b"\n")
            and len(lines[-1]) <= LONGEST_WAIT + SRUN_PART
        ):
            self._rest = lines.pop()
        found = [line for line in map(self._taken, lines) if line[2]]
        if last:
            found += [(*key, part) for key, part in self._parts.items()]
            self._parts.clear()
        return found

    def _taken(self, line: bytes) -> Tuple[int, bool, bytes]:
        """Return what *line* ends, an empty text if nothing."""
        found = _LABEL.match(line)
        if found is None or int(found.group(1)) >= self._ranks:
            return -1, self._error, line
        rank, sign, text = int(found.group(1)), found.group(2), line[found.end() :]
        key = rank, self._error or sign in (_WHOLE[1], _PART[1])
        text = self._parts.pop(key, b"") + text
        if (sign in _PART or len(line) - found.end() == self._part + 1 > 1) and len(text) <= LONGEST_LINE:
            self._parts[key] = text[:-1]
            return (*key, b"")
        return (*key, text)


def rank_variables(rank: int, local: int, size: int) -> Dict[str, str]:
    """Return the variables from which a rank learns its number, that on its node, and how many there are (torchrun's names)."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(size)}


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, wait for all of them, and return the exit code."""
    count, argv = arguments[0], list(arguments[2:])
    ranks: Dict[int, subprocess.Popen[bytes]] = {}
    # What ranks print after a signal to end is still passed on.
    signal.signal(signal.SIGTERM, lambda *_: _end(ranks))
    if count == LABEL:
        return _as_signal(_run(ranks, argv, [{}], [int(os.environ["RANK"])]))
    places = [rank_variables(rank, rank, int(count)) for rank in range(int(count))]
    return _run(ranks, argv, places, range(int(count)))


def _run(
    ranks: Dict[int, subprocess.Popen[bytes]],
    argv: Sequence[str],
    places: Sequence[Mapping[str, str]],
    numbers: Sequence[int],
) -> int:
    """Start a rank at each of *places* and put it into *ranks*, by its pid; return the exit code of all."""
    relays: List[threading.Thread] = []
    lock = threading.Lock()
    for number, place in zip(numbers, places):
        try:
            process = subprocess.Popen(
                list(argv),
                env={**os.environ, **place},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            sys.stderr.write(f"cannot start {argv[0]!r}: {error.strerror}\n")
            _end(ranks)
            return NOT_STARTED
        ranks[process.pid] = process
        for pipe, *signs in zip((process.stdout, process.stderr), _WHOLE, _PART):
            labels = [b"%d%s " % (number, sign) for sign in signs]
            relays.append(threading.Thread(target=_relay, args=(pipe, labels, lock), daemon=True))
            relays[-1].start()
    code = _wait(ranks)
    for relay in relays:
        relay.join(AFTER_END_S)
    return code


def _wait(ranks: Dict[int, subprocess.Popen[bytes]]) -> int:
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


def _relay(pipe: BinaryIO, labels: Sequence[bytes], lock: threading.Lock) -> None:
    """Print what comes from *pipe* line by line, after the first of *labels*, or after the second a part of a long line."""
    whole, part = labels
    while line := pipe.readline(LONGEST_WAIT):
        data = whole + line
        if not line.endswith(b"\n"):
            data = (part if len(line) == LONGEST_WAIT else whole) + line + b"\n"
        with lock, contextlib.suppress(OSError):  # nobody reads it any more; the rank goes on
            while data:
                data = data[os.write(1, data) :]


def _as_signal(code: int) -> int:
    """End as the only rank did: killed by the same signal."""
    if code > 128 and code - 128 in set(signal.Signals):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    return code


def _end(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for process in list(ranks.values()):
        process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
