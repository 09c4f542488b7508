"""A cluster of another release: its own root, in a mount namespace that one process holds and every daemon enters.

Its root is a small file system in memory; ``usr`` and ``etc`` of the release are mounted into it read-only, and folders of
this machine as they are, at the same paths. This machine's own mounts stay as they were: there is nothing to unmount, the
kernel lets go of it all when the last process has ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testcluster.daemons import BOX, Daemons
from testcluster.errors import ClusterError

#: Commands for those outside, in the folder `bin` of the cluster.
COMMANDS = (
    "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "sprio",
    "squeue", "srun", "sshare", "sstat",
)  # fmt: skip
_CHECKOUT = Path(__file__).resolve().parents[3]
# Exists in there alone: a command that came elsewhere finds nothing to run.
_PROGRAMS = "/.mlhpc/bin"

# Paths come as arguments, never as text.
_BOOT = """
set -eu
new=$1 base=$2 hosts=$3; shift 3
mount -t tmpfs -o mode=0755,size=64m box "$new"
mount --make-unbindable "$new"  # else folders of which it is part would bring it along
for entry in "$base"/*; do
  name=${entry##*/}
  if [ -L "$entry" ]; then cp -P "$entry" "$new/$name"; else mkdir "$new/$name"; fi
done
for name in usr etc; do
  mount --bind "$base/$name" "$new/$name"
  mount -o remount,bind,ro "$new/$name"
done
mkdir -p "$new/var/tmp" "$new/run" "$new/.mlhpc/old"
chmod 1777 "$new/tmp" "$new/var/tmp"
mount --bind "$hosts" "$new/etc/hosts"
for path in /dev /proc /sys "$@"; do
  if [ -d "$path" ]; then
    mkdir -p "$new$path"
  elif [ ! -e "$new$path" ]; then
    mkdir -p "$new${path%/*}"
    : >"$new$path"
  fi
  mount --rbind "$path" "$new$path"
done
ln -s /usr/bin "$new/.mlhpc/bin"
cd "$new"
pivot_root . .mlhpc/old
exec chroot . sh -c 'umount -l /.mlhpc/old && touch /.mlhpc/ready && exec sleep infinity'
"""

# Names and paths in it come from us alone; what a caller says is passed on as it is.
_WRAPPER = f"""\
#!/bin/sh
# Written by ci/slurm: the command of this name of the cluster's own release, from outside and from within its jobs.
name=${{0##*/}}
if [ -d /.mlhpc/bin ]; then exec "{_PROGRAMS}/$name" "$@"; fi
if ! read -r pid start 2>/dev/null <"${{0%/*}}/../pids/{BOX}" || [ ! -e "/proc/$pid/root/.mlhpc/ready" ]; then
  echo "$name: the test cluster is down; ci/slurm up starts it (its commands need root)" >&2
  exit 1
fi
if [ ! -d "/proc/$pid/root$PWD" ]; then
  echo "$name: the test cluster does not see $PWD; ci/slurm up --bind makes it see more" >&2
  exit 1
fi
exec nsenter --mount="/proc/$pid/ns/mnt" -- env --chdir="$PWD" -- "{_PROGRAMS}/$name" "$@"
"""


def start(daemons: Daemons, root: Path, more: Sequence[Path]) -> None:
    """Make the root and hold it; write the commands for those outside.

    Args:
        daemons: Those of the cluster's directory; all that start later do so in there.
        root: The release, see :mod:`testcluster.roots`.
        more: Folders of this machine to be seen in there, besides those of :func:`folders`.

    Raises:
        ClusterError: It cannot be made.
    """
    directory = daemons.directory
    new = directory / "root"
    new.mkdir(exist_ok=True)
    paths = folders(directory, more)
    for path in paths:
        _make_mount_point(root, path)
    _write_commands(directory / "bin")
    boot = ["sh", "-c", _BOOT, "sh", str(new), str(root), str(directory / "etc/hosts"), *map(str, paths)]
    daemons.start(BOX, ["unshare", "--mount", "--propagation", "private", *boot], outside=True)
    daemons.await_service(BOX, lambda: _is_ready(daemons))


def folders(directory: Path, more: Sequence[Path]) -> list[Path]:
    """Return what of this machine is mounted: checkout, cluster, home, temporary folder, and Python with what it needs."""
    wanted = [_CHECKOUT, directory, Path.home(), Path(tempfile.gettempdir()), *_python(), *more]
    found = sorted({path.absolute() for path in wanted if path != Path("/") and path.exists()})
    return [path for path in found if not any(above in found for above in path.parents)]


def interpreter() -> Path:
    """Return the Python that has what the project's runs need: that of the checkout's .venv, else the one that runs us."""
    own = _CHECKOUT / ".venv/bin/python"
    return own if own.exists() else Path(sys.executable)


def _python() -> list[Path]:
    """Return where that Python lies.

    Of Debian's own, whose prefix is /usr, the program by all names that lead to it and its library, not all of /usr.
    """
    ask = "import json, sys, sysconfig; print(json.dumps([sys.prefix, sys.base_prefix, sysconfig.get_path('stdlib')]))"
    try:
        done = subprocess.run(
            [interpreter(), "-I", "-c", ask], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(f"{interpreter()} does not run: {error}") from error
    prefix, base, library = map(Path, json.loads(done.stdout))
    if base != Path("/usr"):
        return [prefix, base]
    names = [name for name in _names(interpreter()) if name.is_relative_to("/usr/bin")]
    return [*names, library, *([prefix] if prefix != base else [])]


def _names(program: Path) -> list[Path]:
    """Return a path and all that its links lead to, one after the other."""
    names = [program]
    while names[-1].is_symlink():
        names.append(names[-1].parent / names[-1].readlink())
    return names


def _make_mount_point(root: Path, path: Path) -> None:
    """Make the place below the read-only parts of a root where something of this machine is mounted."""
    if path.parts[1] not in {"usr", "etc"}:
        return
    place = root / path.relative_to("/")
    if path.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _write_commands(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:
        temporary = folder / f".{name}"
        temporary.write_text(_WRAPPER, encoding="ascii")
        temporary.chmod(0o755)
        temporary.replace(folder / name)


def _is_ready(daemons: Daemons) -> bool:
    process = daemons.recorded(BOX)
    return process is not None and Path(f"/proc/{process.pid}/root/.mlhpc/ready").exists()
