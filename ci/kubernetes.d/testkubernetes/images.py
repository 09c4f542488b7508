"""Images without a registry: archives of directory trees, as `docker save` writes them, loaded into containerd."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from testcluster.errors import ClusterError

#: Names of images end in a number, never in `latest`, which a kubelet would pull.
PAUSE, BUSYBOX, HOST = "mlhpc.test/pause:1", "mlhpc.test/busybox:1", "mlhpc.test/host:1"
_ACCOUNTS = (
    "root:x:0:0:root:/root:/bin/sh\n"
    "mlhpc:x:1000:1000::/home/mlhpc:/bin/sh\n"
    "nobody:x:65534:65534::/nonexistent:/bin/false\n"
)
_GROUP = "root:x:0:\nmlhpc:x:1000:\nnogroup:x:65534:\n"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def build(folder: Path, busybox: Path) -> dict[str, Path]:
    """Write the archives of our images.

    Args:
        folder: Where to; it is made.
        busybox: A program without libraries that is all commands in one.

    Returns:
        Reference -> archive.
    """
    folder.mkdir(exist_ok=True)
    makers = {PAUSE: _pause, BUSYBOX: _busybox, HOST: _host}
    commands = {PAUSE: ["/bin/busybox", "sleep", "2147483647"], BUSYBOX: ["/bin/sh"], HOST: ["/bin/sh"]}
    archives = {}
    for reference, make in makers.items():
        tree = folder / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        make(tree, busybox)
        archives[reference] = archive_of(folder, reference)
        pack(archives[reference], reference, tree, commands[reference])
        shutil.rmtree(tree)
    return archives


def archive_of(folder: Path, reference: str) -> Path:
    """Return where the archive of an image lies."""
    return folder / f"{reference.rpartition('/')[2].replace(':', '-')}.tar"


def pack(archive: Path, reference: str, tree: Path, command: Sequence[str]) -> None:
    """Write a directory tree as an image; all files belong to root, but home folders to their user."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(tree.iterdir()):
            tar.add(entry, arcname=entry.name, filter=_as_root)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": _MACHINES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Cmd": list(command),
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "ci/kubernetes"}],
    }
    text = json.dumps(config).encode()
    name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for member, content in ((name, text), ("manifest.json", json.dumps(manifest).encode())):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        tar.add(layer, arcname="layer.tar")
    layer.unlink()


def load(archive: Path, reference: str, *, ctr: Path, socket: Path, snapshotter: str) -> None:
    """Load an archive into a containerd, and let what is in it have this name, whatever it calls itself.

    Raises:
        ClusterError: It does not take it, or several images are in it and none has this name.
    """
    client = [str(ctr), "-a", str(socket), "-n", "k8s.io", "images"]
    said = _call(
        [*client, "import", "--snapshotter", snapshotter, str(archive)], f"containerd takes no {archive}"
    )
    if _call([*client, "ls", "--quiet", f"name=={reference}"], "containerd does not answer").strip():
        return
    names = re.findall(r"^unpacking (\S+) \(", said, re.MULTILINE)
    if len(names) != 1:
        raise ClusterError(f"{archive} holds {', '.join(names) or 'no image with a name'}, not one image")
    _call([*client, "tag", names[0], reference], f"containerd does not call it {reference}")


def _call(argv: Sequence[str], trouble: str) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{trouble}: no end within 600 s") from error
    if done.returncode != 0:
        raise ClusterError(f"{trouble}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 1000 if info.name.startswith("home/") else 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info


def _pause(tree: Path, busybox: Path) -> None:
    (tree / "bin").mkdir()
    shutil.copy(busybox, tree / "bin/busybox")


def _busybox(tree: Path, busybox: Path) -> None:
    _furnish(tree)
    (tree / "bin").mkdir()
    shutil.copy(busybox, tree / "bin/busybox")
    done = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, timeout=300, check=True)
    for name in done.stdout.split():
        if name != "busybox":
            (tree / "bin" / name).symlink_to("busybox")


def _host(tree: Path, _: Path) -> None:
    """Make a tree that is nothing without this machine's /usr mounted into it: its links are this machine's."""
    _furnish(tree)
    (tree / "usr").mkdir()
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        place = Path("/") / name
        if place.is_symlink():
            (tree / name).symlink_to(place.readlink())
        elif place.is_dir():
            (tree / name).mkdir()  # where it would have to be mounted as well


def _furnish(tree: Path) -> None:
    for name in ("etc", "proc", "sys", "dev", "root", "run", "var", "home", "home/mlhpc"):
        (tree / name).mkdir()
    for name in ("tmp", "var/tmp"):
        (tree / name).mkdir()
        (tree / name).chmod(0o1777)
    (tree / "etc/passwd").write_text(_ACCOUNTS, encoding="ascii")
    (tree / "etc/group").write_text(_GROUP, encoding="ascii")
    (tree / "etc/nsswitch.conf").write_text(
        "passwd: files\ngroup: files\nhosts: files dns\n", encoding="ascii"
    )
