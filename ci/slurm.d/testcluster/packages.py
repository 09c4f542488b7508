"""The Debian packages that make a Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import ClusterError

#: Where Debian puts daemons; not on everybody's PATH.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SLURM = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "unshare": "util-linux",
}
_DATABASE = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
#: Without a program of their own. The plug-ins are only recommended by the daemons' packages.
_PLUGINS = ["slurm-wlm-basic-plugins"]
_DATABASE_PLUGINS = ["slurm-wlm-mysql-plugin"]


def missing(*, database: bool) -> list[str]:
    """Return the packages without which the cluster cannot start, empty when nothing is missing."""
    programs = {**_SLURM, **(_DATABASE if database else {})}
    absent = [package for program, package in programs.items() if shutil.which(program, path=PATH) is None]
    return sorted(absent + (_PLUGINS if absent else []) + (_DATABASE_PLUGINS if absent and database else []))


def install(*, database: bool) -> None:
    """Install what is missing; Debian's own services of these packages are not started.

    Raises:
        ClusterError: Not allowed or not possible; names the packages.
    """
    packages = missing(database=database)
    if not packages:
        return
    command = "apt-get install --no-install-recommends " + " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"these packages are missing: on Debian or Ubuntu, run as root: {command}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    lock = "DPkg::Lock::Timeout=300"
    with _services_stay_off():
        _apt(["apt-get", "-qq", "-o", lock, "update"], environment)
        _apt(
            ["apt-get", "-qq", "-o", lock, "install", "-y", "--no-install-recommends", *packages], environment
        )
    if left := missing(database=database):
        raise ClusterError(f"still missing after `{command}`: {', '.join(left)}")


@contextlib.contextmanager
def _services_stay_off() -> Iterator[None]:
    """Keep packages from starting their services: invoke-rc.d(8) asks this program, 101 means no."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():  # an image that has its own policy keeps it
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def _apt(argv: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False
    )  # fmt: skip
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
