"""The child of a made-up node: torch's own one, or a small one without torch; on the slow node it is stopped part of the time.

What a node with a slow processor does is done by stopping the whole process for a share of every 5 ms: whatever it computes, copies
or sends then takes as much longer. The small one's figures are measured as well: hashing, copying, and
bytes sent both ways through TCP; it stands in for torch where fifty vettings must fit into minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.vet.child.main import main as torch_child
from pytest_mlhpc.vet.finding import Finding, Outcome, Reading, Severity
from pytest_mlhpc.vet.leash import PR_SET_PDEATHSIG

#: The slow node's host and the share of time for which it stands still: "node3 0.2". And "torch" or "small".
SLOW, KIND = "MLHPC_BENCH_SLOW", "MLHPC_BENCH_CHILD"

#: In seconds: short against anything that is timed, so that a median sees it too.
PERIOD_S = 0.005

#: How long the small child measures, in seconds, and what it works on, in bytes.
MEASURE_S, PIECE = 0.2, 1 << 20

#: Copies of 64 MiB that are timed together.
COPIES = 4


def brake(share: float) -> None:
    """Have another process stop this one for *share* of the time, until it ends."""
    mine = os.getpid()
    if os.fork():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.closerange(0, 256)  # whoever waits for the end of a pipe of the child's must not wait for this one
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    while os.getppid() == mine:
        os.kill(mine, signal.SIGSTOP)
        time.sleep(share * PERIOD_S)
        os.kill(mine, signal.SIGCONT)
        time.sleep((1 - share) * PERIOD_S)
    os._exit(0)


def rate(amount: float, work: Callable[[], object]) -> float:
    """Return *amount* per second of the median repetition."""
    work()
    seconds: list[float] = []
    end = time.monotonic() + MEASURE_S
    while time.monotonic() < end or len(seconds) < 3:
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return amount / statistics.median(seconds)


def _hashing() -> tuple[str, float]:
    data = os.urandom(PIECE) * 64
    return "bytes hashed", rate(len(data), lambda: hashlib.sha256(data).digest())


def _copying() -> tuple[str, float]:
    data, room = os.urandom(PIECE) * 64, memoryview(bytearray(64 * PIECE))

    def copy() -> None:
        for _ in range(COPIES):
            room[:] = data

    return "bytes copied", rate(COPIES * len(data), copy)


MEASURED: dict[str, Callable[[], tuple[str, float]]] = {"gemm": _hashing, "memory": _copying}


def _meet(args: dict[str, Any]) -> socket.socket:
    if args["first"]:
        with socket.create_server(("", args["port"])) as server:
            server.settimeout(args["timeout_s"])
            return server.accept()[0]
    deadline = time.monotonic() + args["timeout_s"]
    while True:
        try:
            return socket.create_connection((args["address"], args["port"]), args["timeout_s"])
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _exchange(connection: socket.socket, size: int) -> float:
    """Send and receive *size* bytes at the same time; return the seconds."""
    begun = time.perf_counter()
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    sender.start()
    room, left = bytearray(PIECE), size
    while left:
        got = connection.recv_into(room, min(left, PIECE))
        if not got:
            raise ConnectionError("the partner has gone")
        left -= got
    sender.join()
    return time.perf_counter() - begun


def pair(args: dict[str, Any]) -> Outcome:
    """Exchange bytes with the partner as often as asked; the slower side's median counts."""
    with _meet(args) as connection:
        connection.settimeout(args["timeout_s"])
        size = int(args["bytes"])
        seconds = [_exchange(connection, size) for _ in range(1 + int(args["rounds"]))][1:]
        mine = size / statistics.median(seconds)
        connection.sendall(f"{mine}\n".encode())
        theirs = float(connection.makefile().readline())
    reading = Reading("pair", "pair", "pair/tcp", "", min(mine, theirs), "B/s", round=args["round"])
    return Outcome(readings=(reading,))


def carry_out(do: str, args: dict[str, Any]) -> Outcome:
    """Do what the engine asks for."""
    if do == "pair":
        return pair(args)
    if do not in MEASURED:
        return Outcome((Finding(do, Severity.PASS, "not part of this benchmark"),))
    metric, value = MEASURED[do]()
    reading = Reading(
        do, metric, f"{do}/small", "a core of this machine", value, "B/s", round=args.get("round", 0)
    )
    return Outcome((Finding(do, Severity.PASS, f"{do} was done"),), (reading,))


def small(argv: list[str]) -> int:
    """Serve until standard input ends, as the real child does."""
    answers = os.fdopen(int(argv[argv.index("--answers") + 1]), "w", buffering=1)

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    say(ready={"torch": "none", "kind": "cpu", "models": ["a core of this machine"]})
    for line in sys.stdin:
        order = json.loads(line)
        say(id=order["id"], begun=order["do"])
        try:
            outcome = carry_out(order["do"], order["args"])
        except OSError as error:
            say(id=order["id"], error=f"{type(error).__name__}: {error}", why="failed")
        else:
            say(id=order["id"], outcome=to_json(outcome))
    return 0


def main() -> int:
    """Be this node's child."""
    host, _, share = os.environ.get(SLOW, "").partition(" ")
    if share and host == os.environ["MLHPC_VET_HOST"]:
        brake(float(share))
    if os.environ.get(KIND) == "torch":
        return torch_child(sys.argv[1:])
    return small(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
