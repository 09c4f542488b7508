"""One run of a plan, from its launcher's arguments to its last line, and the build that it needs before."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from pytest_mlhpc.node import processes
from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.agents.wire import key_of_run
from pytest_mlhpc.node.batch.output import LOG_CAP, ControllerLost, Lines
from pytest_mlhpc.node.batch.pod_stream import ARTIFACTS
from pytest_mlhpc.node.batch.ranks import RankBook
from pytest_mlhpc.node.batch.server import RankServer, RemoteServer
from pytest_mlhpc.node.batch.supervise import Server, Supervisor
from pytest_mlhpc.node.batch.warm import WarmRanks
from pytest_mlhpc.node.child_process import package_root
from pytest_mlhpc.node.cores import filled_on_node, on_node, waiting_variables
from pytest_mlhpc.node.files import make_private, own_folder, unwritten
from pytest_mlhpc.node.launch import AGENT, BATCH_NODE, HUB, PODS, SCHEDULER, find_launcher, needs_srun
from pytest_mlhpc.node.processes import (
    EXIT_TERMINATED,
    CappedLog,
    GrowthWatch,
    describe_exit,
    job_counters,
    say,
)
from pytest_mlhpc.node.protocol.channel import running_payload
from pytest_mlhpc.node.protocol.plan import PROTOCOL, BuildPlan, Plan, RunPlan, read_plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import ARCHIVE, artifact_archive, copy_files, link_files, staged_name

#: Lies in the folder of a build that is complete.
COMPLETE = ".complete"

#: Lines of the compiler's output that a failure shows, and most characters of them.
LINES, CHARACTERS = 20, 2000

#: Age of the folder of a build from which on nobody builds in it any more, in seconds: no run takes a week.
OLD_S = 7 * 86400.0

#: Starts the one process of a run and stays until nothing of it is left.
Execute = Callable[[Supervisor, RunPlan], None]
#: Makes the supervisor of a run in a folder.
Supervise = Callable[[RankBook, Path, Any], Supervisor]
#: Outcome and text.
Failure = Tuple[str, str]


class DiscardedRelay:
    """Discards what a run reports that is in no plan: a build, or the vetting of nodes."""

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send nothing."""

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Show nothing."""


def builds_folder(plan: Plan, *, pod: bool) -> Path:
    """Return the folder of all builds: beside the runs of all sessions, so that later ones find them; in a pod its own."""
    directory = Path(plan.directory)
    return directory / "builds" if pod else own_folder(directory.parents[2], "builds")


def with_builds(run: RunPlan, root: Path) -> RunPlan:
    """Return *run* with the folders of its builds in its arguments and variables, where these name them."""

    def filled(text: str) -> str:
        for build in run.builds:
            text = text.replace(f"{{{build.name}}}", str(root / build.key))
        return text

    variables = {name: filled(text) for name, text in run.variables.items()}
    return replace(run, argv=tuple(map(filled, run.argv)), variables=variables)


def build_all(
    plan: Plan, run: RunPlan, root: Path, supervise: Supervise, execute: Execute, *, pods: Sequence[str] = ()
) -> Optional[Failure]:
    """Build what *run* needs and is not there; return the failure (outcome, text) that the run is, or None.

    It is built in each of *pods*, the names of several on which the run starts processes: they see no common folder.

    Raises:
        ControllerLost: the batch has to end; nothing is left of a build that had begun.
    """

    def make(build: BuildPlan, alone: RunPlan, folder: Path) -> Optional[Failure]:
        return _supervised(build, supervise(RankBook(alone, pods), folder, DiscardedRelay()), alone, execute)

    for build in run.builds:
        if _complete(root / build.key) >= max(1, len(pods)):
            continue
        if build.before:
            text = "was made where pytest runs, before the job was submitted, and is not seen here"
            return "build_failed", f"the build {build.name} {text}: {root / build.key}"
        if pods:
            alone = build_run(run, build)
            failure = make(build, alone, Path(plan.directory) / alone.run_id)
        else:
            alone = _program(run, build, build.argv)
            failure = _make(
                plan, build, root / f"{build.key}.{run.nonce}", functools.partial(make, build, alone)
            )
        if failure is not None:
            return failure
        if pods:
            with contextlib.suppress(OSError):  # then the next run that needs it asks all pods again
                (root / build.key / COMPLETE).write_text(str(len(pods)), encoding="ascii")
    return None


def _complete(folder: Path) -> int:
    """Return in how many pods the build is complete whose folder this is; 1 where there are no pods, 0: it is to be made."""
    try:
        return max(1, int((folder / COMPLETE).read_bytes()))
    except ValueError:
        return 1
    except OSError:
        return 0


def _make(
    plan: Plan, build: BuildPlan, folder: Path, execute: Callable[[Path], Optional[Failure]]
) -> Optional[Failure]:
    """Build in *folder* by *execute*, and give it the name by which runs find it; return the failure, if it is one.

    Two batches may build the same at once, each in a folder of its own: the first that ends gives its folder the name.
    """
    root = folder.parent
    try:
        make_private(root)
        _remove_old(root)
        make_private(folder)
        staged = {".": str(Path(plan.directory) / staged_name(build.files))} if build.files else {}
        copy_files(staged, folder)
    except OSError as error:
        return unwritten(error), f"cannot write {error.filename or folder}: {error.strerror}"
    before = _contents(folder)
    try:
        failure = execute(folder)
        if failure is None and _contents(folder) == before:
            failure = "build_failed", f"{_named(build)} wrote nothing into its folder"
        if failure is None:
            (folder / COMPLETE).touch()
            with contextlib.suppress(OSError):  # another batch was first
                folder.rename(root / build.key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return failure


def _named(build: BuildPlan) -> str:
    return f"the build {build.name} ({' '.join(build.argv)[:200]})"


def _contents(folder: Path) -> Dict[str, Tuple[int, int]]:
    """Return size and time of change of each file that is no log of the build itself."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not (path.parent == folder and path.name in ("rank0.log", "errors.log")):
            status = path.stat()
            found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found


