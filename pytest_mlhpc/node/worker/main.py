"""One rank of one run: ``python -m pytest_mlhpc.node.worker.main``.

Environment: MLHPC_PLAN (path of plan.json), MLHPC_RUN (id of the run in it), MLHPC_CHANNEL and MLHPC_SECRET (the batch's
address), and for several ranks RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them, or
MLHPC_RANKS_FROM, which names who sets the first three under other names (``node/worker/environment.py``). Exit code 0: a report
was sent; 1: a failure with a name was sent, and its traceback is on standard error.

torch's optimizers import ``torch._dynamo`` when the first one is made, to mark their own functions as not to be compiled (torch 2.4
to 2.13: ``torch/_compile.py``, ``torch/optim/optimizer.py``); that took 1.4 s of a start of 2.4 s on two cores. A run without
``compile`` gets a stand-in with the functions that they and ``torch.distributed`` call. Whoever asks it for anything else gets the real module, from then on.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
import weakref
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Mapping, MutableSequence, NoReturn, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import NO_ROOM, UNSAFE, UnsafeDirectoryError, read_json, read_private
from pytest_mlhpc.node.protocol.channel import RankChannel
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.worker import environment
from pytest_mlhpc.node.worker.environment import WorkerFailure

if TYPE_CHECKING:
    from pytest_mlhpc.node.worker.distributed import Group

NAME = "torch._dynamo"


class StandIn(ModuleType):
    """Stands for ``torch._dynamo`` until something is asked of it that only the real one knows."""

    #: It is a package, whose modules :class:`SubmoduleFinder` finds.
    __path__: MutableSequence[str] = []  # noqa: RUF012 - the form that the import system wants

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def disable(fn: Optional[Callable[..., Any]] = None, *_: Any, **__: Any) -> Any:
        """Return *fn* as it is: nothing compiles it."""
        return fn if fn is not None else (lambda function: function)

    def __getattr__(self, name: str) -> Any:
        """Return what the real module has."""
        if name.startswith(
            "__"
        ):  # asked by the import system and by pickle; of a module without them these are none
            raise AttributeError(name)
        return PARTS[name](f"{NAME}.{name}") if name in PARTS else getattr(real_module(), name)


class StandInPart(ModuleType):
    """Stands for a module below ``torch._dynamo``; what it does not know itself the real one has."""

    def __getattr__(self, name: str) -> Any:
        """Return what the real module has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(real_module(), self.__name__.rpartition(".")[2]), name)


class TraceRules(StandInPart):
    """``init_process_group`` has them forget what they found before (torch 2.4 to 2.13): they have found nothing."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Do nothing."""


class Utils(StandInPart):
    """DistributedDataParallel asks whether the compiler reduces gradients (torch 2.4 to 2.13): not by the default of ``config.py``."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        """Return the default."""
        return "ddp_optimizer"


#: What ranks of several ask of ``torch._dynamo``: the real one took each of them 0.65 s of processor time (torch 2.13).
PARTS: Mapping[str, Callable[[str], StandInPart]] = {"trace_rules": TraceRules, "utils": Utils}


class SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules below ``torch._dynamo`` while the stand-in is there: the real package is imported first."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return how to load a module of the real package; one that it has loaded itself is taken as it is."""
        del path, target
        if not fullname.startswith(f"{NAME}."):
            return None
        real = real_module()
        if fullname in sys.modules:
            return importlib.machinery.ModuleSpec(fullname, self)
        return importlib.machinery.PathFinder.find_spec(fullname, real.__path__)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        """Return the module that is loaded already."""
        return sys.modules.get(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it was executed."""


def install(parameters: Mapping[str, Any]) -> bool:
    """Put the stand-in into the place of ``torch._dynamo`` for a run that compiles nothing; return whether it was.

    torch has to be imported, and its compiler not yet.
    """
    torch = sys.modules.get("torch")
    if parameters.get("compile") or torch is None or NAME in sys.modules or not _has_dynamo():
        return False
    stand_in = StandIn(NAME, __doc__)
    sys.modules[NAME] = stand_in
    torch._dynamo = stand_in  # type: ignore[attr-defined]  # noqa: SLF001 - as importing it would
    sys.meta_path.insert(0, SubmoduleFinder())
    return True


def real_module() -> ModuleType:
    """Return the real ``torch._dynamo``, which takes the stand-in's place if that is still there."""
    if isinstance(sys.modules.get(NAME), StandIn):
        del sys.modules[NAME]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SubmoduleFinder)]
        sys.modules["torch"].__dict__.pop("_dynamo", None)
    return importlib.import_module(NAME)


def _has_dynamo() -> bool:
    """Return whether this torch has the module and defers it: 1.13 has none."""
    return (
        importlib.util.find_spec(NAME) is not None and importlib.util.find_spec("torch._compile") is not None
    )


#: Lines of a traceback that travel with a failure; the whole one is in the rank's log.
_TRACEBACK_LINES = 12

