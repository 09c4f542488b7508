"""The batch: ``python -m pytest_mlhpc.node.batch.main [--lines FOLDER | --more] PLAN`` does all runs of one plan.

Without ``--lines`` it serves this node alone: worker lines go to standard output, and standard input is the lifeline:
when it closes, or on SIGTERM, everything ends at once. With ``--more`` the controller may send the paths of further plans there, a line
each, once all runs of the plan before have ended: what was imported for the runs of one serves those of the next
(``node/batch/warm.py``). With ``--lines`` it is the first node's part of a Slurm job (of other schedulers: ``job_nodes.py``): lines
go to files in FOLDER (``node/batch/output.py``), ranks may be on all nodes of the job, and nobody holds a pipe. Everything else
goes to standard error.

Exit code 0: every run came to its end, however it ended, or another job does them; 2: the plan cannot be read; 70: a defect of ours; 71:
the nodes cannot be found out; 74: lines cannot be written; 75: Slurm started the job again after its batch had begun;
78: another user could have changed the plan; 143: the controller went away, or SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Mapping, Optional, Protocol, Tuple, Union

from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.batch import output
from pytest_mlhpc.node.batch.output import CannotWrite, ControllerLost, Lines, Relay
from pytest_mlhpc.node.batch.program_requests import hold
from pytest_mlhpc.node.batch.runs import Site, do_run
from pytest_mlhpc.node.batch.vetting import vet
from pytest_mlhpc.node.batch.warm import WarmRanks, warm_ranks
from pytest_mlhpc.node.files import EXIT_UNSAFE, UnsafeDirectoryError, open_private
from pytest_mlhpc.node.processes import EXIT_TERMINATED, raise_file_limit, reap, say
from pytest_mlhpc.node.protocol.plan import HELD, VETTED, Plan, read_plan

#: The log of a batch, in the folder of its plan.
LOG = "batch.log"

EXIT_PLAN = 2
EXIT_BUG = (
    70  #: EX_SOFTWARE of sysexits.h (4.3BSD); also what an exception that nobody expected leaves in ``.over``
)
EXIT_NODES = 71  #: EX_OSERR
EXIT_CANNOT_WRITE = 74  #: EX_IOERR
EXIT_REQUEUED = 75  #: EX_TEMPFAIL


class BatchSignals:
    """Child and end signals as bytes on a pipe, so that one selector hears everything."""

    def __init__(self) -> None:
        self.wakeup, writing = os.pipe()
        for fd in (self.wakeup, writing):
            os.set_blocking(fd, False)
        self.terminated = False
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to interpret

    def _end(self, *_: Any) -> None:
        self.terminated = True

    def stop(self) -> bool:
        """Return whether a signal asked this batch to end."""
        return self.terminated


def main(arguments: List[str], environ: Optional[Mapping[str, str]] = None) -> int:
    """Do all runs of the plan and return the exit code."""
    more = arguments[:1] == ["--more"]
    folder, path = paths_of(arguments[more:])
    if path is None:
        say("usage: python -m pytest_mlhpc.node.batch.main [--lines FOLDER | --more] PLAN")
        return EXIT_PLAN
    plan = load_plan(path)
    if isinstance(plan, int):
        return plan
    signals = BatchSignals()
    raise_file_limit(max((run.ranks for run in plan.runs), default=1))
    with warm_ranks() as warm:
        if folder is not None:
            return in_job(plan, path, folder, signals, os.environ if environ is None else environ, warm=warm)
        relay = Relay(os.dup(1))
        os.dup2(2, 1)  # whatever prints by mistake must not damage worker lines
        site = Site((os.uname().nodename,), os.uname().nodename, warm=warm)
        code = do_all(plan, path, relay, signals, site)
        return do_more(relay.fd, signals, site) if more and code == 0 else code


def do_more(output: int, signals: BatchSignals, site: Site) -> int:
    """Do further plans, whose paths come on standard input, until that closes or a signal says to end; return the exit code.

    Each is done as the first one was: in its folder, with a log of its own there.
    """
    waiting = bytearray()
    while True:
        while b"\n" not in waiting:
            ready = select.select([0, signals.wakeup], [], [])[0]
            if signals.wakeup in ready:
                _drain(signals, site)
            if signals.stop():
                return EXIT_TERMINATED
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return 0
                waiting += data
        line, _, waiting = waiting.partition(b"\n")
        path = Path(os.fsdecode(bytes(line)))
        try:
            _move_to(path.parent)
        except OSError as error:
            say(f"cannot begin in {path.parent}: {error.strerror}")
            return EXIT_CANNOT_WRITE
        plan = load_plan(path)
        code = plan if isinstance(plan, int) else do_all(plan, path, Relay(output), signals, site)
        if code:
            return code


def _move_to(folder: Path) -> None:
    """Make *folder* the working directory, and write what is printed to a log there.

    Raises:
        OSError: it is gone, or the log cannot be made or is not this user's alone.
    """
    os.chdir(folder)
    log = open_private(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _drain(signals: BatchSignals, site: Site) -> None:
    """Take the signals that have come, and the exits of children while no run is under way."""
    with contextlib.suppress(BlockingIOError):
        os.read(signals.wakeup, 4096)
    ended = reap()
    if site.warm is not None:
        site.warm.note_exits(ended)


def load_plan(path: Path) -> Union[Plan, int]:
    """Return the plan, or the exit code where it cannot be used."""
    try:
        return read_plan(path)
    except UnsafeDirectoryError as error:
        say(f"{error.filename}: {error.strerror}")
        return EXIT_UNSAFE
    except (OSError, ValueError, TypeError, RecursionError) as error:
        say(f"the plan {path} cannot be used: {error}")
        return EXIT_PLAN


class JobAround(Protocol):
    """The job around a batch, where a definition tells of its scheduler (``node/batch/job_nodes.py``)."""

    @property
    def id(self) -> str:
        """The scheduler's id of it, empty where that is not known."""

    def hosts(self) -> Tuple[str, ...]:
        """Return its hosts, this one first.

        Raises:
            NodesUnknown: the scheduler does not tell.
        """

    def do_all(self, relay: Lines) -> int:
        """Do the plan's runs on them; return the exit code."""


