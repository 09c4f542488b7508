"""Where the files of runs lie: a folder that the nodes of their partition see."""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_mlhpc.system.model import Environment, Partition

#: Instead of a payload's hash: the interpreter on the nodes is ours, so it has this package and nothing is shipped.
SOURCE = "source"


def root_of(partition: Partition, state_dir: Path) -> Path:
    """Return the folder below which runs and payloads of *partition* lie: its ``shared_directory``, or the state's."""
    shared = partition.scheduler_options.get("shared_directory")
    return Path(shared) if shared else state_dir


def has_this_package(environment: Environment) -> bool:
    """Whether runs in *environment* use this very interpreter, which has this package: nothing need be shipped."""
    inside = environment.extra.keys() & {"venv", "conda", "container", "uenv"}
    return not inside and environment.python == sys.executable
