"""Another release of Debian in a folder, with its Slurm: made once by debootstrap, then only read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from testcluster import packages
from testcluster.errors import UnfitMachineError

#: What a folder is made of where it is not a release alone: another one, and packages beside those of that.
_ADDITIONS = {"trixie-mpi": ("trixie", ("openmpi-bin", "python3-torch"))}
RELEASES = ("trixie", *_ADDITIONS)
#: Counts up when what lies in such a folder changes; a folder of another number is left alone and not used.
_RECIPE = 2
#: Slurm and its database; and the libraries that this machine's Python needs in there, most of them those of Debian's own.
_PACKAGES = (
    "munge", "slurm-client", "slurmctld", "slurmd", "slurm-wlm-basic-plugins", "slurmdbd", "slurm-wlm-mysql-plugin",
    "mariadb-server", "python3", "libstdc++6", "libgomp1", "libcrypt1", "libnsl2",
)  # fmt: skip
#: What slurmdbd reads its database with. Trixie's since 11.8.9 gives slurmdbd 24.11.5 no row of any answer ("Number of columns
#: in result (=1) exceeds maximum allowed number of columns (=0)"), so that it does not start; bookworm's 10.11 does.
_DATABASE_LIBRARY = "libmariadb.so.3"
#: Longest wait for one step of the making, in seconds: two minutes on an idle machine.
_LIMIT_S = 1800.0
#: How this machine reaches its mirror, and what it forgives; apt within the folder does the same.
_APT_SETTINGS = (
    "Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until", "Acquire::Check-Date",
)  # fmt: skip
#: Before a command: mounts, and all processes, end with the step; and the step with us, even if we are killed.
ALONE = (
    "setpriv", "--pdeathsig", "KILL",
    "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
)  # fmt: skip
_INSIDE = 'mount -t proc proc "$1/proc" && exec chroot "$@"'


def path_of(release: str, folder: Path) -> Path:
    """Return where the root of a release lies, made or not."""
    return folder / f"{release}-{_RECIPE}"


def ensure(release: str, folder: Path, *, mirror: str | None, install: bool) -> Path:
    """Return the root of a release; make it if it is not there.

    What is being made has another name until it is whole, so that one that was cut off is never used: it is removed and
    made again.

    Args:
        release: One of RELEASES.
        folder: Where roots are kept.
        mirror: Address of Debian packages; None: the one that this machine's apt uses.
        install: Whether to make it, and to install what that takes.

    Raises:
        UnfitMachineError: It cannot be made here, or may not be.
    """
    packages.be_root()
    root = path_of(release, folder)
    if root.is_dir():
        return root
    if not install:
        raise UnfitMachineError(
            f"no Debian {release} in {root}; `ci/slurm install --release {release}` makes it"
        )
    _check_tools()
    mirror = mirror or own_mirror()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{root.name}.lock"):
        if root.is_dir():  # somebody made it while we waited
            return root
        began, making = time.monotonic(), folder / f"{root.name}.making"
        _remove(making)
        sys.stderr.write(f"ci/slurm: making {root} from {mirror}: some minutes, once\n")
        if release in _ADDITIONS:
            base, added = _ADDITIONS[release]
            _extend(making, ensure(base, folder, mirror=mirror, install=install), added)
        else:
            _make(making, release, mirror)
        making.rename(root)
        sys.stderr.write(f"ci/slurm: made in {time.monotonic() - began:.0f} s\n")
    return root


def _make(making: Path, release: str, mirror: str) -> None:
    making.mkdir(mode=0o755)
    proxies = {
        f"{name.split('::')[1]}_proxy": value
        for name, value in apt_settings().items()
        if name.endswith("Proxy")
    }
    step([*ALONE, "debootstrap", "--variant=minbase", release, str(making), mirror], proxies)
    policy = making / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")  # no package starts its service
    policy.chmod(0o755)
    _install(making, _PACKAGES)
    for own in Path("/usr/lib").glob(
        f"*-linux-gnu/{_DATABASE_LIBRARY}"
    ):  # this machine's, which its own slurmdbd takes
        shutil.copyfile(own, making / own.relative_to("/"))
    (making / "etc/hosts").touch()  # nodes put theirs over it


def _extend(making: Path, base: Path, added: Sequence[str]) -> None:
    """Copy *base*, which clusters may be using, and install more there."""
    step([*ALONE, "cp", "--archive", "--reflink=auto", str(base), str(making)], {})
    _install(making, added)


def _install(making: Path, names: Sequence[str]) -> None:
    """Install packages within *making*, by its own apt."""
    options = [word for name, value in apt_settings().items() for word in ("-o", f"{name}={value}")]
    apt = [*ALONE, "sh", "-c", _INSIDE, "sh", str(making), "apt-get", "-qq", *options]
    unsafe = ["-o", "Dpkg::Options::=--force-unsafe-io"]  # a making that is cut off is not used anyway
    step([*apt, "update"], {})
    step([*apt, *unsafe, "install", "-y", "--no-install-recommends", *names], {})
    step([*apt, "clean"], {})


def step(argv: Sequence[str], variables: dict[str, str]) -> None:
    """Run one step of a making, with *variables* added to the environment.

    Raises:
        UnfitMachineError: It failed or did not end in time; with its last words.
    """
    environment = {
        **os.environ,
        "PATH": packages.PATH,
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
        **variables,
    }
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        trouble = f"failed ({done.returncode}): {done.stdout.strip()[-2000:]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        trouble = f"did not end within {_LIMIT_S:.0f} s"
    if trouble:
        raise UnfitMachineError(f"`{' '.join(argv[len(ALONE) :])}` {trouble}")


def _check_tools() -> None:
    probe = subprocess.run(
        [*ALONE, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    if probe.returncode != 0:
        raise UnfitMachineError(
            "--release needs mount namespaces, which this machine refuses (in a container: it needs CAP_SYS_ADMIN): "
            f"{probe.stderr.strip()}"
        )
    packages.need({"debootstrap": "debootstrap"})


def own_mirror() -> str:
    """Return the address from which this machine has its own release.

    Raises:
        UnfitMachineError: It is no Debian, or has no such address.
    """
    # Others have other packages: `bookworm-security`, and what is not Debian's.
    names = {_os_release().get("VERSION_CODENAME", ""), "stable", "oldstable"}
    form = "$(RELEASE) $(COMPONENT) $(REPO_URI)"
    lines = _words_of(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines()
    found = [line.split(maxsplit=2) for line in lines]
    mirrors = [words[2] for words in found if len(words) == 3 and words[0] in names and words[1] == "main"]
    if _os_release().get("ID") != "debian" or not mirrors:
        raise UnfitMachineError(
            "apt on this machine names no mirror of Debian; `ci/slurm --release` takes one: --mirror ADDRESS"
        )
    return mirrors[0]


def _os_release() -> dict[str, str]:
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in lines)}


def apt_settings() -> dict[str, str]:
    """Return how this machine reaches mirrors: those of apt's settings that say something."""
    found = re.findall(r'^(\S+) "(.+)";$', _words_of(["apt-config", "dump", *_APT_SETTINGS]), re.MULTILINE)
    return {name: value for name, value in found if name in _APT_SETTINGS and value != "DIRECT"}


def _words_of(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _remove(making: Path) -> None:
    """Remove what a making left that was cut off.

    Raises:
        UnfitMachineError: Something is mounted there; removing would reach through.
    """
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    below = [words[4] for words in map(str.split, mounts) if words[4].startswith(f"{making}/")]
    if below:
        raise UnfitMachineError(f"{making} was left half made, with {below[0]} mounted; unmount that")
    if making.exists():
        shutil.rmtree(making)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
