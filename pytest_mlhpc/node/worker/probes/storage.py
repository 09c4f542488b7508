"""Bandwidth and metadata rates of a volume.

One repetition, with a barrier before each part: every rank writes a file of its own and syncs it (IOR: ``-w -F -e``), reads
one, creates many small files in a folder of its own (mdtest: ``-F -u``), asks for the attributes of as many, reads them, and
unlinks its own. On several nodes that see one file system each rank reads and lists the files of the next node's
rank, whose content its own node cannot have cached (IOR: ``-C``; mdtest: ``-N``). Before reading, the page cache is brought
into the asked state, and that is verified (``node/worker/data/dataset_files.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from pytest_mlhpc.node.protocol.schema import Rate, TimedOperation
from pytest_mlhpc.node.worker.data import dataset_files as page_cache
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import volume
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.probes.volume import Blocks, SmallFiles

#: How far equal runs differ on volumes that others use too (docs/storage-and-communication.md).
TOLERANCE = 0.30

#: Least room of a small file on most file systems, in bytes.
_CLUSTER = 4096


class StorageProbe:
    """This rank's folder on the volume, and what it does there."""

    kernel_works = True  # writing back

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        parameters, run = place.run.parameters, place.run
        self._direct = parameters["io"] == "direct"
        self._wanted = run.cache
        self._states: List[str] = []
        self._repetition = 0
        self._before = signal.signal(signal.SIGTERM, _end)
        self._stack = contextlib.ExitStack()
        try:
            self._volume = volume.resolve(str(parameters["path"]), place.directory, os.environ)
            made = volume.own_folder(self._volume, run.run_id, place.group.rank, run.time_limit_s)
            self._folder = self._stack.enter_context(made)
            place.barrier()  # all folders are there
            self._neighbour, self._shared = self._whose_files()
            if place.group.local_rank == 0:
                volume.remove_leftovers(self._volume, self._folder)
            self._small = SmallFiles(int(parameters["files"]), int(parameters["small_file_size"]))
            self._blocks = Blocks(
                int(parameters["file_size"]), int(parameters["block_size"]), direct=self._direct
            )
            self._require_room()
            place.barrier()
            (self._folder / "small").mkdir()
        except BaseException:
            self.close()
            raise
        self.operations = self._operations()

    def _whose_files(self) -> Tuple[int, bool]:
        """Return whose files this rank reads, and whether all ranks see each other's folders. All ranks decide alike."""
        group, nodes = self._place.group, self._place.run.nodes
        neighbour = (group.rank + group.world // nodes) % group.world
        if nodes == 1 or group.world == 1:
            return group.rank, False
        sizes = torch.tensor(
            [float(self._folder_of(neighbour).is_dir())], device=self._place.accelerator.device
        )
        dist.all_reduce(sizes, op=dist.ReduceOp.MIN)
        shared = bool(sizes.item() > 0)
        return (neighbour if shared else group.rank), shared

    def _folder_of(self, rank: int) -> Path:
        return self._folder.with_name(f"{self._folder.name.rpartition('-')[0]}-{rank}")

    def _require_room(self) -> None:
        group, count = self._place.group, len(self._small.names)
        ranks = group.world if self._shared else max(1, group.world // self._place.run.nodes)
        each = self._blocks.size + count * (-(-self._small.size // _CLUSTER) * _CLUSTER)
        volume.require_room(self._folder, ranks * each, ranks * (count + 4))

    def _operations(self) -> Tuple[TimedOperation, ...]:
        count, size = float(len(self._small.names)), float(self._blocks.size)
        table = (
            ("write", "write_bandwidth", "B/s", size),
            ("read", "read_bandwidth", "B/s", size),
            ("create", "create_rate", "items/s", count),
            ("stat", "stat_rate", "items/s", count),
            ("small_read", "small_read_rate", "items/s", count),
            ("unlink", "unlink_rate", "items/s", count),
        )
        return tuple(
            TimedOperation(name, (), (Rate(metric, unit, amount, tolerance=TOLERANCE),))
            for name, metric, unit, amount in table
        )

    def verify(self) -> None:
        """Do nothing: each repetition checks what it reads."""

    def repeat(self) -> Mapping[str, float]:
        """Do each part once.

        Raises:
            WorkerFailure: ``disk_full``, ``volume_unusable``, or ``wrong_result``: what was read is not what was written.
        """
        self._repetition += 1
        seconds: Dict[str, float] = {}
        try:
            seconds.update(self._large())
            seconds.update(self._many())
        except OSError as error:
            raise volume.volume_error(self._volume, error, "measuring") from error
        return seconds

    def _clocked(self, part: Callable[[], object]) -> float:
        self._place.barrier()
        start = time.perf_counter()
        part()
        return time.perf_counter() - start

    def _large(self) -> Mapping[str, float]:
        rank, number = self._place.group.rank, self._repetition
        own, other = self._folder / "large", self._folder_of(self._neighbour) / "large"
        write_s = self._clocked(lambda: self._blocks.write(own, rank, number))
        self._prepare([own], [other])
        read_s = self._clocked(lambda: self._blocks.read(other, self._neighbour, number))
        self._place.barrier()  # nobody reads it any more
        own.unlink()
        return {"write": write_s, "read": read_s}

    def _many(self) -> Mapping[str, float]:
        small, number, rank = self._small, self._repetition, self._place.group.rank
        own, other = (small.paths(self._folder_of(one) / "small") for one in (rank, self._neighbour))
        contents = [small.content(rank, number, one) for one in range(len(own))]
        found: List[bytes] = []
        create_s = self._clocked(lambda: small.create(own, contents))
        sizes: List[int] = []
        stat_s = self._clocked(lambda: sizes.append(small.stat(other)))
        self._prepare([Path(path) for path in own], [Path(path) for path in other])
        read_s = self._clocked(lambda: found.extend(small.read(other)))
        self._compare(found, sizes[0])
        unlink_s = self._clocked(lambda: small.unlink(own))
        return {"create": create_s, "stat": stat_s, "small_read": read_s, "unlink": unlink_s}

    def _compare(self, found: Sequence[bytes], size: int) -> None:
        small, number = self._small, self._repetition
        for one, content in enumerate(found):
            if content != small.content(self._neighbour, number, one):
                text = f"{self._folder_of(self._neighbour) / 'small' / small.names[one]} does not hold what was written"
                raise WorkerFailure("wrong_result", text)
        if size != len(found) * small.size:
            text = (
                f"{len(found)} small files have {size} bytes together, {len(found) * small.size} were written"
            )
            raise WorkerFailure("wrong_result", text)

    def _prepare(self, own: Sequence[Path], other: Sequence[Path]) -> None:
        """Bring files into the asked state of the page cache: the writers drop them, the readers verify that.

        Raises:
            WorkerFailure: ``volume_unusable``, the asked state cannot be had here.
        """
        page_cache.evict(own)
        self._place.barrier()
        state = _state(other, self._wanted)
        self._states.append(state)
        if self._wanted not in ("unknown", state):
            kind = volume.describe(self._folder).get("filesystem", "its file system")
            text = (
                f"{self._volume} ({kind}): files are {state} in the page cache after they were told to be {self._wanted}; "
                "a file system in memory is never cold: name another path, or ask for cache='warm' or 'unknown'"
            )
            raise WorkerFailure("volume_unusable", text)

    def cache(self) -> str:
        """Return the state in which everything was read, if it was one and the same."""
        return self._states[0] if len(set(self._states)) == 1 else "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return what volume it was, and whether ranks read each other's files."""
        return {
            **volume.describe(self._volume),
            "files_read": "of the next node" if self._shared else "own",
        }

    def close(self) -> None:
        """Remove this rank's folder."""
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # half removed is not removed; SIGKILL follows if it takes long
        try:
            self._stack.close()
        finally:
            signal.signal(signal.SIGTERM, self._before)


def _state(paths: Sequence[Path], wanted: str) -> str:
    """Return the verified state of the page cache: warm files are read first where that is asked."""
    try:
        if wanted == "warm":
            page_cache.read_through(paths)
        share = page_cache.residency(paths)
    except OSError:
        return "unknown"
    if share <= page_cache.TOLERANCE:
        return "cold"
    return "warm" if share >= 1.0 - page_cache.TOLERANCE else "unknown"


def _end(_number: int, _frame: Optional[FrameType]) -> None:
    """Let the folder be removed when this process receives a signal to end."""
    raise WorkerFailure("cancelled_outside", "a signal ended the process")


#: A rank's part, by its ProbePlace.
probe = StorageProbe
