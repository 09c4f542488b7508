"""The commands of ``ci/services``: each runs ``ci/services.d/NAME``, or ``ci/NAME`` for what has a command of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

#: Of all ends of several services the worst counts; 4, "not on this machine", is worse than 1.
_WORST_FIRST = (4, 1, 2, 3, 0)


def main(folder: Path) -> int:
    """Run one command for each service that is named.

    Args:
        folder: That of the scripts, ``ci/``.

    Returns:
        0 done, 1 it could not be done, 2 wrong usage, 3 ``status``: not all of it runs, 4 not on this machine.
    """
    known = _known(folder)
    arguments, rest = _parser(known).parse_known_args()
    if arguments.command == "list":
        sys.stdout.writelines(f"{name}\n" for name in sorted(known))
        return 0
    names = arguments.names or sorted(name for name in known if not _is_cluster(known[name]))
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.stderr.write(
            f"ci/services: no service {', '.join(unknown)}; there are {', '.join(sorted(known))}\n"
        )
        return 2
    codes = {_run([str(known[name]), arguments.command, *rest]) for name in names}
    return next((code for code in _WORST_FIRST if code in codes), 1)


def _run(argv: list[str]) -> int:
    sys.stdout.flush()
    return subprocess.run([sys.executable, *argv], stdin=subprocess.DEVNULL, check=False).returncode


def _known(folder: Path) -> dict[str, Path]:
    """Return the script of every service, by name."""
    found = {name: folder / name for name in ("slurm", "kubernetes") if (folder / name).exists()}
    scripts = (entry for entry in (folder / "services.d").iterdir() if entry.is_file())
    return found | {script.name: script for script in scripts if os.access(script, os.X_OK)}


def _is_cluster(script: Path) -> bool:
    return script.parent.name == "ci"  # too large to be started when nobody has named it


def _parser(known: dict[str, Path]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ci/services",
        description="Start real servers on this machine for tests.",
        epilog=f"services: {', '.join(sorted(known))}. Other options go to the service's own script.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in (
        ("up", "start what does not run yet; wait until it serves"),
        ("down", "end what `up` started (default: all but slurm and kubernetes)"),
        ("status", "show what runs; exit 3 unless all does"),
        ("env", 'print what a shell needs: eval "$(ci/services env influxdb)"'),
        ("install", "fetch and unpack what is missing; start nothing"),
        ("list", "show the names of all services"),
    ):
        made = commands.add_parser(name, help=words, description=words)
        if name != "list":
            made.add_argument("names", nargs="+" if name in {"up", "install", "env"} else "*", metavar="NAME")
    return parser
