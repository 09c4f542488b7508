"""``mlhpc dashboards``: Grafana dashboards for what lies in InfluxDB, as JSON files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.results.text import clean

SUMMARY = "write Grafana dashboards for InfluxDB as JSON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where they go."""
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the files; made if it is not there, files of earlier versions are replaced",
    )


def run(args: argparse.Namespace) -> int:
    """Write them, and say what to do with them."""
    from pytest_mlhpc.report.grafana.dashboards import all_dashboards

    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for name, dashboard in all_dashboards().items():
            text = json.dumps(dashboard, indent=2, ensure_ascii=False, allow_nan=False)
            path = args.output / name
            # Grafana may be reading the folder (provisioning): it never sees half a file.
            partial = path.with_name(f".{name}.{os.getpid()}")
            partial.write_text(f"{text}\n", encoding="utf-8")
            partial.replace(path)
            sys.stdout.write(f"{clean(str(path))}\n")
    except OSError as error:
        raise UsageError(f"--output {args.output}: {error.strerror or error}") from error
    sys.stderr.write("import them in Grafana, or let it read the folder: docs/grafana.md\n")
    return 0
