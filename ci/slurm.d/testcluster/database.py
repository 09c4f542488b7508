"""Accounting: MariaDB, slurmdbd, and the accounts and QoS that tests use."""

from __future__ import annotations

import subprocess
from pathlib import Path

from testcluster import ports
from testcluster.configuration import ACCOUNTS, CLUSTER, QOS, Settings
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError

NAMES = ("slurmdbd", "mariadbd")


def start(daemons: Daemons, settings: Settings) -> None:
    """Start the database and slurmdbd; make the accounts the first time."""
    directory = daemons.directory
    socket, data = directory / "run/mysql.sock", directory / "mysql"
    if not (directory / "etc/database-ready").exists():
        _create(daemons, data)
    daemons.start("mariadbd", _mariadbd(directory, socket, data))
    ping = ["mariadb-admin", "--no-defaults", f"--socket={socket}", "-uroot", "ping"]
    daemons.await_service("mariadbd", lambda: _call(daemons, ping).returncode == 0)
    daemons.start(
        "slurmdbd", ["slurmdbd", "-D"],
        SLURM_CONF=str(directory / "etc/slurmdbd.conf"), MYSQL_UNIX_PORT=str(socket),
    )  # fmt: skip
    daemons.await_service("slurmdbd", lambda: ports.answers(settings.port + 1))
    ready = directory / "etc/accounts-ready"
    if not ready.exists():
        _make_accounts(daemons)
        ready.touch()


def _mariadbd(directory: Path, socket: Path, data: Path) -> list[str]:
    return [
        "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket}",
        f"--pid-file={directory}/run/mariadbd.pid", "--skip-networking", "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=2",
        "--loose-innodb-snapshot-isolation=OFF",  # slurmdbd fails with MariaDB 11's default
        "--performance-schema=OFF", "--max-connections=30",
    ]  # fmt: skip


def _create(daemons: Daemons, data: Path) -> None:
    if data.exists() and any(data.iterdir()):
        raise ClusterError(f"{data} was left half made; remove {daemons.directory} (`down --purge`)")
    done = _call(
        daemons,
        [
            "mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        ],
    )  # fmt: skip
    if done.returncode != 0:
        raise ClusterError(
            f"mariadb-install-db failed: {done.stdout.strip()[-1000:]} {done.stderr.strip()[-1000:]}"
        )
    (daemons.directory / "etc/database-ready").touch()


def _make_accounts(daemons: Daemons) -> None:
    """Add what tests submit with. slurmctld reads it when it starts, hence before."""
    for words in (
        ["add", "cluster", CLUSTER],
        ["add", "qos", QOS, "MaxWall=00:02:00", "MaxTRESPerJob=node=2"],
        *(["add", "account", account, f"Cluster={CLUSTER}", f"QOS=normal,{QOS}"] for account in ACCOUNTS),
        # `nobody` and that of the test sshd are the unprivileged users of tests; root is the administrator.
        *(
            ["add", "user", user, f"Account={account}", f"DefaultAccount={ACCOUNTS[0]}"]
            for user in ("root", "nobody", "mlhpc-ssh")
            for account in ACCOUNTS
        ),
    ):
        done = _call(daemons, ["sacctmgr", "-i", *words])
        # 1 is also the answer to "there already"; the text says which.
        if done.returncode != 0 and "Nothing new added" not in done.stdout:
            raise ClusterError(f"sacctmgr {' '.join(words)}: {done.stdout.strip()} {done.stderr.strip()}")


def _call(daemons: Daemons, argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        daemons.inside(argv), env=daemons.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
