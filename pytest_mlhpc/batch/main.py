"""PAYLOAD. The batch: ``python -m pytest_mlhpc.batch.main PLAN`` does all runs of one plan on this node.

Worker lines go to standard output, everything else to standard error. Standard input is the lifeline: when it closes,
or on SIGTERM, everything ends at once. Exit code 0: every run came to its end, however it ended; 2: the plan cannot be
read; 143: the controller went away or asked to end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.batch.channel import running_payload
from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.batch.processes import become_subreaper
from pytest_mlhpc.batch.ranks import RankBook
from pytest_mlhpc.batch.relay import ControllerGone, Relay
from pytest_mlhpc.batch.server import RankServer
from pytest_mlhpc.batch.supervise import Supervisor
from pytest_mlhpc.launch import module_of
from pytest_mlhpc.results.schema import from_json, to_json

EXIT_PLAN = 2
EXIT_TOLD_TO_END = 128 + signal.SIGTERM

#: What a launcher above us would have set, and a rank of ours would take for its own place; and what is for this batch alone.
FOREIGN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "MLHPC_RANK",
    "MLHPC_SOCKETS",
)  # fmt: skip


class Signals:
    """Child and end signals as bytes on a pipe, so that one selector hears everything."""

    def __init__(self) -> None:
        self.wakeup, writing = os.pipe()
        for fd in (self.wakeup, writing):
            os.set_blocking(fd, False)
        self.told_to_end = False
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to interpret

    def _end(self, *_: Any) -> None:
        self.told_to_end = True

    def stop(self) -> bool:
        """Return whether a signal asked this batch to end."""
        return self.told_to_end


def main(arguments: List[str]) -> int:
    """Do all runs of the plan and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m pytest_mlhpc.batch.main PLAN", file=sys.stderr)  # noqa: T201 - a program's usage line
        return EXIT_PLAN
    path = Path(arguments[0]).absolute()
    try:
        plan = read_plan(path)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        print(f"the plan {path} cannot be used: {error}", file=sys.stderr)  # noqa: T201 - goes to the batch's log
        return EXIT_PLAN
    relay = Relay(os.dup(1))
    os.dup2(2, 1)  # whatever prints by mistake must not damage worker lines
    signals = Signals()
    problem = become_subreaper()
    if problem:
        print(f"orphans cannot be held: {problem}", file=sys.stderr)  # noqa: T201 - goes to the batch's log
    try:
        for run in plan.runs:
            do_run(plan, run, path, relay, signals)
    except ControllerGone:
        return EXIT_TOLD_TO_END
    return 0


def read_plan(path: Path) -> Plan:
    """Read plan.json strictly.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, no plan (SchemaError), of another protocol, or asks for more nodes than this one.
    """
    plan = from_json(Plan, json.loads(path.read_text(encoding="utf-8")), str(path))
    if plan.protocol != PROTOCOL:
        raise ValueError(
            f"protocol_mismatch: the plan speaks protocol {plan.protocol}, this payload {PROTOCOL}"
        )
    if any(run.nodes != 1 for run in plan.runs):
        raise ValueError("a run wants several nodes; this batch has one")
    return plan


def do_run(plan: Plan, run: RunPlan, path: Path, relay: Relay, signals: Signals) -> None:
    """Do one run and report it, whatever happens: started, progress, measurement or failed, and end.

    Raises:
        ControllerGone: nobody listens any more, or a signal said to end.
    """
    if signals.stop():
        raise ControllerGone
    directory = Path(plan.directory) / run.run_id
    book = RankBook(run)
    supervisor = Supervisor(book, directory, relay, signals.wakeup, signals.stop)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        server = RankServer(os.environ.get("MLHPC_SOCKETS", ""))
    except OSError as error:
        supervisor.no_room(error, directory)
    else:
        with contextlib.closing(server):
            try:
                argv, environment = launch(run, path, server.path)
            except (ImportError, AttributeError, ValueError) as error:
                book.fail("launch_failed", f"launcher {run.launcher!r}: {error}")
            else:
                supervisor.execute(argv, environment, server, behind=run.launcher != "plain")
    report(supervisor, relay)


def launch(run: RunPlan, plan_path: Path, socket_path: str) -> Tuple[List[str], Dict[str, str]]:
    """Ask the run's launcher for argument vector and environment.

    Raises:
        ImportError, AttributeError, ValueError: there is no such launcher, or it cannot start this run.
    """
    module = module_of(run.launcher)
    nodes = [os.uname().nodename]
    argv, environment = importlib.import_module(module).launch(
        run, nodes, rank_environment(run, plan_path, socket_path)
    )
    return list(argv), dict(environment)


def rank_environment(run: RunPlan, plan_path: Path, socket_path: str) -> Mapping[str, str]:
    """Return the environment of the run's processes: ours, the run's variables, and the way back to this batch."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    payload_path = environment.get("PYTHONPATH", "")
    environment.update(run.variables)
    if run.variables.get("PYTHONPATH") and payload_path:
        environment["PYTHONPATH"] = os.pathsep.join((payload_path, run.variables["PYTHONPATH"]))
    environment.update(
        MLHPC_PLAN=str(plan_path),
        MLHPC_RUN=run.run_id,
        MLHPC_NONCE=run.nonce,
        MLHPC_CHANNEL=socket_path,
        MLHPC_OUTPUT="launcher" if run.launcher == "plain" else "channel",
        PYTHONUNBUFFERED="1",  # the last words of a rank that is killed matter
    )
    return environment


def report(supervisor: Supervisor, relay: Relay) -> None:
    """Send measurement or failure, and the end. A `command` has no ranks that report: its end is all there is."""
    book = supervisor.book
    run = book.run
    body = None
    if run.workload == "command":
        relay.send(run, "started", {"protocol": PROTOCOL, "payload_sha256": running_payload()})
    else:
        body = measurement(book)
    trouble = book.trouble
    if trouble is not None:
        words = supervisor.last_words(trouble.rank) if trouble.quote else ""
        text = trouble.text + (f"; its last lines:\n{words}" if words else "")
        relay.send(
            run,
            "failed",
            {"outcome": trouble.outcome, "text": text, "log": supervisor.log_path(trouble.rank)},
        )
    elif body is not None:
        relay.send(run, "measurement", body)
    relay.send(run, "end", {"exit": book.exits(supervisor.launcher_exit)})


def measurement(book: RankBook) -> Optional[Mapping[str, Any]]:
    """Join all ranks' reports; where that fails the book knows why."""
    from pytest_mlhpc.results.combine import combine

    reports = book.reports() if book.trouble is None else []
    if book.trouble is not None:
        return None
    try:
        body: Dict[str, Any] = to_json(combine(book.run, reports))
        json.dumps(body, allow_nan=False)
    except ValueError as error:
        book.fail(getattr(error, "outcome", "metric_invalid"), f"the ranks' reports do not combine: {error}")
        return None
    return body


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