def _remove_old(root: Path) -> None:
    """Remove what batches left that were killed while they built: folders of builds without end, whatever they were of."""
    for folder in root.glob("*.*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def _program(run: RunPlan, build: BuildPlan, argv: Sequence[str], **changes: Any) -> RunPlan:
    """Return the run of the program that builds: within the time of *run*, with the variables of the build alone."""
    alone = {
        "launcher": "plain",
        "processes": 1,
        "files": {},
        "artifacts": (),
        "cwd": None,
        "warm": False,
        **changes,
    }
    return on_node(replace(run, argv=tuple(argv), variables=build.variables, **alone))


def build_run(run: RunPlan, build: BuildPlan) -> RunPlan:
    """Return the run that builds in each pod of *run*: of this module as a program, once in each.

    It is in no plan; both ends of a group of pods make it out of the plan.
    """
    argv = (sys.executable, "-m", "pytest_mlhpc.node.batch.runs", run.run_id, build.key)
    changes = {"run_id": f"{run.run_id}-{build.key}", "launcher": "podrun", "processes": run.nodes}
    return _program(run, build, argv, **changes)


def _supervised(
    build: BuildPlan, supervisor: Supervisor, alone: RunPlan, execute: Execute
) -> Optional[Failure]:
    """Run *alone*, which builds, as any run is: within its time, and ended with the batch; return the failure, if it is one."""
    execute(supervisor, alone)
    book, code = supervisor.book, supervisor.launcher_exit
    trouble = book.trouble
    if trouble is None and code == 0:
        return None
    rank = 0 if trouble is None or trouble.rank is None else trouble.rank
    if trouble is None or trouble.outcome in ("worker_exit", "worker_killed"):
        state, node = book.ranks.get(rank), book.node_of(rank)
        ended = state.exit if state is not None else code
        why = describe_exit(ended or 0) + (f" on {node}" if node else "")
    else:
        why = trouble.text
    lines = supervisor.last_lines(rank, LINES, CHARACTERS)
    said = f"; its last lines:\n{lines}" if lines and lines not in why else ""
    return "build_failed", f"{_named(build)}: {why}{said}"


#: What a launcher above us would have set, and a rank of ours would take for its own place; and what is for this batch alone.
FOREIGN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "MLHPC_RANK",
    "MLHPC_RANKS_FROM", "PET_NODE_RANK", SCHEDULER, BATCH_NODE, HUB, "MLHPC_SOCKETS",
)  # fmt: skip

