"""The agent of launcher ``torchrun`` on one node: ``python -m pytest_mlhpc.node.torchrun`` takes the arguments of torchrun.

It is a program of its own, as it imports torch: ``node/launch.py`` runs where none is. It is torchrun with a repair: torch 1.13 looks
up the value of ``--redirects`` and ``--tee`` among the members of a flag enumeration. Since Python 3.11 iterating over one leaves out
the member 0, which is the default of both, so that torchrun ends before it starts a rank.

Its folder of logs, in which torch leaves nothing but the names of ranks, goes with it: torch leaves one behind at every run.

As a task of a Slurm step (``MLHPC_RANKS_FROM=slurm``), or on a pod of several (``pods``), it is the agent of its node: its number is the node's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from typing import Any, Iterator, MutableMapping


def repair() -> None:
    """Make ``Std.from_str("0")`` mean ``Std.NONE`` where it means nothing; elsewhere leave torch as it is."""
    from torch.distributed.elastic import multiprocessing

    std: Any = getattr(multiprocessing, "Std", None)
    if std is None or std.from_str("0") is not None:
        return
    original = std.from_str

    def from_str(text: str) -> Any:
        found = original(text)
        if isinstance(found, dict):
            return {rank: std.NONE if value is None else value for rank, value in found.items()}
        return std.NONE if found is None else found

    std.from_str = staticmethod(from_str)


def take_place(environ: MutableMapping[str, str]) -> None:
    """Make this agent the one of its node; its ranks get their numbers from torchrun then, no longer from Slurm.

    torchrun reads an option's default from ``PET_`` and its name (torch 1.13 to 2.13).
    """
    places = {"slurm": "SLURM_NODEID", "pods": "MLHPC_TASK_POD"}
    place = places.get(environ.pop("MLHPC_RANKS_FROM", ""))
    if place is not None:
        environ["PET_NODE_RANK"] = environ.get(place, "")


@contextlib.contextmanager
def own_folder(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let torchrun write into a folder that is removed afterwards, unless the environment names one."""
    if "PET_LOG_DIR" in environ:
        yield
        return
    environ["PET_LOG_DIR"] = folder = tempfile.mkdtemp(prefix="torchelastic_")
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a rank that does not end may still write


def main() -> None:
    """Start ranks as torchrun does."""
    from torch.distributed import run

    from pytest_mlhpc.node.worker.distributed import port_taken

    take_place(os.environ)
    repair()
    try:
        with own_folder(os.environ):
            run.main()
    except (RuntimeError, OSError) as error:
        problem = port_taken(error, os.environ)
        if problem:  # the batch knows this line, and starts the run once more with another port
            print(f"mlhpc: {problem}", file=sys.stderr, flush=True)  # noqa: T201 - standard error is the launcher's log
        raise


if __name__ == "__main__":
    main()
