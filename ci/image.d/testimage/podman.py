"""Podman with a store of its own in one directory: nothing of this machine's images is seen or changed."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from testcluster.errors import ClusterError

#: Longest wait for one step, in seconds: a build takes two minutes on an idle machine.
LIMIT_S = 1800.0


def step(argv: Sequence[str], *, output: int | None = subprocess.DEVNULL) -> None:
    """Run a command; what it says of errors is the reader's.

    Raises:
        ClusterError: It failed, or did not end.
    """
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace",
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(argv)}` did not end within {LIMIT_S:.0f} s") from error
    if done.returncode:
        raise ClusterError(f"`{' '.join(argv)}` failed ({done.returncode}): {done.stderr.strip()[-3000:]}")


def _limits() -> list[str]:
    # Podman would raise these, which a machine that is a container itself may refuse.
    most = 4096
    found = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    words = []
    for name, limit in found.items():
        hard = resource.getrlimit(limit)[1]
        words += ["--ulimit", f"{name}={most if hard == resource.RLIM_INFINITY else min(most, hard)}"]
    return words


class Podman:
    """Images below one directory, which is made when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._driver = ""

    def argv(self, *words: str) -> list[str]:
        """Return the command line of a podman with this store."""
        if not self._driver:
            # Overlays need a kernel and a file system below that take them; copies of all layers work everywhere.
            probe = self._ask([*self._program("overlay"), "info"])
            self._driver = "overlay" if probe.returncode == 0 else "vfs"
        return [*self._program(self._driver), *words]

    def _program(self, driver: str) -> list[str]:
        # No systemd, no journal, no user's settings: this runs in containers, too.
        return [
            "podman", "--root", str(self.directory / "storage"), "--runroot", str(self.directory / "run"),
            "--storage-driver", driver, "--cgroup-manager", "cgroupfs", "--events-backend", "none", "--runtime", "runc",
            "--tmpdir", str(self.directory / "tmp"),
        ]  # fmt: skip

    def has(self, image: str) -> bool:
        """Return whether an image is there."""
        return self._ask(self.argv("image", "exists", image)).returncode == 0

    def inspect(self, image: str) -> str:
        """Return what podman knows of an image, as JSON.

        Raises:
            ClusterError: It is not there.
        """
        done = self._ask(self.argv("image", "inspect", image))
        if done.returncode:
            raise ClusterError(f"there is no {image} in {self.directory}; `ci/image build` makes it")
        return done.stdout

    def python_of(self, image: str) -> str:
        """Return the version of an image's python3, like ``3.11``."""
        words = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = self._ask(self._run(image, ["python3", "-c", words], user="65534"))
        if done.returncode:
            raise ClusterError(f"python3 does not run in {image}: {done.stderr.strip()[-1000:]}")
        return done.stdout.strip()

    def import_tree(self, tree: Path, image: str) -> None:
        """Make an image of one layer of a directory tree."""
        pack = ["tar", "-C", str(tree), "--one-file-system", "--numeric-owner", "-c", "."]
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with subprocess.Popen(pack, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as tar:
            try:
                done = subprocess.run(
                    self.argv("import", "--quiet", "--change", path, "-", image), stdin=tar.stdout,
                    capture_output=True, text=True, timeout=LIMIT_S, check=False,
                )  # fmt: skip
            finally:
                tar.kill()  # it has ended, or nobody reads any more
        if done.returncode:
            raise ClusterError(f"podman imports no {image}: {done.stderr.strip()[-1000:]}")

    def build(self, folder: Path, image: str, base: str, wheels: Path, *, revision: str) -> None:
        """Build the Dockerfile of a folder; the network and a registry are not used."""
        # chroot: steps of a build need no cgroups and no namespaces that a container might refuse.
        words = [
            "build", "--isolation", "chroot", "--pull-never", "--layers=false", "--build-arg", f"BASE={base}",
            "--build-arg", f"REVISION={revision}", "--build-context", f"wheels={wheels}", "--tag", image, str(folder),
        ]  # fmt: skip
        step(self.argv(*words), output=sys.stderr.fileno())
        self._ask(self.argv("image", "prune", "--force"))  # stages, and what had this name before

    def save(self, image: str, archive: Path) -> None:
        """Write an image as `docker save` does."""
        archive.unlink(missing_ok=True)
        step(self.argv("save", "--quiet", "--format", "docker-archive", "--output", str(archive), image))

    def run(self, image: str, words: Sequence[str], *, user: str | None) -> int:
        """Run a command in a container that may do as little as a pod may; return its exit status."""
        self.inspect(image)  # else podman would look for a registry
        return subprocess.run(
            self._run(image, words, user=user), stdin=subprocess.DEVNULL, check=False
        ).returncode

    def _run(self, image: str, words: Sequence[str], *, user: str | None) -> list[str]:
        return self.argv(
            "run", "--rm", "--pull", "never", "--read-only", "--tmpfs", "/tmp:mode=1777", "--network", "none",  # noqa: S108 - in the container
            "--cap-drop", "all", "--security-opt", "no-new-privileges", "--log-driver", "none", *_limits(),
            *(["--user", user] if user else []), image, *words,
        )  # fmt: skip

    def remove(self) -> None:
        """Remove the directory; what podman left mounted there is unmounted before."""
        if not self.directory.exists():
            return
        for mount in reversed(list(self._mounts())):
            step(["umount", mount])
        shutil.rmtree(self.directory)

    def _mounts(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            yield from (line.split()[4] for line in lines if line.split()[4].startswith(f"{self.directory}/"))

    def _ask(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.directory.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env={**os.environ, "TMPDIR": str(self.directory)},
        )  # fmt: skip