#: How often a run is started at most when its port turns out to be taken.
STARTS = 2

#: How long a signal to this batch may come after one to the processes of a run, where a scheduler ends a whole job, in
#: seconds: it tells its nodes one after the other.
SIGNAL_LAG_S = 3.0


@dataclass(frozen=True)
class Site:
    """The allocation's nodes, which of them is ours, whether Slurm gave them, and whether stdin is our lifeline.

    Nodes that are pods are reached by ``hub``, the path of its socket, and this one at ``address``.
    """

    nodes: Tuple[str, ...]
    own: str
    slurm: bool = False
    lifeline: bool = True
    hub: str = ""
    address: str = ""
    pod: bool = False  #: the memory limit is this container's, and the kernel tells of it here
    warm: Optional[WarmRanks] = None  #: what forks ranks of short runs

    def forks(self, run: RunPlan) -> bool:
        """Return whether the ranks of *run* are forked here: those of a launcher that would start them on this node alone."""
        alone = run.launcher in ("plain", "torchrun") and run.workload != "command" and not run.wrapper
        return run.warm and alone and self.warm is not None and self.direct(run)

    def direct(self, run: RunPlan) -> bool:
        """Return whether the run's processes are all on this node, started by ourselves and not by Slurm."""
        if not self.slurm:
            return run.nodes == 1 or run.once
        alone = (run.nodes == 1 or run.once) and self.nodes[:1] == (self.own,)
        return alone and run.launcher in ("plain", "torchrun") and not needs_srun(run)

    @functools.cached_property
    def addresses(self) -> Tuple[str, ...]:
        """How other nodes may reach this one; asked once for all runs, as Slurm may have to be.

        Raises:
            NodesUnknown: there is no way.
        """
        return (self.address,) if self.address else nodes.reachable_as(self.own)


class EndSignals(Protocol):
    """What tells that this batch has to end."""

    wakeup: int  #: becomes readable when a signal came

    def stop(self) -> bool:
        """Return whether one has come that says so."""


def do_run(plan: Plan, run: RunPlan, path: Path, relay: Lines, signals: EndSignals, *, site: Site) -> None:
    """Do one run and report it, whatever happens: started, progress, measurement or failed, and end.

    Raises:
        ControllerLost: nobody listens any more, or a signal said to end.
    """
    directory = Path(plan.directory) / run.run_id
    if Path(f"{directory}.skip").exists():
        relay.send(run, "failed", {"outcome": "cancelled", "text": "no test waits for it any more"})
        relay.send(run, "end", {"exit": []})
        return
    began_ns, planned = time.time_ns(), run
    if run.builds and (failure := prepare(plan, run, path, signals, site)):
        relay.send(run, "started", {"protocol": PROTOCOL, "payload_sha256": running_payload()})
        relay.send(run, "failed", {"outcome": failure[0], "text": failure[1], "log": ""})
        relay.send(run, "end", {"exit": []})
        return
    if run.builds:
        run = with_builds(run, builds_folder(plan, pod=site.pod))
        began_ns = time.time_ns()
    run = replace(on_node(run), warm=site.forks(run))
    started = run.workload == "command"  # it has no ranks that would say so
    if started:
        relay.send(run, "started", {"protocol": PROTOCOL, "payload_sha256": running_payload()})
    for start in range(1, STARTS + 1):
        if signals.stop():
            raise ControllerLost
        good = site.nodes[: run.nodes]
        book = RankBook(run, () if site.direct(run) else good)
        book.started = started
        book.memory = memory_watch(site)
        supervisor = Supervisor(
            book, directory, relay, signals.wakeup, signals.stop, lifeline=site.lifeline, warm=site.warm
        )
        execute(supervisor, run, path, site)
        started = book.started
        if not (book.trouble and book.trouble.again) or start == STARTS:
            break
    if site.pod and run.artifacts and supervisor.book.trouble is None:
        send_artifacts(supervisor, relay)
    if (site.slurm or site.hub) and supervisor.broken_off:
        supervisor.await_signal(SIGNAL_LAG_S)
    report(supervisor, relay, began_ns, filled_on_node(planned, run))


