"""What a cluster has of the whole machine: kernel settings, cgroups, a network interface. All of it is given back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testcluster import processes
from testcluster.errors import ClusterError
from testcluster.processes import Process

from testkubernetes.configuration import bridge_of, cgroup, containerd_socket
from testkubernetes.settings import MOST_NODES

_CGROUPS = Path("/sys/fs/cgroup")
#: What kubelet and the bridge set; the values of before are kept here while any cluster runs, until the next boot.
_SYSCTLS = (
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes", "net/ipv4/ip_forward",
)  # fmt: skip
_KEPT = Path("/run/mlhpc-kubernetes.json")


def check_directory(directory: Path) -> None:
    """Refuse a path that the parts could not use.

    Raises:
        ClusterError: Names what is wrong.
    """
    # sockaddr_un(7): 107 characters, and containerd adds `.ttrpc`.
    longest = str(containerd_socket(directory, MOST_NODES)) + ".ttrpc"
    if len(longest) > 107:
        raise ClusterError(f"{directory} is too long for a socket in it; take a shorter --directory")
    strange = sorted({letter for letter in str(directory) if not (letter.isalnum() or letter in "/._-+")})
    if strange:
        raise ClusterError(
            f"--directory {directory}: {strange[0]!r} would be misread by the daemons; take another"
        )


def keep_settings(directory: Path, holder: Process) -> None:
    """Write down the kernel's settings as they are now, unless another living cluster has.

    Args:
        directory: Of the cluster.
        holder: A process that lives as long as the cluster's nodes.
    """
    with _kept() as kept:
        if not kept["holders"]:
            kept["settings"] = {name: _read(name) for name in _SYSCTLS if Path("/proc/sys", name).exists()}
        kept["holders"][str(directory)] = str(holder)


def restore_settings(directory: Path) -> None:
    """Give the kernel its settings back if this was the last cluster."""
    if not _KEPT.exists():
        return
    with _kept() as kept:
        present = kept["holders"].pop(str(directory), None)
        for other, holder in list(kept["holders"].items()):
            if not processes.alive(processes.parse(holder)):
                del kept["holders"][other]
                present = other
        if kept["holders"] or present is None:
            return
        for name, value in kept["settings"].items():
            if _read(name) != value:
                Path("/proc/sys", name).write_text(value, encoding="ascii")


@contextlib.contextmanager
def _kept() -> Iterator[dict[str, dict[str, str]]]:
    descriptor = os.open(_KEPT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            kept = json.load(file)
        except ValueError:
            kept = {"settings": {}, "holders": {}}
        yield kept
        file.seek(0)
        file.truncate()
        json.dump(kept, file)


def snapshotter(directory: Path) -> str:
    """Return how containerd can keep layers in a directory: overlayfs, but not on top of itself, as in most containers."""
    kinds: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        words, _, rest = line.partition(" - ")
        kinds[Path(words.split()[4])] = rest.split()[0]
    place = directory.resolve()
    kind = next(kinds[path] for path in (place, *place.parents) if path in kinds)
    return "native" if kind == "overlay" else "overlayfs"


def make_cgroups(directory: Path, number: int) -> None:
    """Make the cgroup of a node with every controller: a kubelet takes none that is not there."""
    for top in _hierarchies():
        (top / cgroup(directory, number)).mkdir(exist_ok=True)


def in_cgroups(directory: Path, number: int | None = None) -> list[Process]:
    """Return the live processes of a cluster's pods, those of one node or of all."""
    found: set[int] = set()
    for top in _tops(directory, number):
        # os.walk, not rglob: a cgroup that goes away while we look is none that we miss.
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(folder, "cgroup.procs").read_text(encoding="ascii").split()))
    return [process for pid in sorted(found) if (process := processes.identify(pid))]


def remove_cgroups(directory: Path) -> None:
    """Remove the cgroups of all nodes; rmdir(2) refuses one that is in use."""
    for top in _tops(directory, None):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def remove_bridge(directory: Path) -> None:
    """Remove the network interface of the pods; those of the pods end with them."""
    name = bridge_of(directory)
    if Path("/sys/class/net", name).exists():
        subprocess.run(
            ["ip", "link", "delete", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
            check=False,
        )


def _hierarchies() -> list[Path]:
    """Return the tops of the hierarchies: one for each controller (v1), or the only one (v2)."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    if not _CGROUPS.is_dir():
        return []
    # Where several controllers share a hierarchy their names are links to it.
    return [entry for entry in _CGROUPS.iterdir() if entry.is_dir() and not entry.is_symlink()]


def _tops(directory: Path, number: int | None) -> list[Path]:
    numbers = range(1, MOST_NODES + 1) if number is None else [number]
    every = [top / cgroup(directory, one) for top in _hierarchies() for one in numbers]
    return [top for top in every if top.is_dir()]


def _read(name: str) -> str:
    return Path("/proc/sys", name).read_text(encoding="ascii").strip()
