"""The programs of a cluster: Debian's packages, unpacked into a folder of ours, and the four that Debian does not pack."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from testcluster import packages
from testcluster.errors import UnfitMachineError

from testkubernetes import debian

VERSION = "1.20.2"
SERVER = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
#: A folder or an archive that has the programs of SERVER; for whom building them takes too long.
VARIABLE = "MLHPC_KUBERNETES_BINARIES"
#: Counts up when what lies in our folders changes; a folder of another number is left alone and not used.
_RECIPE = 1
_PACKAGES = (
    "etcd-server",
    "containerd",
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "kubernetes-client",
)
#: Of the machine itself: program -> package.
_TOOLS = {"openssl": "openssl", "ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_PROGRAMS = {
    "etcd": "usr/bin/etcd", "containerd": "usr/bin/containerd", "ctr": "usr/bin/ctr", "runc": "usr/sbin/runc",
    "busybox": "bin/busybox", "kubectl": "usr/bin/kubectl",
}  # fmt: skip


def ensure(folder: Path, environment: Mapping[str, str], *, install: bool) -> dict[str, Path]:
    """Return name -> path of every program, and ``prefix``: where Debian's packages are unpacked.

    Args:
        folder: Where they are kept, for all clusters of this user.
        environment: May name ready-built programs, see VARIABLE.
        install: Whether what is missing may be fetched and built.

    Raises:
        UnfitMachineError: Something is missing and cannot be had, or may not be.
    """
    prefix = folder / f"packages-{_RECIPE}"
    if not prefix.is_dir():
        _check(install, f"Debian's packages are not in {prefix}")
        _make(prefix, lambda making: debian.unpack(making, _PACKAGES))
    found = {name: prefix / path for name, path in _PROGRAMS.items()}
    server = _server(folder, environment.get(VARIABLE, ""), install=install)
    return {"prefix": prefix, **found, **{name: server / name for name in SERVER}}


def _server(folder: Path, given: str, *, install: bool) -> Path:
    if given and Path(given).is_dir():
        return _complete(Path(given))
    server = folder / f"server-{VERSION}-{_RECIPE}"
    if server.is_dir():
        return _complete(server)
    if given:
        _make(server, lambda making: _unpack(making, Path(given)))
        return _complete(server)
    _check(install, f"no Kubernetes server in {server}, and {VARIABLE} names none")
    from testkubernetes import build  # noqa: PLC0415 - needed once, on machines without the programs

    sys.stderr.write(
        f"ci/kubernetes: building Kubernetes {VERSION} in {server}: five minutes or more, once\n"
    )
    _make(server, build.build)
    return _complete(server)


def _complete(server: Path) -> Path:
    missing = [name for name in SERVER if not os.access(server / name, os.X_OK)]
    if missing:
        raise UnfitMachineError(f"{server} has no program {', '.join(missing)}")
    return server


def _unpack(making: Path, archive: Path) -> None:
    making.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                file = tar.extractfile(member) if name in SERVER and member.isfile() else None
                if file is not None:
                    with file, (making / name).open("wb") as out:
                        shutil.copyfileobj(file, out)
                    (making / name).chmod(0o755)
    except (OSError, tarfile.TarError) as error:
        raise UnfitMachineError(f"{VARIABLE} names {archive}, which cannot be unpacked: {error}") from error
    _complete(making)


def _check(install: bool, trouble: str) -> None:
    if not install:
        raise UnfitMachineError(f"{trouble}; `ci/kubernetes install` helps (or {VARIABLE}=FOLDER)")
    if shutil.which("apt-get", path=packages.PATH) is None:
        raise UnfitMachineError(
            f"{trouble}; they are made from Debian's packages, and this machine has no apt-get"
        )


def _make(path: Path, how: Callable[[Path], None]) -> None:
    """Make a folder that has another name until it is whole; one that was cut off is removed and made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f"{path.name}.lock")):
        if path.is_dir():  # somebody made it while we waited
            return
        began, making = time.monotonic(), path.with_name(f"{path.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        how(making)
        making.rename(path)
        sys.stderr.write(f"ci/kubernetes: made {path} in {time.monotonic() - began:.0f} s\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_tools(*, api_only: bool) -> None:
    """Refuse a machine that lacks what we call.

    Raises:
        UnfitMachineError: Names what is missing.
    """
    if not api_only:
        packages.be_root()
    tools = {"openssl": "openssl"} if api_only else _TOOLS
    absent = sorted(
        {package for program, package in tools.items() if not shutil.which(program, path=packages.PATH)}
    )
    if absent:
        raise UnfitMachineError(
            f"missing, as root: apt-get install --no-install-recommends {' '.join(absent)}"
        )


def install_tools() -> None:
    """Install what we call and this machine lacks; only this needs root."""
    packages.need(_TOOLS)


def run(
    argv: list[str], *, limit_s: float, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program to its end and return its output.

    Raises:
        UnfitMachineError: It fails or does not end, with its last words.
    """
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=None if environment is None else dict(environment), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=limit_s, check=False,
        )  # fmt: skip
        trouble = f"failed ({done.returncode}): {done.stdout.strip()[-2000:]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        trouble = f"did not end within {limit_s:.0f} s"
    except OSError as error:
        trouble = f"cannot be started: {error}"
    if trouble:
        raise UnfitMachineError(f"`{' '.join(argv[:6])}` {trouble}")
    return done.stdout
