"""The child of a made-up node: torch's own one, or a small one without torch.

With torch's, a slow processor is made by stopping the whole process for a share of every 5 ms: whatever it computes, copies or sends
takes as much longer. The small one stands in for it where fifty vettings must fit into minutes, and on a machine that others
use: its figures of computing are drawn with the spread of healthy nodes, and its exchanges are real bytes through TCP at a
line rate of its own, both smaller on the slow node.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from typing import Any

from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Reading, Severity
from pytest_mlhpc.node.vet.load.main import main as torch_child

#: The slow node's host and the share of time for which it stands still: "node3 0.2". And "torch" or "small".
SLOW, KIND = "MLHPC_BENCH_SLOW", "MLHPC_BENCH_CHILD"

#: In seconds: short against anything that is timed, so that a median sees it too.
PERIOD_S = 0.005

#: The small child's line in bytes per second, well below what this machine can do, and the bytes that are sent at once.
LINE, PIECE = 200e6, 256 << 10

#: Spread of healthy nodes' figures, as in the simulation of the rules.
SPREAD = 0.015

#: Quantities that the small child knows, and how long it takes for each, in seconds.
DRAWN, TAKES_S = ("gemm", "memory"), 0.02


def brake(share: float) -> None:
    """Have another process stop this one for *share* of the time, until it ends."""
    mine = os.getpid()
    if os.fork():
        return
    die_with_parent(mine)
    os.closerange(0, 256)  # whoever waits for the end of a pipe of the child's must not wait for this one
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    while os.getppid() == mine:
        os.kill(mine, signal.SIGSTOP)
        time.sleep(share * PERIOD_S)
        os.kill(mine, signal.SIGCONT)
        time.sleep((1 - share) * PERIOD_S)
    os._exit(0)


def slowness() -> float:
    """Return the share by which this node is slow."""
    host, _, share = os.environ.get(SLOW, "").partition(" ")
    return float(share) if share and host == os.environ["MLHPC_VET_HOST"] else 0.0


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


def _send(connection: socket.socket, size: int) -> None:
    """Send *size* bytes at the line rate: each piece at its time, or at once where that has gone by."""
    line, piece = LINE * (1 - slowness()), bytes(PIECE)
    begun = time.perf_counter()
    for sent in range(0, size, PIECE):
        time.sleep(max(0.0, begun + (sent + PIECE) / line - time.perf_counter()))
        connection.sendall(piece[: size - sent])


def _exchange(connection: socket.socket, size: int) -> float:
    """Send and receive *size* bytes at the same time; return the seconds."""
    begun = time.perf_counter()
    sender = threading.Thread(target=_send, args=(connection, size))
    sender.start()
    room, left = bytearray(PIECE), size
    while left:
        got = connection.recv_into(room, min(left, PIECE))
        if not got:
            raise ConnectionError("the partner has gone")
        left -= got
    sender.join()
    return time.perf_counter() - begun


def pair(args: dict[str, Any]) -> CheckOutcome:
    """Exchange bytes with the partner as often as asked; the slower side's median counts."""
    with _meet(args) as connection:
        connection.settimeout(args["timeout_s"])
        size = int(args["bytes"])
        seconds = [_exchange(connection, size) for _ in range(1 + int(args["rounds"]))][1:]
        mine = size / statistics.median(seconds)
        connection.sendall(f"{mine}\n".encode())
        theirs = float(connection.makefile().readline())
    reading = Reading("pair", "pair", "pair/tcp", "", min(mine, theirs), "B/s", round=args["round"])
    return CheckOutcome(readings=(reading,))


def carry_out(do: str, args: dict[str, Any]) -> CheckOutcome:
    """Do what the engine asks for."""
    if do == "pair":
        return pair(args)
    if do not in DRAWN:
        return CheckOutcome((Finding(do, Severity.PASS, "not part of this benchmark"),))
    time.sleep(TAKES_S)
    value = 1e9 * random.gauss(1 - slowness(), SPREAD)
    reading = Reading(do, do, f"{do}/drawn", "a made-up device", value, "B/s", round=args.get("round", 0))
    return CheckOutcome((Finding(do, Severity.PASS, f"{do} was done"),), (reading,))


def small(argv: list[str]) -> int:
    """Serve until standard input ends, as the real child does."""
    answers = os.fdopen(int(argv[argv.index("--answers") + 1]), "w", buffering=1)

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    say(ready={"torch": "none", "kind": "cpu", "models": ["a made-up device"]})
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
    if os.environ.get(KIND) != "torch":
        return small(sys.argv[1:])
    if slowness():
        brake(slowness())
    return torch_child(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
