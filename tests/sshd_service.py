"""A login node for tests: a real sshd of `ci/services` that lets in another user, before the real Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from over_time_services import Service, own

from pytest_mlhpc.node.processes import descendants

#: The user that `ci/services install sshd` adds.
USER = "mlhpc-ssh"
#: Host of the sshd in its own ssh_config.
LOGIN = "test-login"


@dataclass(frozen=True)
class LoginNode:
    """One that its test may break. Its `ssh`, which comes first on PATH, knows host and key."""

    service: Service

    @property
    def directory(self) -> Path:
        """Return its own folder."""
        return self.service.directory

    @property
    def shared(self) -> Path:
        """Return the folder that the user and the nodes see."""
        return self.directory / "shared"

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what leads to it."""
        return {"PATH": f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    @property
    def client(self) -> Path:
        """Return the configuration that its `ssh` reads."""
        return self.directory / "ssh_config"

    def left(self) -> list[str]:
        """Return what is below the shared folder."""
        return sorted(path.relative_to(self.shared).as_posix() for path in self.shared.rglob("*"))

    def drop(self) -> None:
        """End all connections. The listener goes on: another test's could take its port."""
        for pid in descendants(self.service.pid("sshd")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[str]:
        """Return the command lines of connections to it, at both ends: those of its ssh, and those below its sshd."""
        clients = [" ".join(words) for words in map(command_line, all_pids()) if f"{self.client}" in words]
        return clients + [" ".join(command_line(pid)) for pid in descendants(self.service.pid("sshd"))]


def all_pids() -> list[int]:
    """Return the pids of all processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def command_line(pid: int) -> list[str]:
    """Return the words of a process, none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def login_node(config: pytest.Config, folder: Path, variables: Mapping[str, str]) -> Iterator[LoginNode]:
    """Start one whose logins have these variables."""
    file = folder / "login-environment"
    file.write_text("\n".join(f'{name}="{value}"' for name, value in variables.items()), encoding="utf-8")
    for service in own(config, "sshd", "--option", f"environment={file}"):
        yield LoginNode(service)
