"""The job script that a partition leads to, with made-up names where a session has its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import PurePosixPath
from typing import Final

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm.environment import launcher_options, wrapper
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.provision.slurm.script import render
from pytest_mlhpc.system.model import Environment, Partition

#: bash reads a script of some kilobytes in milliseconds.
_BASH_LIMIT_S: Final = 30
#: Stands for the state directory, where a session's own is.
_STATE: Final = "/STATE"


def preview(partition: Partition, environment: Environment) -> str:
    """Return the job script for a run with a rank on each device (CPUs: one) of two nodes, if so many are given.

    What srun is told beside the launcher's own words stands in a comment at the end.

    Raises:
        UsageError: it cannot be made, or bash does not read it (the mistake is in ``setup:``).
    """
    settings = settings_of(partition)
    state = PurePosixPath(settings.shared_directory or _STATE)
    plan = _plan(partition, str(state / "runs" / "SESSION" / "ALLOCATION"))
    where = f"{partition.id}, environment {environment.name}"
    try:
        script = render(
            plan,
            partition,
            environment,
            name="mlhpc-ALLOCATION",
            lines_dir=str(state / "runs" / "SESSION" / "lines"),
            payload=str(state / "payload" / "SHA256.zip"),
        )
        words = launcher_options(partition, environment, [str(state)])
        before = wrapper(environment, [str(state)], partition.accelerator)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    if complaint := _bash_says(script):
        raise UsageError(f"{where}: bash cannot read the job script; look at `setup`: {complaint}")
    return script + "".join(
        f"# {what}: {' '.join(some)}\n"
        for what, some in (("srun is told", words), ("ranks are started by", before))
        if some
    )


def _plan(partition: Partition, directory: str) -> Plan:
    nodes = min(2, partition.nodes.max)
    each = 1 if partition.accelerator == "cpu" else max(1, partition.nodes.devices)
    run = RunPlan(
        run_id="RUN",
        nonce="",
        attempt=0,
        workload="command",
        parameters={},
        nodes=nodes,
        ranks=nodes * each,
        cores_per_rank=max(1, partition.nodes.cores // each),
        device_type=partition.accelerator,
        launcher=partition.launcher,
        time_limit_s=partition.time_limit_s,
        steps=0,
        warmup_steps=0,
    )
    return Plan("ALLOCATION", "SHA256", directory, nodes, partition.time_limit_s, (run,))


def _bash_says(script: str) -> str:
    """Return what bash complains about without running anything; empty without bash."""
    bash = shutil.which("bash")
    if bash is None:
        return ""
    try:
        done = subprocess.run(
            [bash, "--norc", "-n"],
            input=script.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=_BASH_LIMIT_S,
            check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    # An open here-document is only a warning, and would take the rest of the script for its text.
    return " ".join(done.stderr.decode(errors="replace").split())[:400]
