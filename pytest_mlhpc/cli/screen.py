"""``mlhpc screen``: run any program and say what limits it, or look at a running job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options as shared
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.telemetry.sampler import INTERVAL_S
from pytest_mlhpc.screen.run import Options, screen_program, screen_running

#: First step under torch's profiler, and how many: by then caches are filled, and most programs get there within a minute.
PROFILE = "10:3"


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    help="Run PROGRAM and say what limits it, or look at a running job (--job) or pods (--pod). The exit code is the "
    "program's; of --job and --pod 0. With --json the program's standard output goes to standard error.",
    example="mlhpc screen --seconds 60 -- python train.py --epochs 1\nmlhpc screen --job 4711",
)
@click.option("--seconds", type=float, default=60.0, metavar="S", show_default=True, help="How long to look.")
@click.option("--stop", is_flag=True, help="End the program then; without, it runs on to its end.")
@click.option(
    "--interval",
    type=float,
    default=INTERVAL_S,
    metavar="S",
    show_default=True,
    help="Seconds between samples, at least.",
)
@click.option(
    "--profile",
    default=PROFILE,
    metavar="FIRST:STEPS",
    show_default=True,
    help="Which steps torch's profiler watches, or `off`.",
)
@click.option("--output", type=Path, metavar="FILE", help="Write a page with the curves.")
@shared.as_json
@click.option("--job", metavar="ID", help="Look at this running Slurm job, by srun --overlap.")
@click.option(
    "--pod", "pods", multiple=True, metavar="NAME", help="Look into this running pod; may be given again."
)
@click.option("--namespace", default="", metavar="NAME", help="Of --pod.  [default: the kubeconfig's]")
@click.option("--container", default="", metavar="NAME", help="Of --pod.  [default: its first]")
@click.option(
    "--python",
    default="python3",
    metavar="PROGRAM",
    show_default=True,
    help="Of --job and --pod: Python 3.9 or newer there.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM [ARGUMENT]...]")
def command(
    *,
    seconds: float,
    stop: bool,
    interval: float,
    profile: str,
    output: Path | None,
    as_json: bool,
    job: str | None,
    pods: Sequence[str],
    namespace: str,
    container: str,
    python: str,
    program: Sequence[str],
) -> int:
    """Look, and say what limits it."""
    options = Options(
        seconds, interval, profile, stop, output, job, pods, namespace, container, python, as_json
    )
    check(options, program)
    return screen_program(options, program) if program else screen_running(options)


def check(options: Options, program: Sequence[str]) -> None:
    """Refuse what cannot be done, before anything is started.

    Raises:
        UsageError: neither or several programs, jobs and pods; options that cannot be.
    """
    if bool(program) + (options.job is not None) + bool(options.pods) != 1:
        raise UsageError("say what to look at, one of: -- PROGRAM [ARGUMENT ...], --job ID, --pod NAME")
    if options.stop and not program:
        raise UsageError("--stop is for a program that screening starts: a job or a pod goes on")
    if (options.namespace or options.container) and not options.pods:
        raise UsageError("--namespace and --container are of --pod")
    if not 1 <= options.seconds <= 86_400:
        raise UsageError(f"--seconds {options.seconds:g} is not between 1 and 86400")
    if not 0.05 <= options.interval <= 60:
        raise UsageError(f"--interval {options.interval:g} is not between 0.05 and 60")
    if options.profile != "off" and not re.fullmatch(r"[1-9]\d{0,6}:[1-9]\d?", options.profile):
        raise UsageError(f"--profile {options.profile!r} is neither `off` nor FIRST:STEPS, as {PROFILE}")
    if options.page is not None:
        _check_page(options.page)


def _check_page(path: Path) -> None:
    """Refuse a page that could not be written when all has been looked at."""
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise UsageError(f"--output {path}: there is no folder {target.parent}")
        if target.is_dir():
            raise UsageError(f"--output {path} is a folder")
        written = target.parent if target.is_file() or not target.exists() else target  # a device, a pipe
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None
    if not os.access(written, os.W_OK):
        raise UsageError(f"--output {path}: {written} may not be written to")
