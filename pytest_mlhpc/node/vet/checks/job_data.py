"""PAYLOAD. Whether the data of a run can be read here, and is the same as on other nodes."""

from __future__ import annotations

import hashlib
import os
from typing import List, Tuple

from pytest_mlhpc.node.vet.finding import Fact, Origin, Outcome, Severity
from pytest_mlhpc.node.vet.job_findings import judged, outcome
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable

#: Names of a folder that are compared; beyond it the order in which a server lists them would decide.
MOST_NAMES = 20000


class Data:
    """Data that every rank reads: there, readable, the same listing on all nodes."""

    name = "job_data"
    level = "quick"
    cost_s = 1.0
    reads = ("each path of the data: its names, the first bytes of one file",)
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look at ``data``, and at all paths whose names begin so."""
        facts: List[Fact] = []
        troubles: List[str] = []
        paths = {key: path for key, path in context.wanted.paths.items() if key.startswith("data") and path}
        for key, path in sorted(paths.items()):
            try:
                value = _look(machine, path)
            except Unreadable as error:
                troubles.append(str(error))
                continue
            facts.append(
                Fact(self.name, f"listing.{key}", value, severity=Severity.CRITICAL, origin=Origin.USER)
            )
        text = f"{'; '.join(troubles)}: see whether the file system is mounted on this node, and rights"
        said = judged(self.name, context.policy, "job.data_path", len(troubles), text)
        found = outcome(
            self.name, said, f"{len(paths)} paths can be read" if paths else "nobody said which data is read"
        )
        return Outcome(found.findings, facts=tuple(facts))


def _look(machine: Machine, path: str) -> str:
    """Return what should be equal on all nodes: how many names and their digest, or a file's size.

    Raises:
        Unreadable: the data is not there, closed to us, empty or broken; in words for the user.
    """
    machine.exists(f"{path}/.")  # a folder above may be closed to us
    place = machine.path(path)
    if place.is_dir():
        names = _names(machine, path)
        if not names:
            raise Unreadable(f"the folder {path} is empty")
        first = next((name for name in names if machine.path(f"{path}/{name}").is_file()), None)
        if first is not None:
            machine.head(f"{path}/{first}", 1)
        if len(names) > MOST_NAMES:
            return f"more than {MOST_NAMES} names"
        digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return f"{len(names)} names, {digest}"
    machine.head(path, 1)
    return f"{place.stat().st_size} bytes"


def _names(machine: Machine, path: str) -> Tuple[str, ...]:
    machine.exists(f"{path}/.mlhpc-vet")  # says why a folder is closed to us
    found = []
    try:
        with os.scandir(machine.path(path)) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) > MOST_NAMES:
                    break
    except OSError as error:
        raise Unreadable(f"the folder {path} cannot be listed: {error.strerror}", error.errno) from error
    return tuple(sorted(found))


CHECKS = (Data(),)
