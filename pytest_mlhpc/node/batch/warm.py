"""Warm ranks: a process that has imported torch forks the ranks of short runs, so that each does not import it again.

Both ends are here. :class:`WarmRanks` is the batch's; run as ``python -m pytest_mlhpc.node.batch.warm FD`` the module is the warm
process. It imports what ranks import, opens no device, starts no thread, and then forks the ranks of a run for each request. A rank is
forked twice: its parent ends at once, so that it becomes a child of the batch (a subreaper), which learns of its end as of a
rank that it started itself. The warm process dies with its batch, and a new one is made after its death.

The batch forks ranks on its own node alone: on `local`, in a pod, and in a Slurm job's batch step, where a rank that it starts
itself has all that the job has. Several ranks need no torchrun: they meet at rank 0, as those of srun do.

A rank that is forked finds what a fresh interpreter would: the variables, the working directory, the output and the random
numbers are its own. Libraries read many variables when they are loaded, so a warm process serves one environment alone: the
same interpreter, cores and variables but for those by which a batch tells a rank of its run. ASLR and the seed of Python's
hashes are chosen once for each warm process.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import become_subreaper, die_with_parent, say
from pytest_mlhpc.node.spawn import rank_variables

#: Variables by which a batch tells a rank of its run; all others are the same for all ranks of a warm process.
OF_RUN = (
    "MLHPC_PLAN",
    "MLHPC_RUN",
    "MLHPC_SECRET",
    "MLHPC_CHANNEL",
    "MLHPC_OUTPUT",
    "MASTER_ADDR",
    "MASTER_PORT",
)

#: What torchrun tells its ranks beside their places, where all are on one node (torch 2.0 to 2.13:
#: ``torch/distributed/elastic/agent/server/local_elastic_agent.py``); a record shows the last one.
AS_TORCHRUN = {"GROUP_RANK": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

#: Set for a rank that was forked, to the pid of the warm process; its record says that it was.
FORKED = "MLHPC_FORKED"

#: What a rank is, and what is imported before: as little as all of them need. Not ``torch._dynamo``, whose stand-in
#: (``node/worker/main.py``) a rank puts there itself. The payload is a zip file, from which Python compiles a module anew in each process:
#: that of the trainings and of what describes them took 0.1 s of processor time of each rank. The last one is of torch: it needs it, and
#: with it sympy, for shapes of tensors without values, from which a rank counts operations. That took a quarter of a second.
RANK = "pytest_mlhpc.node.worker.main"
TRAININGS = ("cosmoflow", "deepcam", "language_model", "resnet50", "optimizers")
IMPORTED = (
    "torch",
    "pytest_mlhpc.node.protocol.channel",
    "pytest_mlhpc.node.worker.rank",
    "pytest_mlhpc.node.worker.data.source",
    "pytest_mlhpc.node.worker.workloads.catalogue",
    *(f"pytest_mlhpc.node.worker.workloads.{name}" for name in TRAININGS),
    "torch.fx.experimental.symbolic_shapes",
)

#: How long the warm process may take to vanish after SIGKILL before its batch goes on, in seconds.
ENDS_S = 1.0

#: Longest message between batch and warm process, in bytes.
MOST_BYTES = 1 << 16

#: So many deaths in a row before the first rank mean that this environment cannot be imported ahead.
MOST_DEATHS = 2

#: Device files whose being open means that a driver was initialised, which no child of a fork may use.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


@dataclass
class ForkedRanks:
    """All ranks of a run, which were asked for. There are no ``pids`` until the warm process has sent them.

    Names that Popen has mean the same; ``returncode`` is that of the first rank that ended badly, or 0 once all have ended.
    """

    stdout: IO[bytes]  #: their output and their standard error
    pids: Tuple[int, ...] = ()
    returncode: Optional[int] = None
    stderr: Optional[IO[bytes]] = None
    _ended: Dict[int, int] = field(
        default_factory=dict
    )  #: children of the batch, from before the pids were known on

    def note_exits(self, ended: Mapping[int, int]) -> None:
        """Learn which children of the batch have ended and were reaped."""
        self._ended.update(ended)
        codes = self.exits()
        if self.returncode is None and (any(codes.values()) or 0 < len(codes) == len(self.pids)):
            self.returncode = next(filter(None, codes.values()), 0)

    def exits(self) -> Dict[int, int]:
        """Return rank -> exit code, or minus the signal's number, of those that have ended."""
        return {rank: self._ended[pid] for rank, pid in enumerate(self.pids) if pid in self._ended}


