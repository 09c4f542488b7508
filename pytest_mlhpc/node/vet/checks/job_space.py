"""PAYLOAD. Room for checkpoints: the folder, space, inodes, quota; room in /tmp and in shared memory."""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.finding import Finding, Outcome
from pytest_mlhpc.node.vet.job_disk import Space, mount_of, quotas, space, try_to_write
from pytest_mlhpc.node.vet.job_findings import judged, outcome, size, some, unknown
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable

#: What quota is compared with where nobody said how large a checkpoint is, in bytes.
SOME_CHECKPOINT = 1 << 30

#: What NCCL and torch leave in shared memory when their processes are killed. Sources: nccl issue 525 (``nccl-``);
#: torch, multiprocessing/reductions and shm manager (``torch_``).
LEFT = ("nccl-*", "torch_*", "sem.mp-*")


class Checkpoints:
    """Whether checkpoints can be written, and how many."""

    name = "job_space"
    level = "quick"
    cost_s = 0.8
    reads = (
        "the checkpoint path: stat -f, a small file that is written and removed",
        "/proc/self/mounts",
        "lfs quota",
        "quota",
    )
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look at the folder first: what does not exist has no space."""
        path = context.wanted.paths.get("checkpoint", "")
        if not path:
            return outcome(self.name, (), "nobody said where checkpoints go (--checkpoint)")
        trouble = _folder(machine, path)
        said = judged(self.name, context.policy, "job.checkpoint_path", int(bool(trouble)), trouble)
        if said:
            return Outcome(said)
        found = space(machine, path)
        said = (
            *_space(self.name, context, path, found),
            *_quota(self.name, machine, context, path),
        )
        return outcome(self.name, said, f"{path} has {size(found.free)} free")


def _folder(machine: Machine, path: str) -> str:
    if not machine.exists(path):
        return (
            f"the checkpoint folder {path} is not there: make it, or see whether its file system is mounted"
        )
    if not machine.path(path).is_dir():
        return f"the checkpoint folder {path} is no folder"
    if "ro" in mount_of(machine, path)[1]:
        return f"the file system of the checkpoint folder {path} is mounted read-only"
    words = try_to_write(machine, path)
    return f"no file can be written in the checkpoint folder {path}: {words}" if words else ""


def _ranks(context: Context) -> int:
    return max(1, context.wanted.ranks) * max(1, len(context.hosts))


def _space(check: str, context: Context, path: str, found: Space) -> Tuple[Finding, ...]:
    wanted, policy = context.wanted.checkpoint_bytes, context.policy
    free = f"{size(found.free)} of {size(found.size)} are free at {path}"
    said: Tuple[Finding, ...]
    if wanted > 0:
        text = f"{free}, and one checkpoint takes {size(wanted)}: delete old ones, or choose another place"
        said = judged(check, policy, "job.checkpoint_space", found.free / wanted, text)
    else:
        share = found.free / found.size if found.size else 1.0
        said = judged(check, policy, "job.checkpoint_share", share, f"only {free}: choose another place")
    if found.inodes > 0:
        ranks = _ranks(context)
        text = f"only {found.free_inodes} files can be made at {path}, for {ranks} ranks: delete some, or choose another place"
        said += judged(check, policy, "job.checkpoint_inodes", found.free_inodes / ranks, text)
    return said


def _quota(check: str, machine: Machine, context: Context, path: str) -> Tuple[Finding, ...]:
    try:
        rows = quotas(machine, path)
    except Unreadable as error:
        return unknown(check, "job.quota_space", f"{error}: nobody knows how much may be written")
    policy, ranks = context.policy, _ranks(context)
    wanted = context.wanted.checkpoint_bytes or SOME_CHECKPOINT
    said: Tuple[Finding, ...] = ()
    for row in rows:
        space_text = (
            f"the quota of {row.whose} leaves {size(row.left)} of {size(row.hard)}, and one checkpoint takes "
            f"{size(wanted)}: delete old ones, or ask for more"
        )
        said += judged(check, policy, "job.quota_space", row.left / wanted, space_text)
        files_text = f"the quota of {row.whose} leaves {row.files_left:.0f} of {row.files_hard} files, for {ranks} ranks: delete some"
        said += judged(check, policy, "job.quota_inodes", row.files_left / ranks, files_text)
        grace = f"the soft limit of {row.whose} is passed: when its grace time ends nothing can be written; delete some"
        said += judged(check, policy, "job.quota_grace", row.passed, grace)
    return said


class Temporary:
    """Room for temporary files."""

    name = "job_tmp"
    level = "quick"
    cost_s = 0.05
    reads = ("TMPDIR or /tmp: stat -f",)
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Ask the file system of TMPDIR."""
        path = machine.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - where libraries write without being told
        try:
            found = space(machine, path)
        except Absent:
            if not machine.environ.get("TMPDIR"):
                raise
            found = Space(0, 0, 0, 0)
        text = f"{path} has {size(found.free)} free of {size(found.size)}: remove leftovers, or set TMPDIR to a folder with room"
        said = judged(self.name, context.policy, "job.tmp_space", found.free, text)
        return outcome(self.name, said, f"{path} has {size(found.free)} free")


class SharedMemory:
    """Room in /dev/shm, over which ranks of one node and loaders talk."""

    name = "job_shm"
    level = "quick"
    cost_s = 0.05
    reads = ("/dev/shm: stat -f, names",)  # noqa: S108 - words for the manual
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Ask its file system, and name what dead ranks have left."""
        path = "/dev/shm"  # noqa: S108 - shm_overview(7)
        found = space(machine, path)
        ranks = max(1, context.wanted.ranks)
        left = tuple(
            name.rpartition("/")[2] for pattern in LEFT for name in machine.names(f"{path}/{pattern}")
        )
        text = (
            f"{path} has {size(found.free)} free of {size(found.size)} for {ranks} ranks: "
            + (f"{len(left)} leftovers fill it ({some(left)}), remove them; else " if left else "")
            + "mount it larger (containers: --shm-size, Kubernetes: emptyDir with medium Memory)"
        )
        said = judged(self.name, context.policy, "job.shm", found.free / ranks, text)
        return outcome(self.name, said, f"{path} has {size(found.free)} free")


CHECKS = (Checkpoints(), Temporary(), SharedMemory())
