"""The batch of a job whose scheduler a definition describes: ``python -m pytest_mlhpc.node.batch.job_nodes --lines FOLDER PLAN``.

It runs on one of the job's nodes, which is the first. With several nodes the process divides in two: the child is the batch
(``node/batch/main.py``), its parent starts an agent (``node/batch/pod.py``) on each other node by the scheduler's own command. Then the nodes
are used as pods are. The parent is apart as a batch ends all that is below it after each run.

Exit codes are those of ``node/batch/main.py``; 71 also where the nodes did not find each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.agents.nodes import NodesUnknown, reachable_as, resolve
from pytest_mlhpc.node.batch.main import (
    EXIT_BUG,
    EXIT_CANNOT_WRITE,
    EXIT_PLAN,
    BatchSignals,
    do_all,
    in_job,
    load_plan,
    paths_of,
)
from pytest_mlhpc.node.batch.output import Lines
from pytest_mlhpc.node.batch.pod import give_up, missing_pods
from pytest_mlhpc.node.batch.pod_hub import SHARED, PodHub, PodPlace
from pytest_mlhpc.node.batch.runs import Site
from pytest_mlhpc.node.files import open_private
from pytest_mlhpc.node.processes import (
    EXIT_TERMINATED,
    become_subreaper,
    describe_exit,
    last_lines,
    raise_file_limit,
    say,
)
from pytest_mlhpc.node.protocol.plan import JobRules, Plan

#: How long the agents of one job may take to find the first node, in seconds: its nodes are there, an interpreter starts.
MEET_S = 180.0

#: How long what started agents may take to end once the batch has, and then after SIGTERM, in seconds.
END_S = 8.0

#: The file with the variables of the batch, in the folder of its plan, for the agents.
ENVIRONMENT = "environment.json"

#: Arguments that no shell changes: what starts a program on another node may join its arguments for one (qrsh(1), ssh(1)).
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")

#: Most bytes of a file with the names of hosts.
_MOST_BYTES = 1 << 20


def job_hosts(rules: JobRules, environ: Mapping[str, str]) -> Tuple[str, ...]:
    """Return the hosts of the job around us, this one first.

    Raises:
        NodesUnknown: the scheduler's file cannot be read, names no host, or not this one.
    """
    given = environ.get(rules.hosts, "")
    if not given:
        return (os.uname().nodename,)
    text, place = given, f"the variable {rules.hosts}"
    if rules.in_file:
        place = f"{given} ({rules.hosts})"
        try:
            with open(given, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a path of any form
                text = file.read(_MOST_BYTES)
        except (OSError, ValueError) as error:
            raise NodesUnknown(
                f"{place} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
    found = list(dict.fromkeys(one.group("host") for one in re.finditer(rules.host, text, re.MULTILINE)))
    if not found:
        lines = last_lines(text.encode("utf-8", "replace"))
        raise NodesUnknown(
            f"hosts.host of the definition, {rules.host!r}, matches nothing in {place}; its last lines:\n{lines}"
        )
    own = own_host(found)
    if not own:
        raise NodesUnknown(
            f"this host, {os.uname().nodename}, is none of those in {place}: {', '.join(found[:20])}"
        )
    return (own, *(host for host in found if host != own))


def own_host(hosts: Sequence[str]) -> str:
    """Return which of *hosts* this one is: by its name, its name without domain, or its addresses; empty: none."""
    name = os.uname().nodename
    short = name.partition(".")[0]
    exact = [host for host in hosts if host == name] or [
        host for host in hosts if host.partition(".")[0] == short
    ]
    if exact:
        return exact[0]
    own = set(resolve(name))
    return next((host for host in hosts if own & set(resolve(host))), "")


@dataclass
class HostsJob:
    """The job around this batch. ``channel`` leads to the parent, which starts agents; None: the job has one node."""

    plan: Plan
    path: Path
    rules: JobRules
    signals: BatchSignals
    environ: Mapping[str, str]
    channel: Optional[socket.socket]
    _hosts: Tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The scheduler's id of the job."""
        return self.environ.get(self.rules.id, "")

    def hosts(self) -> Tuple[str, ...]:
        """Return its hosts, this one first. Raises as :func:`job_hosts`."""
        self._hosts = job_hosts(self.rules, self.environ)
        return self._hosts

    def do_all(self, relay: Lines) -> int:
        """Do the plan's runs on them; return the exit code."""
        hosts = self._hosts
        os.environ["MLHPC_NODE"] = hosts[0]
        if len(hosts) == 1 or self.channel is None:
            site = Site(hosts[:1], hosts[0], lifeline=False)
            return do_all(self.plan, self.path, relay, self.signals, site)
        folder = tempfile.mkdtemp(prefix="mlhpc-")
        try:
            return self._lead(relay, folder)
        except NodesUnknown as error:
            return give_up(self.plan, relay, str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _lead(self, relay: Lines, folder: str) -> int:
        hosts, code = self._hosts, EXIT_BUG
        work = Path(self.plan.directory)
        place = PodPlace(
            len(hosts), 0, hosts[0], "", hosts[0], work, work, port=0, meet_s=MEET_S, shared=True
        )
        os.environ["MLHPC_SOCKETS"] = folder
        address = reachable_as(hosts[0])[0]
        hub = PodHub(self.plan, place, folder, os.environ)
        try:
            leader = f"[{address}]:{hub.port}" if ":" in address else f"{address}:{hub.port}"
            try:
                self._ask_for_agents(leader)
            except (OSError, ValueError) as error:
                code = give_up(self.plan, relay, f"agents cannot be started on other nodes: {error}")
                return code
            troubles: List[str] = []
            hub.wait(place.meet_s, lambda: self.signals.stop() or self._trouble(troubles))
            if self.signals.stop():
                code = EXIT_TERMINATED
            elif hub.missing:
                text = "; ".join(troubles) or missing_pods(hub, place)
                code = give_up(
                    self.plan, relay, f"{self.rules.title} did not start an agent on each node: {text}"
                )
            else:
                site = Site(hub.labels, place.label, lifeline=False, hub=hub.path, address=address)
                code = do_all(self.plan, self.path, relay, self.signals, site)
        finally:
            hub.close(code)
        return code

    def _ask_for_agents(self, leader: str) -> None:
        """Write down the variables of this batch, and ask the parent to start agents.

        Raises:
            OSError: they cannot be written, or the parent is gone.
            ValueError: an argument is not plain.
        """
        assert self.channel is not None  # noqa: S101 - for the type checker
        path = self.path.parent / ENVIRONMENT
        descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(dict(os.environ), file)
            file.flush()
            os.fsync(file.fileno())
        commands = {
            host: start_argv(self.rules.start, host, self._variables(rank, leader, path), str(self.path))
            for rank, host in enumerate(self._hosts)
            if rank
        }
        self.channel.sendall(json.dumps(commands).encode() + b"\n")
        self.channel.setblocking(False)

    def _variables(self, rank: int, leader: str, environment: Path) -> Dict[str, str]:
        host = self._hosts[rank]
        found = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(name)}
        return {
            **found,
            SHARED: str(environment),
            "MLHPC_PODS": str(len(self._hosts)),
            "MLHPC_POD_RANK": str(rank),
            "MLHPC_POD_NAME": host,
            "MLHPC_NODE_NAME": host,
            "MLHPC_LEADER": leader,
            "MLHPC_MEET_S": f"{MEET_S:.0f}",
        }

    def _trouble(self, troubles: List[str]) -> bool:
        """Return whether an agent has ended before it came; add what the parent says of it to *troubles*."""
        assert self.channel is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BlockingIOError):
            data = self.channel.recv(1 << 16)
            troubles += [json.loads(line) for line in data.splitlines()]
        return bool(troubles)


