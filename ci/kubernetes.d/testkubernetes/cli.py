"""The commands of ``ci/kubernetes``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from testcluster import users
from testcluster.errors import ClusterError, UnfitMachineError

from testkubernetes import configuration, host, parts
from testkubernetes.cluster import Cluster, Wish
from testkubernetes.settings import MOST_NODES, node_name


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
        sys.stderr.write(f"ci/kubernetes: {error}\n")
        return 4 if isinstance(error, UnfitMachineError) else 1
    except OSError as error:
        sys.stderr.write(f"ci/kubernetes: {error.filename or ''}: {error.strerror or error}\n")
    return 1


def _up(cluster: Cluster, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    parts.check_tools(api_only=arguments.api_only)
    programs = parts.ensure(arguments.parts, os.environ, install=not arguments.no_install)
    wish = Wish(
        port=arguments.port, nodes=0 if arguments.api_only else arguments.nodes, cpus=arguments.cpus, gpus=arguments.gpus,
        log_max_size=arguments.log_max_size, log_files=arguments.log_files,
        node_grace_s=arguments.node_grace,
    )  # fmt: skip
    with cluster.daemons.locked():
        users.add(cluster, arguments.user)
        users.watch(cluster)  # before there is anything: we may be killed together with the user
        cluster.up(wish, programs)
    settings = cluster.settings()
    sys.stderr.write(
        f"ci/kubernetes: up in {time.monotonic() - began:.1f} s: Kubernetes {parts.VERSION}, {settings.nodes} node(s), "
        f"{settings.server}, KUBECONFIG={cluster.directory}/kubeconfig\n"
    )


def _down(cluster: Cluster, arguments: argparse.Namespace) -> None:
    users.leave(cluster, arguments.user, purge=arguments.purge)


def _status(cluster: Cluster, _: argparse.Namespace) -> int:
    names = cluster.expected()
    for name in names:
        process = cluster.daemons.recorded(name)
        lives = cluster.daemons.alive(name) and process is not None
        sys.stdout.write(f"{name:<24} {f'pid {process.pid}' if lives and process else 'dead'}\n")
    states = cluster.api().node_states()
    wanted = [node_name(number) for number in range(1, cluster.settings().nodes + 1)]
    for name in sorted({*states, *wanted}):
        sys.stdout.write(f"{name:<24} {states.get(name, 'unknown')}\n")
    sys.stdout.write(f"{'audit log':<24} {configuration.audit_log(cluster.directory)}\n")
    well = all(map(cluster.daemons.alive, names)) and all(states.get(name) == "Ready" for name in wanted)
    return 0 if well else 3


def _env(cluster: Cluster, _: argparse.Namespace) -> None:
    cluster.settings()
    variables = {
        "KUBECONFIG": cluster.directory / "kubeconfig",
        "MLHPC_KUBERNETES_AUDIT": configuration.audit_log(cluster.directory),
        "MLHPC_TEST_NAMESPACE": "default",
        **host.variables(),
    }
    for name, value in variables.items():
        sys.stdout.write(f"export {name}={shlex.quote(str(value))}\n")
    sys.stdout.write(f'export PATH={shlex.quote(str(cluster.directory / "bin"))}:"$PATH"\n')


def _install(_: Cluster, arguments: argparse.Namespace) -> None:
    parts.install_tools()
    parts.ensure(arguments.parts, os.environ, install=True)


def _watch(cluster: Cluster, _: argparse.Namespace) -> None:
    users.keep_watch(cluster)


def _gpus(cluster: Cluster, arguments: argparse.Namespace) -> None:
    cluster.pretend(arguments.count, arguments.resource, arguments.node)


def _image(cluster: Cluster, arguments: argparse.Namespace) -> None:
    programs = parts.ensure(arguments.parts, os.environ, install=False)
    with cluster.daemons.locked():
        cluster.load_image(arguments.reference, arguments.source, programs)


def _kill(cluster: Cluster, arguments: argparse.Namespace) -> None:
    with cluster.daemons.locked():
        cluster.kill(arguments.name, politely=arguments.politely)


def _start(cluster: Cluster, arguments: argparse.Namespace) -> None:
    programs = parts.ensure(arguments.parts, os.environ, install=False)
    with cluster.daemons.locked():
        cluster.start(arguments.name, programs)


def _cache(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pytest-mlhpc" / name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ci/kubernetes", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--directory", type=Path, default=_cache("kubernetes"), help="where it lives (%(default)s)"
    )
    common.add_argument(
        "--parts", type=Path, default=_cache("kubernetes-parts"), metavar="DIRECTORY",
        help=f"where programs are kept (%(default)s); {parts.VARIABLE} may name a folder or an archive of the server's",
    )  # fmt: skip
    user = argparse.ArgumentParser(add_help=False)
    user.add_argument(
        "--for", dest="user", type=int, metavar="PID",
        help="only while this process lives: the cluster goes down, directory and all, with the last of its users",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, action: object, words: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words, parents=[common, *parents])
        made.set_defaults(action=action)
        return made

    up = command("up", _up, "start what does not run yet; wait until all nodes are Ready", user)
    up.add_argument("--nodes", type=int, choices=range(1, MOST_NODES + 1), help="how many (default 1)")
    up.add_argument("--api-only", action="store_true", help="no node, no root: pods stay Pending")
    up.add_argument("--gpus", type=int, help="nvidia.com/gpu that each node pretends to have (default 0)")
    up.add_argument("--cpus", type=int, help="what a node says it has (default 16)")
    up.add_argument(
        "--log-max-size", metavar="SIZE", help="of a container's log before it is rotated (default 10Mi)"
    )
    up.add_argument("--log-files", type=int, metavar="COUNT", help="kept of a container's log (default 5)")
    up.add_argument(
        "--node-grace",
        type=int,
        metavar="SECONDS",
        help="how long a node is silent that counts as lost (default 600)",
    )
    up.add_argument("--port", type=int, help="first of the ports (default: any free range)")
    up.add_argument("--no-install", action="store_true", help="fetch and build nothing; say what is missing")
    down = command("down", _down, "end all that `up` started, and every pod", user)
    down.add_argument("--purge", action="store_true", help="remove the directory as well")
    command("status", _status, "show daemons and nodes; exit 3 unless all run")
    command("env", _env, 'print what a shell needs: eval "$(ci/kubernetes env)"')
    command("install", _install, "fetch packages, unpack or build the server's programs; start nothing")
    gpus = command("gpus", _gpus, "let a node pretend to have devices")
    gpus.add_argument("count", type=int)
    gpus.add_argument("--resource", default="nvidia.com/gpu", help="(%(default)s)")
    gpus.add_argument("--node", default=node_name(1), help="(%(default)s)")
    image = command("image", _image, "load an image: a directory tree, or an archive that has its own name")
    image.add_argument("reference", help="what pods call it: HOST/NAME:TAG")
    image.add_argument("source", type=Path, metavar="ROOTFS")
    kill = command("kill", _kill, "kill a daemon (kube-apiserver, kubelet ...) or cut the power of a node")
    kill.add_argument("name", metavar="NAME")
    kill.add_argument("--politely", action="store_true", help="SIGTERM, and time to end")
    command("start", _start, "start it again").add_argument("name", metavar="NAME")
    commands.add_parser("watch", parents=[common]).set_defaults(action=_watch)  # for ourselves
    return parser
