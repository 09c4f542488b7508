"""The command ``mlhpc``: its table of commands, and how each of them ends.

Each command is a module of this package with a click command named ``command``, and only the one asked for is imported.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from pytest_mlhpc.cli.commands import LazyGroup
from pytest_mlhpc.errors import MlhpcError, ProblemsError, UsageError

#: Exit codes: 0 done, 1 a check found something, these, and of some commands 3 (unknown) and 75 (try again later).
USAGE, INTERNAL = 2, 4
#: What a shell reports for programs that these signals ended.
INTERRUPTED, BROKEN_PIPE = 130, 141

#: Command -> one line about it.
COMMANDS = {
    "init": "write a first suite, systems.yaml, baselines/ and a CI job",
    "status": "what the last session or night found, and what to do next",
    "systems": "list, show, check and add the systems of systems.yaml",
    "check": "is all that tests declare valid on every system?",
    "baseline": "show, compare, accept and propose accepted values",
    "history": "one benchmark over nights; what changed, what made it slower, how small a loss is found, events",
    "compare": "one table of the same benchmarks on several systems",
    "records": "list, show, add up, check and push what was recorded",
    "alert": "tell what is new, worse, over or missing; list, acknowledge, mute and drill",
    "report": "a page of all systems and nights, Grafana dashboards, OpenMetrics",
    "vet": "are these nodes fit for a long run?",
    "screen": "run any program for a minute and say what limits it, or look at a running job",
    "data": "make synthetic data sets, check those of systems.yaml, list workloads",
    "ci": "write the pipelines of GitLab CI, and notes of what was measured",
    "papers": "reports as MLPerf HPC, HPC AI500, the HPDC'24 paper and rooflines have them",
    "reap": "end own jobs whose session is dead or whose lease has expired",
}


class _Mlhpc(LazyGroup):
    """The root, which ends quietly after Ctrl-C, a closed pipe and our own errors."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run one command and return its exit code."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python would flush stdout once more at exit and complain about it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted\n")
            return INTERRUPTED
        except (MlhpcError, OSError) as error:
            # A problem of a file begins with its line, as editors look for it.
            sys.stderr.write(f"{'' if isinstance(error, ProblemsError) else 'Error: '}{error}\n")
            return USAGE if isinstance(error, UsageError) else INTERNAL
        return code


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"pytest-mlhpc {version('pytest-mlhpc')}")
        ctx.exit()


mlhpc = _Mlhpc(
    "mlhpc",
    summaries=COMMANDS,
    prefix=f"{__name__}.",
    help="Benchmarks of machine-learning training. They are run by `pytest suites/ --system NAME`.",
    example="mlhpc status",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version.",
        )
    ],
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that is no UTF-8 is printed as it came in
            stream.reconfigure(errors="surrogateescape")
    try:
        code = mlhpc.main(
            sys.argv[1:] if argv is None else list(argv), prog_name="mlhpc", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    return int(code or 0)