def start_argv(start: Sequence[str], host: str, variables: Mapping[str, str], plan: str) -> List[str]:
    """Return the arguments that start the agent of *host*.

    Raises:
        ValueError: one of them could mean something else to a shell.
    """
    agent = ["env", *(f"{name}={value}" for name, value in variables.items())]
    agent += [sys.executable, "-m", "pytest_mlhpc.node.batch.pod", plan]
    for word in (host, *agent):
        if not _PLAIN.fullmatch(word):
            raise ValueError(f"{word!r:.300} holds a character that a shell may change; choose a plain path")
    return [*(word.replace("{host}", host) for word in start), *agent]


class Starter:
    """The parent: starts agents when the batch asks for them, and stays until the batch has ended."""

    def __init__(self, batch: int, channel: socket.socket, folder: Path) -> None:
        self._batch, self._channel, self._folder = batch, channel, folder
        self._agents: Dict[int, Tuple[str, subprocess.Popen[bytes]]] = {}
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _: self._pass_on(received))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _pass_on(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._batch, signal.SIGTERM if number == signal.SIGHUP else number)

    def stay(self) -> int:
        """Return the exit code of the batch, once it and all agents that were started have ended."""
        with self._channel.makefile("r", encoding="utf-8") as file:
            asked = file.readline()  # empty: it has ended, or needs none
        for host, argv in (json.loads(asked) if asked else {}).items():
            self._start(host, argv)
        while True:
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            if pid == self._batch:
                break
            if pid in self._agents:
                host, process = self._agents.pop(pid)
                process.returncode = code
                self._tell(host, describe_exit(code))
        self._end()
        return 128 - code if code < 0 else code

    def _log(self, host: str) -> Path:
        return self._folder / f"agent-{host}.log"

    def _start(self, host: str, argv: List[str]) -> None:
        try:
            log = open_private(self._log(host), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(log, "wb") as file:
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        except (OSError, ValueError) as error:
            self._tell(host, f"cannot start {argv[0]!r}: {getattr(error, 'strerror', None) or error}")
            return
        self._agents[process.pid] = (host, process)

    def _tell(self, host: str, what: str) -> None:
        """Tell the batch that an agent has ended, which matters while it waits for it."""
        lines = ""
        with contextlib.suppress(OSError):
            lines = last_lines(self._log(host).read_bytes()[-4096:])
        text = f"{host}: it {what}" + (f"; its last lines:\n{lines}" if lines else "")
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(text).encode() + b"\n")

    def _end(self) -> None:
        """Wait for the agents, which the batch has told to end; end those that do not."""
        for number in (signal.SIGTERM, signal.SIGKILL, 0):
            until = time.monotonic() + END_S
            while self._agents and time.monotonic() < until:
                ended = [pid for pid, (_, process) in self._agents.items() if process.poll() is not None]
                for pid in ended:
                    del self._agents[pid]
                time.sleep(0.05)
            for _, process in self._agents.values():
                process.send_signal(number)


