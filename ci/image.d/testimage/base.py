"""A base image: Debian's Python in the smallest system that debootstrap makes."""

from __future__ import annotations

import shutil
from pathlib import Path

from testcluster import roots
from testcluster.errors import ClusterError

from testimage.podman import Podman

#: The release with the Python that this machine's Debian has, or the next older one.
RELEASE = "bookworm"
#: venv brings pip to the build; nothing else is needed.
_PACKAGES = ("python3", "python3-venv")
#: What no container reads: lists and archives of packages, manuals, translations.
_USELESS = (
    "var/lib/apt/lists",
    "var/cache/apt",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/log",
)


def make(podman: Podman, image: str) -> None:
    """Make it from the mirror that this machine's apt uses.

    Raises:
        ClusterError: debootstrap or podman failed.
    """
    tree = podman.directory / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    try:
        _debootstrap(tree)
        for name in _USELESS:
            shutil.rmtree(tree / name, ignore_errors=True)
            (tree / name).mkdir(parents=True)
        # The address of the mirror is this machine's business.
        (tree / "etc/apt/sources.list").write_text("", encoding="ascii")
        podman.import_tree(tree, image)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def _debootstrap(tree: Path) -> None:
    # How this machine reaches its mirror is read in one place, for `ci/slurm --release` and for us.
    mirror = roots.own_mirror()
    settings = roots.apt_settings()
    proxies = {
        f"{name.split('::')[1]}_proxy": value for name, value in settings.items() if name.endswith("Proxy")
    }
    packages = f"--include={','.join(_PACKAGES)}"
    argv = [*roots.ALONE, "debootstrap", "--variant=minbase", packages, RELEASE, str(tree), mirror]
    roots.step(argv, proxies)
    if not (tree / "usr/bin/python3").exists():
        raise ClusterError(f"debootstrap made no Python in {tree}")
