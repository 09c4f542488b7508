"""A child without torch that does as MLHPC_SCRIPT says for this node: {"node2": {"child_hang": "gemm", "speed": 0.8}}."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from scripted_passive import act, host, script

from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Reading, Severity

#: Figures have a spread, else no bound would be more than nothing.
SPREAD = {f"node{number}": 1 + 0.004 * (number % 5 - 2) for number in range(1000)}


def rate(do: str) -> float:
    own = script()
    return 1e12 * SPREAD.get(host(), 1.0) * own.get("speed", own.get("slow", {}).get(do, 1.0))


def partner_of(args: dict) -> socket.socket:
    """Return the connection with the other one of a pair."""
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


def pair(args: dict) -> CheckOutcome:
    with partner_of(args) as connection:
        connection.settimeout(args["timeout_s"])
        connection.sendall(f"{rate('pair')} {host()} {args['secret']}\n".encode())
        theirs, partner, secret = (connection.makefile().readline() or f"nan nobody {args['secret']}").split()
    assert secret == args["secret"] != "", "both nodes of an exchange have the same secret"
    link = script().get("links", {}).get("-".join(sorted([host(), partner])), 1.0)
    value = link * min(rate("pair"), float(theirs))
    return CheckOutcome(
        readings=(Reading("pair", "pair", "pair/scripted", "", value, "B/s", round=args["round"]),)
    )


@contextlib.contextmanager
def alone(do: str):
    """Note when two children of one machine compute at once."""
    folder = os.environ.get("MLHPC_SCRIPT_FOLDER")
    if not folder or do == "pair":
        yield
        return
    with (Path(folder) / script().get("boot_id", "own-" + host())).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (Path(folder) / "collision").touch()
        yield


def misbehave(do: str) -> None:
    """Do what the script says of this work, beside what a check may do."""
    faults = {
        name.removeprefix("child_"): what for name, what in script().items() if name.startswith("child_")
    }
    act(faults, do)
    if faults.get("freeze_agent") == do:
        os.kill(os.getppid(), signal.SIGSTOP)
        threading.Event().wait()
    if faults.get("fail") == do:
        raise RuntimeError("no such thing here")


def carry_out(do: str, args: dict) -> CheckOutcome:
    misbehave(do)
    if do == "pair":
        return pair(args)
    time.sleep(script().get("takes", 0.01))  # the time that a real one would compute
    reading = Reading(do, "rate", f"{do}/scripted", "Test device", rate(do), "FLOP/s", round=args["round"])
    return CheckOutcome((Finding(do, Severity.PASS, f"{do} was done"),), (reading,))


def main() -> None:
    answers = os.fdopen(int(sys.argv[sys.argv.index("--answers") + 1]), "w", buffering=1)

    def say(**message) -> None:
        answers.write(json.dumps(message) + "\n")

    misbehave("start")
    if script().get("no_torch"):
        say(id=0, error="torch cannot be imported: there is none", why="no_torch")
        raise SystemExit(3)
    say(ready={"torch": "none", "kind": "cpu", "models": ["Test device"]})
    for line in sys.stdin:
        order = json.loads(line)
        number, do = order["id"], order["do"]
        say(id=number, begun=f"{do} part one")
        try:
            with alone(do):
                outcome = carry_out(do, order["args"])
            say(id=number, outcome=to_json(outcome))
        except Exception as error:  # noqa: BLE001 - the real one answers whatever was raised
            say(id=number, error=f"{type(error).__name__}: {error}", why="failed")


if __name__ == "__main__":
    main()