def main(arguments: List[str], environ: Optional[Mapping[str, str]] = None) -> int:
    """Do all runs of the plan on the nodes of the job around us; return the exit code."""
    folder, path = paths_of(arguments)
    if path is None or folder is None:
        say("usage: python -m pytest_mlhpc.node.batch.job_nodes --lines FOLDER PLAN")
        return EXIT_PLAN
    plan = load_plan(path)
    if isinstance(plan, int):
        return plan
    if plan.job is None:
        say(f"the plan {path} does not say how the job's nodes are known")
        return EXIT_PLAN
    channel = None
    if plan.nodes + plan.spares > 1:
        channel, other = socket.socketpair()
        batch = os.fork()
        if batch:
            channel.close()
            return Starter(batch, other, path.parent).stay()
        other.close()
    signals = BatchSignals()
    raise_file_limit(max((run.ranks for run in plan.runs), default=1))
    problem = become_subreaper()
    if problem:
        say(f"orphaned processes cannot be adopted: {problem}")
    job = HostsJob(plan, path, plan.job, signals, os.environ if environ is None else environ, channel)
    try:
        return in_job(plan, path, folder, signals, job.environ, job)
    except OSError as error:
        say(f"cannot write {error.filename or folder}: {error.strerror or error}")
        return EXIT_CANNOT_WRITE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