@dataclass
class WarmRanks:
    """The batch's end: at most one warm process, of one environment.

    ``connection`` is to be watched while :attr:`asked` holds a rank: :meth:`answer` takes what comes.
    """

    asked: Optional[ForkedRanks] = None
    connection: Optional[socket.socket] = None
    _process: Optional[subprocess.Popen[bytes]] = None
    _key: Any = None
    _deaths: int = 0
    _refused: Dict[Any, str] = field(default_factory=dict)

    @property
    def pids(self) -> Tuple[int, ...]:
        """The warm process, while no rank is under way: nothing of a run that has ended, and not to be ended with it."""
        return (self._process.pid,) if self._process is not None and self.asked is None else ()

    def fork(
        self, python: str, environment: Mapping[str, str], cwd: str, ranks: int = 1
    ) -> Optional[ForkedRanks]:
        """Ask for *ranks* with *environment* that start in *cwd*; None where this environment has no warm process.

        The first request of an environment starts it. What becomes of the request, :meth:`answer` tells.

        Raises:
            OSError: nothing can be started.
        """
        own = {name: value for name, value in environment.items() if name in OF_RUN}
        common = {name: value for name, value in environment.items() if name not in OF_RUN}
        key = (python, tuple(sorted(os.sched_getaffinity(0))), tuple(sorted(common.items())))
        if key in self._refused:
            return None
        if self._process is None or self._key != key:
            self.close()
            self._start(python, common)
            self._key, self._deaths = key, 0 if self._key != key else self._deaths
        reading, writing = os.pipe()
        request = json.dumps({"variables": own, "cwd": cwd, "ranks": ranks}).encode() + b"\n"
        try:
            if self.connection is not None:
                socket.send_fds(self.connection, [request], [writing])
        except OSError as error:  # it has died; the next run gets a new one
            os.close(reading)
            self._died(f"it does not take requests: {error.strerror}")
            return None
        finally:
            os.close(writing)
        self.asked = ForkedRanks(os.fdopen(reading, "rb", 0))
        return self.asked

    def answer(self) -> Optional[str]:
        """Take what has come: the pids of the ranks that were asked for; return why there are none, or None.

        An empty string means that nothing has come yet.
        """
        ranks, connection = self.asked, self.connection
        if ranks is None or connection is None:
            return "nothing was asked for"
        try:
            line = connection.recv(MOST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ""
        except OSError:
            line = b""
        said: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            said = read_json(line) if line else {"died": "it has ended"}
        if not isinstance(said, dict):
            said = {"died": "its answer cannot be read"}
        self.asked = None
        if isinstance(said.get("pids"), list):
            ranks.pids, self._deaths = tuple(map(int, said["pids"])), 0
            ranks.note_exits({})
            return None
        if "refused" not in said:
            return self._died(str(said.get("died", "it gives no reason")))
        why = str(said["refused"])
        self._refused[self._key] = why
        say(f"ranks of this environment are not forked: {why}")
        self.close()
        return why

    def _died(self, why: str) -> str:
        self._deaths += 1
        say(f"the process that forks ranks is gone: {why}")
        if self._deaths >= MOST_DEATHS:
            self._refused[self._key] = why
        key, deaths = self._key, self._deaths
        self.close()
        self._key, self._deaths = key, deaths
        return why

    def close(self) -> None:
        """End the warm process, if there is one; ranks that it has forked are not its children and go on."""
        process, self._process, self.asked = self._process, None, None
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if process is not None and process.returncode is None:
            process.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # whoever ends this run's processes waits longer
                process.wait(ENDS_S)

    def note_exits(self, ended: Mapping[int, int]) -> None:
        """Learn which children of the batch have ended and were reaped."""
        if self._process is not None and self._process.pid in ended:
            self._process.returncode = ended[self._process.pid]
            if self.asked is None:  # else the connection tells, after what was said before
                self._died("it has ended")

    def _start(self, python: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.closing(theirs):
            try:
                self._process = subprocess.Popen(
                    [python, "-m", __name__, str(theirs.fileno())],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self.connection = ours


@contextlib.contextmanager
def warm_ranks() -> Iterator[Optional[WarmRanks]]:
    """Adopt orphaned processes, and yield what forks ranks, which are such; None where this process can adopt none."""
    problem = become_subreaper()
    if problem:
        say(f"orphaned processes cannot be adopted: {problem}")
    with contextlib.closing(WarmRanks()) as warm:
        yield None if problem else warm


@dataclass(frozen=True)
class Imported:
    """The warm process after its imports: what they printed lies in the file ``printed``, ``spans`` see :func:`mapped_files`."""

    pid: int
    connection: socket.socket
    printed: int
    spans: Sequence[Tuple[int, int]]


def main(arguments: List[str]) -> int:
    """Be the warm process: import, then fork a rank for each request; return when the batch is gone."""
    die_with_parent(os.getppid())
    connection = socket.socket(fileno=int(arguments[0]))
    connection.set_inheritable(False)
    printed = os.memfd_create("printed")  # what imports print, each rank prints
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    refused = import_ahead()
    gc.collect()
    gc.freeze()  # a rank's collections need not walk, and so copy, what was imported
    spans: Sequence[Tuple[int, int]] = ()
    try:
        spans = mapped_files()
    except OSError as error:  # gVisor has no such file
        refused = refused or f"what is in its memory is not known: {error.strerror}"
    parent = Imported(os.getpid(), connection, printed, spans)
    while True:
        request, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
        if not request:
            return 0
        if refused:
            _tell(connection, {"refused": refused})
        else:
            _fork(parent, read_json(request), fds[0])
        os.close(fds[0])


def import_ahead() -> str:
    """Import what ranks import; return why this process is not to fork any, or an empty string."""
    try:
        for name in IMPORTED:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything; a rank then says it as its own
        return f"{type(error).__name__}: {error}"
    import torch

    if os.fork() == 0:  # OpenBLAS ends its threads before a fork and starts them again where they are used
        os._exit(0)
    os.wait()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - numbers, not paths
    initialised = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's own
    return why_not(threads, open_files(), initialised=initialised)


def why_not(threads: int, files: Mapping[int, str], *, initialised: bool) -> str:
    """Return why a process of so many *threads* and with these open *files* must not fork ranks, or an empty string."""
    if threads != 1:
        return f"its imports started {threads - 1} threads, which a child of a fork does not have"
    if initialised:
        return "its imports initialised CUDA, which a child of a fork cannot use"
    opened = sorted(path for path in files.values() if path.startswith(DEVICES))
    return f"its imports opened {opened[0]}, which a child of a fork cannot use" if opened else ""


def mapped_files() -> List[Tuple[int, int]]:
    """Return (address, bytes) of what is in this process's memory of the files that it has mapped (proc(5), pagemap)."""
    size = os.sysconf("SC_PAGE_SIZE")
    found: List[Tuple[int, int]] = []
    with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", 0) as table:  # noqa: PTH123 - no files
        for line in maps:
            span, rights, _, _, _, *path = line.split(maxsplit=5)
            start, end = (int(word, 16) for word in span.split("-"))
            if not path or not path[0].startswith("/") or "r" not in rights:
                continue
            table.seek(start // size * 8)
            for index, entry in enumerate(array.array("Q", table.read((end - start) // size * 8))):
                address = start + index * size
                if not entry >> 63:  # not present
                    continue
                if found and sum(found[-1]) == address:
                    found[-1] = (found[-1][0], found[-1][1] + size)
                else:
                    found.append((address, size))
    return found


def touch(spans: Sequence[Tuple[int, int]]) -> None:
    """Take *spans* into this process's memory, as a fork does not: its largest size counts them, as that of a fresh interpreter."""
    size = os.sysconf("SC_PAGE_SIZE")
    for start, length in spans:
        for address in range(start, start + length, size):
            _ = ctypes.c_char.from_address(address).value


def open_files() -> Mapping[int, str]:
    """Return descriptor and path of each open file of this process."""
    found: Dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - may be no path
    return found


def seed_anew() -> None:
    """Seed what a fresh interpreter seeds by chance."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def _fork(parent: Imported, request: Mapping[str, Any], output: int) -> None:
    """Fork ranks that are no children of ours, and tell the batch their pids before they do anything."""
    connection = parent.connection
    try:
        middle = os.fork()
    except OSError as error:
        _tell(connection, {"died": f"it cannot fork: {error.strerror}"})
        return
    if middle:
        os.waitpid(middle, 0)
        return
    code = 1
    try:
        waiting, starting = os.pipe()
        ranks: List[int] = []
        for number in range(int(request["ranks"])):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.close(starting)
                if os.read(waiting, 1):  # nothing: who was to tell of this rank died before
                    _be_rank(parent, request, number, output)
                os._exit(code)
        _tell(connection, {"pids": ranks})
        os.write(starting, b"g" * len(ranks))
        code = 0
    except OSError as error:
        _tell(connection, {"died": f"it cannot fork: {error.strerror}"})
    finally:
        os._exit(code)


def _tell(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the batch is gone, and this process goes with it
        connection.send(json.dumps(message).encode())


def _places(number: int, ranks: int) -> Mapping[str, str]:
    """Return the variables that tell a rank its place among those of its run, which are all on this node."""
    if ranks == 1:
        return {}
    here = {**rank_variables(number, number, ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**here, **{name: os.environ.get(name, value) for name, value in AS_TORCHRUN.items()}}


def _be_rank(parent: Imported, request: Mapping[str, Any], number: int, output: int) -> NoReturn:
    """Turn this child into what a fresh interpreter that runs rank *number* would be."""
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.lseek(parent.printed, 0, os.SEEK_SET)
        shutil.copyfileobj(
            os.fdopen(parent.printed, "rb", closefd=False), os.fdopen(1, "wb", 0, closefd=False)
        )
        for descriptor in open_files():
            if descriptor > 2:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        parent.connection.detach()
        if sys.path[:1] == [str(Path.cwd())]:  # as `python -m` puts it there
            sys.path[0] = request["cwd"]
        os.chdir(request["cwd"])
        os.environ.update({**request["variables"], **_places(number, int(request["ranks"]))})
        os.environ[FORKED] = str(parent.pid)
        seed_anew()
        touch(parent.spans)
        sys.argv = [RANK]
        runpy.run_module(RANK, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