def in_job(  # noqa: PLR0917 - from the plan to what tells of the job
    plan: Plan,
    path: Path,
    folder: Path,
    signals: BatchSignals,
    environ: Mapping[str, str],
    job: Optional[JobAround] = None,
    warm: Optional[WarmRanks] = None,
) -> int:
    """Do all runs on the nodes of the job around us, Slurm's without *job*, with lines in *folder*; return the exit code."""
    try:
        lines = output.LinesFolder(folder, plan.allocation_id)
    except ValueError as error:
        say(f"the plan {path} cannot be used: {error}")
        return EXIT_PLAN
    if lines.holder is not None:
        return _refused(lines, environ)
    os.dup2(2, 1)
    code = EXIT_BUG
    try:
        try:
            found = nodes.allocated(environ) if job is None else job.hosts()
            relay = Relay(lines.open(found, environ.get("SLURM_JOB_ID", "") if job is None else job.id))
            if job is None:
                slurm = "SLURM_JOB_ID" in environ
                site = Site(found, nodes.own_node(environ), slurm=slurm, lifeline=False, warm=warm)
                code = do_all(plan, path, relay, signals, site)
            else:
                code = job.do_all(relay)
        except nodes.NodesUnknown as error:
            code = EXIT_NODES
            say(f"the nodes of this allocation are not known: {error}")
        except output.AlreadyStarted:
            code = _refused(lines, environ)
        except OSError:
            code = EXIT_CANNOT_WRITE
            raise
        finally:
            code = lines.close(code, EXIT_CANNOT_WRITE)
    except OSError as error:
        say(f"cannot write {error.filename or folder}: {error.strerror or error}")
        return EXIT_CANNOT_WRITE
    return code


def _refused(lines: output.LinesFolder, environ: Mapping[str, str]) -> int:
    """Say why the batch of a job does nothing if one of its allocation has begun before; return the exit code.

    Slurm may start a job again, or have taken a submission that seemed lost and was repeated: then there are two jobs.
    """
    holder = lines.holder
    if environ.get("SLURM_RESTART_COUNT", "0") != "0" and holder == environ.get("SLURM_JOB_ID", ""):
        say("this job was requeued after its batch had begun: half a run is no result, nothing is done twice")
        return EXIT_REQUEUED
    who = f"job {holder}" if holder else "another job"
    say(f"{who} has already begun with the runs of this allocation; this job does nothing")
    return 0


def do_all(plan: Plan, path: Path, relay: Lines, signals: BatchSignals, site: Site) -> int:
    """Vet the nodes if that is wanted, and do the plan's runs in order on those that are fit; return the exit code."""
    try:
        vetted = vet(plan, path, relay, signals, site=site)
        if not vetted.trouble:
            site = replace(site, nodes=vetted.nodes)
        for run in plan.runs:
            if vetted.trouble and run.workload != VETTED:
                continue  # it was reported already
            if run.workload == VETTED:
                relay.send(run, "end", {"exit": []})
            elif run.workload == HELD:
                hold(plan, run, relay, signals, site=site)
            else:
                do_run(plan, run, path, relay, signals, site=site)
    except CannotWrite as error:
        say(f"worker lines of the allocation {plan.allocation_id} cannot be written: {error}")
        return EXIT_CANNOT_WRITE
    except ControllerLost:
        return EXIT_TERMINATED
    return 0


def paths_of(arguments: List[str]) -> Tuple[Optional[Path], Optional[Path]]:
    """Return the folder for lines, if there is to be one, and the plan's path; the latter is None for a wrong usage."""
    if len(arguments) == 3 and arguments[0] == "--lines":
        return Path(arguments[1]).absolute(), Path(arguments[2]).absolute()
    if len(arguments) == 1 and not arguments[0].startswith("--"):
        return None, Path(arguments[0]).absolute()
    return None, None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
