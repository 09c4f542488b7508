"""The command ``mlhpc``. Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``.

Where one module has several, its place below is ``module:name``, for ``add_name_arguments`` and ``run_name``.
Only the module that is asked for is imported: ``mlhpc --help`` imports none of them, hence the summaries here.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pytest_mlhpc.errors import MlhpcError, UsageError, nearest

#: Exit codes, as pytest's: 0 done, 1 a check found something, and these.
INTERRUPTED, INTERNAL, USAGE = 2, 3, 4
#: What a shell reports for a program that SIGPIPE ended.
BROKEN_PIPE = 141

#: Commands whose exit codes are a contract of their own, in which a usage error is another number (vet/verdict.py).
USAGE_OF = {"vet": 2}

#: Subcommand, of one or two words -> module, one line about it.
COMMANDS: dict[str, tuple[str, str]] = {
    "last": ("pytest_mlhpc.results.last_cli", "what the last session found, and what to do next"),
    "systems": ("pytest_mlhpc.system.cli", "list, show and check the systems of systems.yaml"),
    "workloads": ("pytest_mlhpc.worker.cli", "list workloads, presets and what one sample costs"),
    "data": ("pytest_mlhpc.worker.data.cli", "make synthetic data sets, check those of systems.yaml"),
    "baseline": ("pytest_mlhpc.judge.cli", "show, compare, accept, learn and prune accepted values"),
    "records": ("pytest_mlhpc.results.records_cli", "list, show and check what was recorded"),
    "compare": (
        "pytest_mlhpc.report.compare_cli",
        "one table of the same benchmarks on several machines, from what was recorded",
    ),
    "cost": (
        "pytest_mlhpc.results.cost_cli",
        "node-hours charged, by partition, account, benchmark or session",
    ),
    "vet": (
        "pytest_mlhpc.vet.command.cli",
        "are these nodes fit for a long run? one process on each, by srun",
    ),
    "vet apply": ("pytest_mlhpc.vet.command.apply:apply", "drain or cordon the unfit nodes of a verdict"),
    "vet undo": ("pytest_mlhpc.vet.command.apply:undo", "give nodes back that vetting took out of service"),
    "vet history": (
        "pytest_mlhpc.vet.command.history_cli",
        "what earlier vettings found, and which nodes fail again",
    ),
    "push": (
        "pytest_mlhpc.influx.push_cli",
        "send what waits in the spool to InfluxDB; --check tests the connection",
    ),
    "history": (
        "pytest_mlhpc.history.history_cli",
        "one benchmark over nights, with its change points and events",
    ),
    "changes": (
        "pytest_mlhpc.history.changes_cli",
        "what changed, on which nights, and what else changed there",
    ),
    "event": (
        "pytest_mlhpc.history.event_cli",
        "note a change of a system, such as a new driver; starts a baseline epoch",
    ),
    "alert": (
        "pytest_mlhpc.alert.alert_cli",
        "after a nightly run: tell what is new, continuing, worse, resolved or stale",
    ),
    "ack": ("pytest_mlhpc.alert.ack_cli:ack", "acknowledge an alert until a date, with a reason"),
    "mute": ("pytest_mlhpc.alert.ack_cli:mute", "send no alerts of a system until a date"),
    "report": (
        "pytest_mlhpc.report.html_cli",
        "one self-contained HTML page of all systems, benchmarks and nights",
    ),
    "dashboards": ("pytest_mlhpc.report.grafana_cli", "write Grafana dashboards for InfluxDB as JSON"),
    "ci": ("pytest_mlhpc.ci.generate_cli", "write the child pipelines of GitLab CI, one for each system"),
    "screen": (
        "pytest_mlhpc.screen.screen_cli",
        "run any training for a minute, or look at a running job, and say what limits it",
    ),
    "mlperf": (
        "pytest_mlhpc.mlperf.mlperf_cli",
        "MLPerf HPC: logs of recorded runs, their check, time to train and scaling",
    ),
    "ai500": ("pytest_mlhpc.report.ai500_cli", "HPC AI500: FLOPS, VFLOPS and scaling of bagging"),
    "roofline": (
        "pytest_mlhpc.report.roofline_cli",
        "a page of each workload against measured peaks of its device",
    ),
    "reap": ("pytest_mlhpc.jobs.reap_cli", "end own jobs whose session is dead or whose lease has expired"),
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose usage errors exit with 4, like all usage errors here but those of a few commands."""

    usage_code = USAGE

    def error(self, message: str) -> NoReturn:
        """Print usage and *message*, and exit."""
        self.print_usage(sys.stderr)
        self.exit(self.usage_code, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Ctrl-C, a closed pipe and our own errors end without traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that is no UTF-8 is printed as it came in
            stream.reconfigure(errors="surrogateescape")
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush stdout once more at exit and complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    except UsageError as error:
        sys.stderr.write(f"mlhpc: error: {error}\n")
        return USAGE_OF.get(words[0] if words else "", USAGE)
    except (MlhpcError, OSError) as error:
        sys.stderr.write(f"mlhpc: error: {error}\n")
        return INTERNAL
    return code


def _run(words: Sequence[str]) -> int:
    if not words or words[0].startswith("-"):
        return _top(words)
    name, *rest = words
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        meant = f" (did you mean {hint!r}?)" if hint else ""
        raise UsageError(f"there is no command {name!r}{meant}; `mlhpc --help` lists all")
    usage_code = USAGE_OF.get(name, USAGE)
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    place, summary = COMMANDS[name]
    path, _, part = place.partition(":")
    module = importlib.import_module(path)
    parser = Parser(prog=f"mlhpc {name}", description=summary)
    parser.usage_code = usage_code
    getattr(module, f"add_{part}_arguments" if part else "add_arguments")(parser)
    return int(getattr(module, f"run_{part}" if part else "run")(parser.parse_args(rest)))


def _top(words: Sequence[str]) -> int:
    lines = "\n".join(f"  {name:<11} {summary}" for name, (_module, summary) in COMMANDS.items())
    parser = Parser(
        prog="mlhpc",
        usage="mlhpc COMMAND ...",
        description="Benchmarks of machine-learning training. They are run by `pytest suites/ --system NAME`.",
        epilog=f"commands (each has --help):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    if parser.parse_args(words).version:
        from importlib.metadata import version

        sys.stdout.write(f"pytest-mlhpc {version('pytest-mlhpc')}\n")
        return 0
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