#: What torch raises where a device or the host has no memory left: a class of its own, and a RuntimeError's text.
_NO_MEMORY = re.compile(r"\AOutOfMemoryError: |DefaultCPUAllocator: (can't allocate|not enough) memory")


def main() -> NoReturn:
    """Run one rank and end the process."""
    environment.adopt(os.environ)
    channel = RankChannel.from_environment()
    code = 0
    try:
        _run(channel, os.environ)
    # Whatever it is, the batch must learn of it, by name.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        channel.failed(*name_failure(error))
        code = 1
    channel.close()
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process without tearing down torch.

    Everything is reported by now. Threads of a process group may abort the process when the interpreter goes away under
    them (measured with gloo, torch 2.13), and after a failure they may wait for peers that are gone. Loader processes were
    ended with their iterator; one that is left dies with this process (node/worker/prepare.py).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        spare_operators()
        atexit._run_exitfuncs()  # noqa: SLF001 - what others registered still runs, like writing coverage
        ranks = sys.modules.get("pytest_mlhpc.node.worker.distributed")
        if ranks is not None:
            ranks.leave_mpi()
    os._exit(code)


def spare_operators() -> None:
    """Leave out what torch would do when Python exits: take back each operator that it has registered, for a tenth of a second."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001 - of no public name
        found = finalizer.peek()
        if found is not None and found[1].__module__ == "torch.library":
            finalizer.atexit = False


def read_run(environ: Mapping[str, str]) -> Tuple[RunPlan, Path]:
    """Return this process's run and the directory of its plan.

    Raises:
        WorkerFailure: ``protocol_mismatch``, the plan cannot be read by this payload.
    """
    path = Path(environ.get("MLHPC_PLAN", ""))
    wanted = environ.get("MLHPC_RUN", "")
    try:
        content = path.read_bytes() if "MLHPC_OWN_DISK" in environ else read_private(path)
        plan = from_json(Plan, read_json(content.decode("utf-8")), str(path))
    except UnsafeDirectoryError as error:
        raise WorkerFailure(UNSAFE, f"{error.filename}: {error.strerror}") from error
    except (OSError, ValueError, SchemaError) as error:
        raise WorkerFailure("protocol_mismatch", f"cannot read the plan {str(path)!r}: {error}") from error
    if plan.protocol != PROTOCOL:
        text = f"the plan is of protocol {plan.protocol}, this payload of {PROTOCOL}"
        raise WorkerFailure("protocol_mismatch", text)
    for run in plan.runs:
        if run.run_id == wanted:
            return run, path.parent
    raise WorkerFailure("protocol_mismatch", f"the plan {str(path)!r} has no run {wanted!r}")


def name_failure(error: BaseException) -> Tuple[str, str]:
    """Return outcome and text of what ended this rank."""
    if isinstance(error, WorkerFailure):
        return error.outcome, error.text
    cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
    if isinstance(cause, OSError) and cause.errno in NO_ROOM:
        return "disk_full", f"{error}"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(f"{type(error).__name__}: {error}"):
        said = str(error).partition("\n")[0]
        return (
            "out_of_memory",
            f"{said or 'Python has no memory left'}; use a smaller batch or smaller arrays",
        )
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "worker_exit", "\n".join([f"{type(error).__name__}: {error}", *lines[-_TRACEBACK_LINES:]])


def _run(channel: RankChannel, environ: Mapping[str, str]) -> None:
    run, directory = read_run(environ)
    environment.bind(run, environ)
    try:
        import torch

        from pytest_mlhpc.node.worker import distributed, rank
        from pytest_mlhpc.node.worker.accelerators import gpu
        from pytest_mlhpc.node.worker.base import open_device
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        text = (
            f"{error}: {sys.executable} cannot import what the worker needs; install it there "
            f"(`{sys.executable} -m pip install torch`), or name another `python` of the environment in systems.yaml"
        )
        raise WorkerFailure("import_failed", text) from error
    install(run.parameters)
    channel.started({"torch": str(torch.__version__)})
    torch.set_num_threads(environment.threads_of(run))
    group = distributed.from_environment(environ)
    _check_ranks(run, group)
    if run.device_type == "rocm":
        gpu.prepare_miopen(os.environ, run.parameters.get("miopen_find"), str(torch.__version__))
    gpu.calm_watchdog(run.parameters, group.world, os.environ)
    accelerator = open_device(run.device_type, group.local_rank)
    distributed.join(group, accelerator, run.time_limit_s, run.parameters)
    if run.lies:
        leave(0)
    report = rank.measure_of(run)(run, group, accelerator, directory, channel.progress)
    channel.report(report)


def _check_ranks(run: RunPlan, group: Group) -> None:
    if group.world != run.ranks:
        text = f"asked were {run.ranks} ranks, the launcher {run.launcher!r} started {group.world}"
        raise WorkerFailure("too_few_ranks", text)


if __name__ == "__main__":
    main()
