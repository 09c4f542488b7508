"""``mlhpc report grafana``: Grafana dashboards for what lies in InfluxDB, as JSON files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.files import page
from pytest_mlhpc.store.text import clean


@click.command(
    cls=Command,
    help="Write Grafana dashboards for what lies in InfluxDB, as JSON files.",
    example="mlhpc report grafana --output dashboards",
)
@click.option(
    "--output",
    type=Path,
    required=True,
    metavar="DIR",
    help="Folder of the files; made if it is not there. Files of the same names are replaced.",
)
def command(output: Path) -> None:
    """Write them, and say what to do with them."""
    from pytest_mlhpc.report.grafana.dashboards import all_dashboards

    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, dashboard in all_dashboards().items():
            text = json.dumps(dashboard, indent=2, ensure_ascii=False, allow_nan=False)
            path = output / name
            # Grafana may be reading the folder (provisioning): it never sees half a file.
            partial = path.with_name(f".{name}.{os.getpid()}")
            partial.write_text(f"{text}\n", encoding="utf-8")
            partial.replace(path)
            sys.stdout.write(f"{clean(str(path))}\n")
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror or error}") from error
    sys.stderr.write(f"import them in Grafana, or let it read the folder: {page('grafana')}\n")
