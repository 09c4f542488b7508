"""Which client talks to Slurm: its commands, or pyslurm where it fits the cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm import calls
from pytest_mlhpc.provision.slurm.cli import CliClient
from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError
from pytest_mlhpc.results.foreign import read_json

#: How long the probe may take, in seconds; with the controller down pyslurm's first call takes 18 s.
PROBE_LIMIT_S = 25.0

#: The probe, in a process of its own because importing pyslurm without a cluster ends the process. Its version's first two
#: numbers are the release of Slurm that it was built for. ``slurmctld`` came with 24.5; before, loading partitions asks too.
PROBE = """
import json, pyslurm
try:
    pyslurm.slurmctld.ping_primary()
except AttributeError:
    pyslurm.Partitions.load()
print("\\n" + json.dumps({"version": pyslurm.__version__}))
"""

_RELEASE = re.compile(r"0*(\d+)\.0*(\d+)")


@dataclass(frozen=True)
class Probe:
    """What the probe said: the version of pyslurm, or why it is of no use here."""

    version: str = ""
    trouble: str = ""


def choose(client: str, environ: Mapping[str, str] | None = None) -> tuple[SlurmClient, str]:
    """Return the client for the setting ``client:`` (cli, auto, pyslurm) and a line for the log, empty for cli.

    Raises:
        UsageError: ``pyslurm`` was asked for and does not work here, or there is no such setting.
    """
    environ = os.environ if environ is None else environ
    cli = CliClient(environ)
    if client == "cli":
        return cli, ""
    if client not in {"auto", "pyslurm"}:
        raise UsageError(f"slurm client {client!r}: there are cli, auto and pyslurm")
    trouble, version = fits(cli, environ)
    if not trouble:
        from pytest_mlhpc.provision.slurm.pyslurm_client import PyslurmClient

        return PyslurmClient(environ), f"slurm: pyslurm {version} is used"
    if client == "auto":
        return cli, f"slurm: Slurm's commands are used, not pyslurm: {trouble}"
    raise UsageError(f"slurm client 'pyslurm' cannot be used: {trouble}; set client: cli or client: auto")


def fits(cli: CliClient, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return why pyslurm cannot be used here, empty if it can, and its version."""
    probe = run_probe(environ)
    if probe.trouble:
        return probe.trouble, ""
    try:
        cluster = cli.version()
    except SlurmError as error:
        return f"the version of Slurm is unknown: {error}", probe.version
    if release(probe.version) != release(cluster):
        return f"pyslurm {probe.version} is not for Slurm {cluster}", probe.version
    return "", probe.version


def release(version: str) -> tuple[int, int] | None:
    """Return major and minor, None if there are none: pyslurm writes 22.5.3 for Slurm 22.05."""
    match = _RELEASE.match(version)
    return (int(match[1]), int(match[2])) if match else None


def run_probe(environ: Mapping[str, str], limit_s: float = PROBE_LIMIT_S) -> Probe:
    """Import pyslurm and ping the controller, in a process of its own."""
    argv = [sys.executable, "-P", "-c", PROBE]  # -P: no pyslurm.py of the current directory
    try:
        answer = calls.call(argv, dict(environ), limit_s)
    except SlurmError as error:
        return Probe(trouble=f"its probe: {str(error).removeprefix(calls.shown(argv)).lstrip(': ')}")
    if answer.code != 0:
        words = [line.strip() for line in answer.err.splitlines() if line.strip()]
        return Probe(
            trouble=f"its probe ended with exit code {answer.code}: {words[-1] if words else 'no word'}"
        )
    try:
        return Probe(version=str(read_json(answer.out.strip().splitlines()[-1])["version"]))
    except (ValueError, IndexError, KeyError, TypeError):
        return Probe(trouble=f"its probe said {answer.out.strip()[-200:]!r}")
