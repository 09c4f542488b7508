"""A login node for tests: a real sshd of `ci/services` that lets in another user, before the real Slurm."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from over_time_services import Service, own

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

    def client_configuration(self) -> Path:
        """Return the file that its `ssh` reads."""
        return self.directory / "ssh_config"

    def left(self) -> list[str]:
        """Return what the user has below the shared folder."""
        return sorted(path.relative_to(self.shared).as_posix() for path in self.shared.rglob("*"))

    def processes(self) -> list[str]:
        """Return the command lines of the user's processes and of connections to it, without those of sshd."""
        words = subprocess.run(
            ["ps", "-ww", "-u", USER, "-o", "args="], capture_output=True, text=True, check=False
        ).stdout.splitlines()
        mine = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True, check=True).stdout
        clients = [line for line in mine.splitlines() if f"{self.directory}/ssh_config" in line or LOGIN in line]
        return [line for line in words if "sshd" not in line] + [line for line in clients if "ps -ww" not in line]


def login_node(config: pytest.Config, folder: Path, variables: Mapping[str, str]) -> Iterator[LoginNode]:
    """Start one whose logins have these variables."""
    file = folder / "login-environment"
    file.write_text("\n".join(f'{name}="{value}"' for name, value in variables.items()), encoding="utf-8")
    for service in own(config, "sshd", "--option", f"environment={file}"):
        yield LoginNode(service)


def uid() -> int:
    """Return the uid of the user."""
    return pwd.getpwnam(USER).pw_uid
