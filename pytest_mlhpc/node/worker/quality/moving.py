"""PAYLOAD. The staging phase of a run: which rank moves which files to its node, and where training then reads them."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Optional, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.quality import archives, staging
from pytest_mlhpc.node.worker.quality.logbook import Logbook
from pytest_mlhpc.node.worker.quality.parts import Origin, Part
from pytest_mlhpc.node.worker.quality.place import Node, gathered
from pytest_mlhpc.node.worker.quality.settings import Settings, Staging

#: Lists the training and the evaluation part of the set at a place, which holds the share of one of so many nodes.
Finder = Callable[[Optional[Path], int], Tuple[Part, Part]]


@dataclass(frozen=True)
class Moved:
    """The two parts where training reads them, and what this rank did to bring them there (zero: nothing was staged)."""

    training: Part
    evaluation: Part
    seconds: float = 0.0
    bytes: int = 0


def folder(
    settings: Settings, run: RunPlan, node: Node, group: Group, stack: contextlib.ExitStack
) -> Optional[Path]:
    """Return the run's folder on this node, which goes with *stack*, or None where nothing is staged.

    Raises:
        DataError: it cannot be made.
    """
    if settings.staging is None:
        return None
    place = staging.folder_of(staging.base_of(settings.staging.path, os.environ), run.run_id, node)
    if node.leads:
        stack.enter_context(staging.held(place))
    gathered(group, None)  # it is there for all
    return place


def move(
    origin: Origin,
    settings: Settings,
    node: Node,
    log: Logbook,
    *,
    group: Group,
    place: Optional[Path],
    find: Finder,
) -> Moved:
    """Find the two parts, after bringing them to *place* if that is asked for. All ranks leave it together.

    Raises:
        DataError: a file is missing, damaged or changes, or there is no room for it.
    """
    if settings.staging is None or place is None:
        return Moved(*find(origin.root, 1))
    start = time.perf_counter()
    log.note("staging_start")
    if settings.staging.how == "archives":
        copied = _unpacked(origin, settings.staging, node, place)
        gathered(group, None)
        found = find(place, node.count if settings.by_node else 1)
    else:
        found, copied = _copied(origin, settings, node, place, find)
        gathered(group, None)
    log.note("staging_stop")
    return Moved(*found, time.perf_counter() - start, copied)


def _unpacked(origin: Origin, asked: Staging, node: Node, place: Path) -> int:
    chosen = archives.of_node(origin.files, node.number, node.count, share=asked.share == "node")
    loose = [
        (file, place / file.relative_to(origin.base))
        for file in origin.files
        if not archives.is_archive(file)
    ]
    done = staging.each(
        lambda one: archives.unpack(one, place), chosen[node.place :: node.ranks], asked.workers
    )
    return done + staging.each(staging.copy, loose if node.leads else [], asked.workers)


def _copied(
    origin: Origin, settings: Settings, node: Node, place: Path, find: Finder
) -> Tuple[Tuple[Part, Part], int]:
    asked = settings.staging
    if asked is None:
        raise ValueError("nothing is staged")
    training, evaluation = find(origin.root, 1)
    if asked.share == "node":
        training, evaluation = training.share(node), evaluation.share(node)
    base = origin.base
    wanted: Dict[Path, None] = dict.fromkeys((*training.paths, *evaluation.paths))
    pairs = [(path, place / path.relative_to(base)) for path in wanted]
    done = staging.each(staging.copy, pairs[node.place :: node.ranks], asked.workers)

    def there(path: Path) -> Path:
        return place / path.relative_to(base)

    return (training.moved(there), evaluation.moved(there)), done
