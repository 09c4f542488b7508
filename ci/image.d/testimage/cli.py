"""The commands of ``ci/image``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from testcluster import packages
from testcluster.errors import ClusterError, UnfitMachineError

from testimage import base, wheels
from testimage.podman import Podman, step

ROOT = Path(__file__).resolve().parents[3]
BASE, IMAGE = "localhost/mlhpc-base:1", "localhost/pytest-mlhpc:test"
#: Its name in a cluster of `ci/kubernetes`.
IN_CLUSTER = "mlhpc.test/pytest-mlhpc:1"
_PROGRAMS = {"podman": "podman", "runc": "runc", "debootstrap": "debootstrap"}


def main() -> int:
    """Run one command.

    Returns:
        0 done, 1 it could not be done, 2 wrong usage, 4 not on this machine; of ``run``: what the command returned.
    """
    arguments = _parser().parse_args()
    try:
        packages.be_root()
        if arguments.install:
            packages.need(_PROGRAMS)
        elif missing := [
            program for program in _PROGRAMS if shutil.which(program, path=packages.PATH) is None
        ]:
            raise UnfitMachineError(
                f"missing: {', '.join(missing)}; `apt-get install {' '.join(_PROGRAMS.values())}`"
            )
        return int(arguments.action(arguments) or 0)
    except ClusterError as error:
        sys.stderr.write(f"ci/image: {error}\n")
        return 4 if isinstance(error, UnfitMachineError) else 1
    except OSError as error:
        sys.stderr.write(f"ci/image: {error.filename or ''}: {error.strerror or error}\n")
    return 1


def _build(arguments: argparse.Namespace) -> None:
    podman = Podman(arguments.directory)
    began = time.monotonic()
    if not podman.has(BASE):
        base.make(podman, BASE)
        sys.stderr.write(f"ci/image: {BASE} made in {time.monotonic() - began:.0f} s\n")
    folder = arguments.directory / "wheels"
    began = time.monotonic()
    wheels.fetch(ROOT, folder, podman.python_of(BASE))
    sys.stderr.write(f"ci/image: wheels fetched in {time.monotonic() - began:.0f} s\n")
    began = time.monotonic()
    podman.build(ROOT, IMAGE, BASE, folder, revision=_revision())
    sys.stderr.write(f"ci/image: {IMAGE} built in {time.monotonic() - began:.0f} s\n")


def _load(arguments: argparse.Namespace) -> None:
    podman = Podman(arguments.directory)
    archive = arguments.directory / "image.tar"
    try:
        podman.save(IMAGE, archive)
        cluster = ["--directory", str(arguments.kubernetes)] if arguments.kubernetes else []
        step([str(ROOT / "ci/kubernetes"), "image", IN_CLUSTER, str(archive), *cluster])
    finally:
        archive.unlink(missing_ok=True)


def _run(arguments: argparse.Namespace) -> int:
    return Podman(arguments.directory).run(IMAGE, arguments.words, user=arguments.user)


def _inspect(arguments: argparse.Namespace) -> None:
    sys.stdout.write(Podman(arguments.directory).inspect(IMAGE))


def _clean(arguments: argparse.Namespace) -> None:
    Podman(arguments.directory).remove()


def _revision() -> str:
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "rev-parse", "HEAD"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ci/image", description=__doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-mlhpc/image"
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--directory", type=Path, default=cache, help="where images are kept (%(default)s)")
    common.add_argument(
        "--no-install", dest="install", action="store_false", help="do not install podman and debootstrap"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, action: object, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, parents=[common], help=words, description=words)
        made.set_defaults(action=action)
        return made

    command("build", _build, f"build {IMAGE} over a base of debootstrap, from wheels that pip fetches here")
    load = command(
        "load", _load, f"load it into the running cluster of ci/kubernetes, where it is {IN_CLUSTER}"
    )
    load.add_argument(
        "--kubernetes", type=Path, metavar="DIRECTORY", help="of the cluster; as of ci/kubernetes"
    )
    run = command("run", _run, "run a command in it: root file system read-only, no network, no capabilities")
    run.add_argument("--user", help="number in place of the image's own")
    run.add_argument("words", nargs="+", metavar="WORD", help="the command, after --")
    command("inspect", _inspect, "print its configuration, history and size, as JSON")
    command("clean", _clean, "remove the directory with all images")
    return parser
