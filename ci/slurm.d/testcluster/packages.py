"""The Debian packages that make a Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import ClusterError, UnfitMachineError

#: Where Debian puts daemons; not on everybody's PATH.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_LIBRARIES = Path("/usr/lib")

_SLURM = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "unshare": "util-linux",
}
_DATABASE = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
#: Plug-ins that the daemons' packages only recommend.
_PLUGINS = {"auth_munge.so": "slurm-wlm-basic-plugins"}
_DATABASE_PLUGINS = {"accounting_storage_mysql.so": "slurm-wlm-mysql-plugin"}
#: What tests run in jobs; the cluster itself needs none of it.
_FOR_TESTS = {
    "mpirun": "openmpi-bin", "faketime": "faketime", "fio": "fio", "hpcc": "hpcc", "lmp": "lammps",
}  # fmt: skip


def missing(*, database: bool, tests: bool = False) -> list[str]:
    """Return the packages without which the cluster (or, with ``tests``, some test) cannot start."""
    programs = {**_SLURM, **(_DATABASE if database else {}), **(_FOR_TESTS if tests else {})}
    plugins = {**_PLUGINS, **(_DATABASE_PLUGINS if database else {})}
    absent = [package for program, package in programs.items() if shutil.which(program, path=PATH) is None]
    if shutil.which("dpkg", path=PATH):  # others put plug-ins elsewhere
        absent += [
            package for name, package in plugins.items() if not any(_LIBRARIES.glob(f"*/slurm*/{name}"))
        ]
        if tests and not any(_LIBRARIES.glob("*/openmpi/include/mpi.h")):
            absent.append("libopenmpi-dev")  # tests build a program with MPI
    return sorted(absent)


def check(*, database: bool, install: bool, tests: bool = False) -> None:
    """Make sure that a cluster can start here.

    Args:
        database: Whether MariaDB and slurmdbd are needed.
        tests: Whether what tests run in jobs is needed, too.
        install: Install what is missing; Debian's own services of these packages are not started.

    Raises:
        UnfitMachineError: Something is missing; names it and the command that helps.
    """
    be_root()
    packages = missing(database=database, tests=tests)
    if not packages:
        return
    command = "apt-get install --no-install-recommends " + " ".join(packages)
    if not install or shutil.which("apt-get") is None:
        raise UnfitMachineError(f"Slurm is missing; on Debian or Ubuntu, as root: {command}")
    _install(packages)
    if left := missing(database=database, tests=tests):
        raise ClusterError(f"still missing after `{command}`: {', '.join(left)}")


def be_root() -> None:
    """Refuse to go on as somebody else.

    Raises:
        UnfitMachineError: We are not root.
    """
    if os.geteuid() != 0:
        raise UnfitMachineError(
            "run this as root: nodes need namespaces, device nodes and jobs of several users"
        )


def need(programs: dict[str, str]) -> None:
    """Install what is missing of these: program -> package.

    Raises:
        UnfitMachineError: It cannot be installed.
    """
    absent = [package for program, package in programs.items() if shutil.which(program, path=PATH) is None]
    if not absent:
        return
    if shutil.which("apt-get") is None:
        raise UnfitMachineError(f"missing: {', '.join(absent)}; this works on Debian")
    _install(absent)


def _install(packages: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    lock = "DPkg::Lock::Timeout=300"
    with _services_stay_off():
        _apt(["apt-get", "-qq", "-o", lock, "update"], environment)
        _apt(
            ["apt-get", "-qq", "-o", lock, "install", "-y", "--no-install-recommends", *packages], environment
        )


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