def memory_watch(site: Site) -> Optional[Callable[[], bool]]:
    """Return what tells whether the memory limit of this pod or Slurm job was met from now on; None elsewhere."""
    if site.pod:
        return GrowthWatch().grown
    return GrowthWatch(job_counters()).grown if site.slurm else None


def prepare(plan: Plan, run: RunPlan, path: Path, signals: EndSignals, site: Site) -> Optional[Failure]:
    """Build what *run* needs; return the failure (outcome, text) that it is, or None.

    Raises:
        ControllerLost: nobody listens any more, or a signal said to end.
    """

    def supervise(book: RankBook, folder: Path, relay: Lines) -> Supervisor:
        return Supervisor(
            book, folder, relay, signals.wakeup, signals.stop, lifeline=site.lifeline, warm=site.warm
        )

    root = builds_folder(plan, pod=site.pod)
    pods = site.nodes[: run.nodes] if site.pod and site.hub and not site.direct(run) else ()
    return build_all(
        plan, run, root, supervise, lambda one, alone: execute(one, alone, path, site), pods=pods
    )


def send_artifacts(supervisor: Supervisor, relay: Lines) -> None:
    """Send the artifacts of a run in a pod, whose disk nobody else sees, as a stream of its own."""
    run, folder = supervisor.book.run, supervisor.directory
    log = CappedLog(folder / ARCHIVE, LOG_CAP)
    try:
        log.write(artifact_archive(folder, run.artifacts))
        relay.log(run, ARTIFACTS, log)
    except ValueError as error:
        supervisor.book.fail("output_limit", str(error))
    except OSError as error:
        supervisor.logs.no_room(error, folder)
    finally:
        log.close()


def execute(supervisor: Supervisor, run: RunPlan, path: Path, site: Site) -> None:
    """Start the run's processes and stay until nothing of them is left; the supervisor's book knows what came of it."""
    book, good = supervisor.book, site.nodes[: run.nodes]
    if len(good) < run.nodes:
        book.fail("unfit_nodes", f"the run wants {run.nodes} nodes, there are {len(good)}: {', '.join(good)}")
        return
    try:
        if site.pod:
            supervisor.directory.mkdir(parents=True, exist_ok=True)
        else:
            make_private(supervisor.directory)
        link_files(run, supervisor.directory.parent, supervisor.directory)
        server = listen(run, site)
    except OSError as error:
        supervisor.logs.no_room(error, supervisor.directory)
        return
    except nodes.NodesUnknown as error:
        book.fail("launch_failed", str(error))
        return
    with contextlib.closing(server):
        try:
            argv, environment = launch(run, path, server.channel, site)
        except (ImportError, AttributeError, ValueError, OSError, nodes.NodesUnknown) as error:
            book.fail("launch_failed", f"launcher {run.launcher!r}: {error}")
            return
        book.agents = AGENT in argv
        behind = run.launcher != "plain" or not site.direct(run)
        try:
            supervisor.execute(argv, environment, server, behind=behind)
        finally:
            if book.strangers:
                say(f"run {run.run_id}: {book.turned_away}")
            if site.slurm and supervisor.launcher_exit == -signal.SIGKILL:
                processes.end(os.environ.get("SLURM_JOB_ID", ""), run.run_id)


def listen(run: RunPlan, site: Site) -> Server:
    """Return where the run's ranks can reach us.

    Raises:
        OSError: no socket can be made.
        NodesUnknown: other nodes have no way to find this one.
    """
    key = key_of_run(run.run_id, run.secret)
    if site.direct(run):
        return RankServer(key, os.environ.get("MLHPC_SOCKETS", ""))
    alone = site.nodes[: run.nodes] == (site.own,)
    return RemoteServer(key, ("127.0.0.1",) if alone else site.addresses)


def launch(run: RunPlan, plan_path: Path, channel: str, site: Site) -> Tuple[List[str], Dict[str, str]]:
    """Ask the run's launcher for argument vector and environment.

    Raises:
        ImportError, AttributeError, ValueError: there is no such launcher, or it cannot start this run.
        NodesUnknown: the ranks could not find the first of them.
    """
    good = site.nodes[: run.nodes]
    environment = {**rank_environment(run, plan_path, channel), **place(run, good, site)}
    environment.update(waiting_variables(run, environment))
    argv, changed = find_launcher(run.launcher)(run, list(good), environment)
    return list(argv), dict(changed)


