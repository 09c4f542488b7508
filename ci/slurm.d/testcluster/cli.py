"""The commands of ``ci/slurm``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from testcluster import box, packages, roots, users
from testcluster.cluster import Cluster, Wish
from testcluster.configuration import ACCOUNTING, NODES
from testcluster.errors import ClusterError, UnfitMachineError


def main() -> int:
    """Run one command.

    Returns:
        0 done, 1 it could not be done, 2 wrong usage, 3 ``status``: not all of it runs, 4 not on this machine.
    """
    arguments = _parser().parse_args()
    try:
        cluster = Cluster(arguments.directory.absolute())
        return int(arguments.action(cluster, arguments) or 0)
    except ClusterError as error:
        sys.stderr.write(f"ci/slurm: {error}\n")
        return 4 if isinstance(error, UnfitMachineError) else 1
    except OSError as error:
        sys.stderr.write(f"ci/slurm: {error.filename or ''}: {error.strerror or error}\n")
    return 1


def _up(cluster: Cluster, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    cgroup = None if arguments.cgroup is None else arguments.cgroup == "v1"
    root, install = None, not arguments.no_install
    if arguments.release:
        if cgroup:
            raise ClusterError("--cgroup v1 goes with this machine's own Slurm, not with --release")
        root = roots.ensure(arguments.release, arguments.roots, mirror=arguments.mirror, install=install)
    else:
        packages.check(database=(arguments.accounting or "dbd") == "dbd", install=install)
    binds = tuple(path.absolute() for path in arguments.bind)
    with cluster.daemons.locked():
        users.add(cluster, arguments.user)
        users.watch(cluster)  # before there is anything: we may be killed together with the user
        cluster.up(Wish(arguments.accounting, cgroup, arguments.port, arguments.release, root, binds))
    settings = cluster.settings()
    sys.stderr.write(
        f"ci/slurm: up in {time.monotonic() - began:.1f} s: accounting {settings.accounting}, port {settings.port}, "
        f"{cluster.directory}{f', Slurm of {settings.release}' if settings.release else ''}\n"
    )


def _down(cluster: Cluster, arguments: argparse.Namespace) -> None:
    users.leave(cluster, arguments.user, purge=arguments.purge)


def _status(cluster: Cluster, _: argparse.Namespace) -> int:
    names = cluster.expected()
    for name in names:
        process = cluster.daemons.recorded(name)
        sys.stdout.write(
            f"{name:<16} {f'pid {process.pid}' if cluster.alive(name) and process else 'dead'}\n"
        )
    states = cluster.node_states() if cluster.alive("slurmctld") else {}
    for node in NODES:
        sys.stdout.write(f"{node:<16} {states.get(node, 'unknown')}\n")
    return 0 if all(map(cluster.alive, names)) and len(states) == len(NODES) else 3


def _env(cluster: Cluster, _: argparse.Namespace) -> None:
    settings = cluster.settings()
    sys.stdout.write(f"export SLURM_CONF={shlex.quote(str(cluster.conf))}\n")
    sys.stdout.write(f"export MLHPC_TEST_PYTHON={shlex.quote(str(box.interpreter()))}\n")
    if settings.root:  # a shell joins the two words
        sys.stdout.write(f'export PATH={shlex.quote(str(cluster.directory / "bin"))}:"$PATH"\n')


def _install(_: Cluster, arguments: argparse.Namespace) -> None:
    if arguments.release:
        roots.ensure(arguments.release, arguments.roots, mirror=arguments.mirror, install=True)
        return
    packages.check(database=True, tests=True, install=True)


def _watch(cluster: Cluster, _: argparse.Namespace) -> None:
    users.keep_watch(cluster)


def _fault(cluster: Cluster, arguments: argparse.Namespace) -> None:
    cluster.settings()
    method = getattr(cluster, arguments.command.replace("-", "_"))
    with cluster.daemons.locked():
        method(*([arguments.node] if "node" in arguments else []))


def _cache(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pytest-mlhpc" / name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ci/slurm", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--directory", type=Path, default=_cache("slurm"), help="where it lives (%(default)s)"
    )
    user = argparse.ArgumentParser(add_help=False)
    user.add_argument(
        "--for", dest="user", type=int, metavar="PID",
        help="only while this process lives: the cluster goes down, directory and all, with the last of its users",
    )  # fmt: skip
    release = argparse.ArgumentParser(add_help=False)
    release.add_argument(
        "--release", choices=roots.RELEASES, help="Slurm of this release of Debian, in a root of its own"
    )
    release.add_argument(
        "--roots",
        type=Path,
        default=_cache("roots"),
        metavar="DIRECTORY",
        help="where such roots are kept (%(default)s)",
    )
    release.add_argument(
        "--mirror",
        metavar="ADDRESS",
        help="where such a root comes from (default: where this machine's packages do)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, action: object, words: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words, parents=[common, *parents])
        made.set_defaults(action=action)
        return made

    up = command("up", _up, "start what does not run yet; wait until all nodes serve", user, release)
    up.add_argument(
        "--accounting", choices=ACCOUNTING, help="dbd: slurmdbd and MariaDB (default); filetxt: sacct -c"
    )
    up.add_argument("--cgroup", choices=("v1", "none"), help="v1: memory limits are kept (default none)")
    up.add_argument("--port", type=int, help="first of the ports (default: any free range)")
    up.add_argument(
        "--bind", type=Path, action="append", default=[], metavar="PATH",
        help="with --release: also seen in there, besides checkout, home, temporary folder and Python (repeatable)",
    )  # fmt: skip
    up.add_argument("--no-install", action="store_true", help="install no package; say what is missing")
    down = command("down", _down, "end all that `up` started, and every job", user)
    down.add_argument("--purge", action="store_true", help="remove the directory as well")
    command("status", _status, "show daemons and nodes; exit 3 unless all run")
    command("env", _env, 'print what a shell needs: eval "$(ci/slurm env)"')
    command(
        "install",
        _install,
        "install Debian's packages, those that tests run in jobs as well; start nothing",
        release,
    )
    for name, words in (("kill-node", "cut a node's power"), ("start-node", "start it again")):
        command(name, _fault, words).add_argument("node", choices=NODES)
    for name, words in (
        ("stop-controller", "end slurmctld; jobs run on"),
        ("start-controller", "start it from its saved state"),
        ("stop-database", "end slurmdbd and MariaDB"),
        ("start-database", "start them again"),
    ):
        command(name, _fault, words)
    command("watch", _watch, "(internal) take the cluster down when the last process of --for has ended")
    return parser
