"""One service of ``ci/services.d``: a script says how it is installed and started, the rest is the same for all.

A script is as short as this, and is executable::

    from testservices.service import Service, main, unpacked

    def install(service: Service) -> None:      # makes service.parts; idempotent; UnfitMachineError where it cannot be
        unpacked(service.parts, ["influxdb"])

    def start(service: Service) -> dict[str, str]:        # starts what does not run yet; returns what `env` prints
        ...service.daemons.start("influxd", argv); service.daemons.await_service("influxd", check)...

    sys.exit(main("influxdb", install, start, ports=3))

Tests call ``up --directory D --for PID``: the service goes down, directory and all, with the last process that wants it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testcluster import ports as port_ranges
from testcluster import processes, users
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError, UnfitMachineError

MARK = "MLHPC_SERVICE_DIRECTORY"
#: How long a daemon may need to end by itself, and apt to fetch a package, in seconds.
_PATIENCE_S = 120.0
_APT_LIMIT_S = 600.0


def cache() -> Path:
    """Return where programs are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-mlhpc"


@dataclass(frozen=True)
class Service:
    """One service in one directory. ``options`` are the words of ``--option KEY=VALUE``, kept from the first ``up`` on."""

    name: str
    directory: Path
    options: dict[str, str] = field(default_factory=dict)
    first_port: int = 0

    @property
    def daemons(self) -> Daemons:
        """What runs for it: ``start``, ``await_service``, ``alive``, ``end``."""
        return Daemons(self.directory, mark=MARK, variables={})

    @property
    def parts(self) -> Path:
        """Where its programs lie, shared by all directories."""
        return cache() / "services" / self.name

    def down(self, *, purge: bool = False) -> None:
        """End all that runs; with ``purge`` at once, as its directory is removed next."""
        daemons = self.daemons
        if not purge:
            daemons.end(*(name for name in daemons.names() if name != "watcher"), patience_s=_PATIENCE_S)
        processes.end_all(daemons.every_process)
        daemons.forget()


def main(
    name: str,
    install: Callable[[Service], None] | None,
    start: Callable[[Service], dict[str, str]],
    *,
    ports: int = 1,
) -> int:
    """Run one command of a service's script.

    Args:
        name: Of the service; its default directory is called so.
        install: Makes ``service.parts``, or does nothing if that is there; None: it needs nothing.
        start: Starts what does not run yet on ``first_port`` and the next ones; returns its environment variables.
        ports: How many it needs.

    Returns:
        0 done, 1 it could not be done, 2 wrong usage, 3 ``status``: not all of it runs, 4 not on this machine.
    """
    arguments = _parser(name).parse_args()
    service = Service(name, arguments.directory.absolute())
    try:
        return _act(service, arguments, install, start, ports)
    except ClusterError as error:
        sys.stderr.write(f"ci/services {name}: {error}\n")
        return 4 if isinstance(error, UnfitMachineError) else 1
    except OSError as error:
        sys.stderr.write(f"ci/services {name}: {error.filename or ''}: {error.strerror or error}\n")
    return 1


def _act(
    service: Service,
    arguments: argparse.Namespace,
    install: Callable[[Service], None] | None,
    start: Callable[[Service], dict[str, str]],
    ports: int,
) -> int:
    command = arguments.command
    if command == "install":
        if install is not None:
            install(service)
    elif command == "up":
        _up(service, arguments, install, start, ports)
    elif command == "down":
        _down(service, arguments)
    elif command == "watch":
        users.keep_watch(service)
    elif command == "env":
        for key, value in _settings(service)["environment"].items():
            sys.stdout.write(f"export {key}={shlex.quote(value)}\n")
    else:
        names = [name for name in service.daemons.names() if name != "watcher"]
        for name in names:
            sys.stdout.write(f"{name:<16} {'alive' if service.daemons.alive(name) else 'dead'}\n")
        return 0 if names and all(map(service.daemons.alive, names)) else 3
    return 0


def _up(
    service: Service,
    arguments: argparse.Namespace,
    install: Callable[[Service], None] | None,
    start: Callable[[Service], dict[str, str]],
    ports: int,
) -> None:
    began = time.monotonic()
    if install is not None and arguments.install:
        install(service)
    elif install is not None and not service.parts.exists():
        raise UnfitMachineError(
            f"{service.name} is not here; `ci/services install {service.name}` fetches it"
        )
    with service.daemons.locked():
        users.add(service, arguments.user)
        users.watch(service)  # before there is anything: we may be killed together with the user
        known = _settings(service) if (service.directory / "state.json").exists() else None
        if known is not None:
            _start(service, known["options"], known["first_port"], start)
        else:
            options = dict(word.split("=", 1) for word in arguments.option)
            with port_ranges.free_range(ports, service.directory, first=arguments.port) as first:
                _start(service, options, first, start)
    sys.stderr.write(
        f"ci/services {service.name}: up in {time.monotonic() - began:.1f} s: {service.directory}\n"
    )


def _start(
    service: Service, options: dict[str, str], first_port: int, start: Callable[[Service], dict[str, str]]
) -> None:
    environment = start(Service(service.name, service.directory, options, first_port))
    text = json.dumps({"options": options, "first_port": first_port, "environment": environment})
    temporary = service.directory / ".state.json"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(service.directory / "state.json")


def _settings(service: Service) -> dict[str, dict[str, str]]:
    try:
        found: dict[str, dict[str, str]] = json.loads(
            (service.directory / "state.json").read_text(encoding="utf-8")
        )
    except FileNotFoundError:
        raise ClusterError(
            f"nothing was started in {service.directory}; `ci/services up {service.name}` does"
        ) from None
    return found


def _down(service: Service, arguments: argparse.Namespace) -> None:
    users.leave(service, arguments.user, purge=arguments.purge)


def unpacked(folder: Path, packages: Sequence[str]) -> None:
    """Fetch Debian packages and unpack them all into ``folder`` unless it is there: nothing is installed, no root needed.

    Raises:
        UnfitMachineError: they are not to be had here; says what failed.
    """
    if folder.exists():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnfitMachineError(f"{', '.join(packages)}: this works on Debian")
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    (making / "fetched").mkdir(parents=True)
    try:
        _download(making / "fetched", packages)
        for archive in sorted((making / "fetched").glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(archive), str(making / "root")], making)
        try:
            (making / "root").rename(folder)
        except OSError:
            if not folder.exists():  # else another one was as fast as we
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _download(folder: Path, packages: Sequence[str]) -> None:
    argv = ["apt-get", "-qq", "-o", "APT::Sandbox::User=", "download", *packages]
    try:
        _run(argv, folder)
    except ClusterError:  # the lists are old, or there are none
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "update"], folder)
        _run(argv, folder)


def _run(argv: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_APT_LIMIT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UnfitMachineError(f"`{' '.join(argv)}` did not end in {_APT_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise UnfitMachineError(f"`{' '.join(argv)}` failed: {done.stderr.strip()[-1000:]}")


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"ci/services.d/{name}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--directory", type=Path, default=cache() / name, help="where it lives (default %(default)s)"
    )
    common.add_argument("--for", dest="user", type=int, metavar="PID", help="only while this process lives")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", parents=[common])
    up.add_argument("--port", type=int, help="first of the ports (default: any free range)")
    up.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="what this service knows"
    )
    up.add_argument(
        "--no-install", dest="install", action="store_false", help="fetch nothing; say what is missing"
    )
    down = commands.add_parser("down", parents=[common])
    down.add_argument("--purge", action="store_true", help="remove the directory as well")
    for command in ("status", "env", "install", "watch"):
        commands.add_parser(command, parents=[common])
    return parser