def place(run: RunPlan, good: Sequence[str], site: Site) -> Dict[str, str]:
    """Return the variables that tell a launcher where it is, and the ranks where they meet.

    Raises:
        NodesUnknown: the first node has no address.
    """
    found = {SCHEDULER: "slurm", BATCH_NODE: site.own} if site.slurm else {}
    if site.hub:
        found = {SCHEDULER: PODS, BATCH_NODE: site.own, HUB: site.hub}
    if run.started > 1:
        here = len(good) == 1 or not site.address
        found["MASTER_ADDR"] = nodes.master_address(good) if here else site.address
        found["MASTER_PORT"] = str(nodes.master_port(good[0], site.own))
    return found


def rank_environment(run: RunPlan, plan_path: Path, channel: str) -> Mapping[str, str]:
    """Return the environment of the run's processes: ours, the run's variables, and the way back to this batch."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    inherited = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment.update(run.variables)
    own = run.variables.get("PYTHONPATH", "")
    if own or run.packages:  # its own are behind what the worker is made of, and before what the shell has
        payload = [path for path in inherited if path == package_root()]
        others = [path for path in inherited if path != package_root()]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*run.packages, *payload, own, *others)))
    environment.update(
        MLHPC_PLAN=str(plan_path),
        MLHPC_RUN=run.run_id,
        MLHPC_SECRET=run.secret,
        MLHPC_CHANNEL=channel,
        MLHPC_OUTPUT="launcher" if run.launcher == "plain" else "channel",
        PYTHONUNBUFFERED="1",  # the last output of a rank that is killed matters
    )
    return environment


def report(supervisor: Supervisor, relay: Lines, began_ns: int, filled: Mapping[str, Any]) -> None:
    """Send measurement or failure, and the end with its times and what was *filled* into arguments and variables. Of a `command`, whose ranks do not report, that is all."""
    book = supervisor.book
    run = book.run
    body = None if run.workload == "command" else measurement(book)
    trouble = book.trouble
    if trouble is not None:
        last_lines = supervisor.logs.last_lines(trouble.rank) if trouble.quote else ""
        text = "; ".join(filter(None, (trouble.text, book.turned_away)))
        text += f"; its last lines:\n{last_lines}" if last_lines else ""
        log = supervisor.logs.path(trouble.rank)
        failed = {"outcome": trouble.outcome, "text": text, "log": log, "nodes": list(trouble.nodes)}
        relay.send(run, "failed", failed)
    elif body is not None:
        relay.send(run, "measurement", body)
    entry = {**filled, "started_ns": began_ns, "ended_ns": time.time_ns(), "host": os.uname().nodename}
    relay.send(run, "end", {"exit": book.exits(supervisor.launcher_exit), **entry})


def measurement(book: RankBook) -> Optional[Mapping[str, Any]]:
    """Join all ranks' reports; where that fails the book knows why."""
    from pytest_mlhpc.node.protocol.combine import combine

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


def main(arguments: List[str], environ: Mapping[str, str]) -> int:
    """Make in this pod the build whose run and key *arguments* are, unless it is there; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # what it had begun is removed
    run_id, key = arguments
    plan = read_plan(Path(environ["MLHPC_PLAN"]), own_disk=True)
    run = next(one for one in plan.runs if one.run_id == run_id)
    build = next(one for one in run.builds if one.key == key)
    root, codes = builds_folder(plan, pod=True), [0]
    argv = _program(run, build, build.argv).argv

    def execute(folder: Path) -> Optional[Failure]:
        done = subprocess.run(argv, cwd=str(folder), stdin=subprocess.DEVNULL, check=False)
        codes.append(done.returncode)
        return ("build_failed", "") if done.returncode else None

    if _complete(root / key):
        return 0
    try:
        failure = _make(plan, build, root / f"{key}.{run.nonce}", execute)
    except (OSError, ValueError) as error:
        failure = "build_failed", f"cannot start {build.argv[0]!r}: {getattr(error, 'strerror', '') or error}"
    if failure is None:
        return 0
    sys.stderr.write(failure[1])
    return codes[-1] if codes[-1] > 0 else 1 if not codes[-1] else 128 - codes[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
