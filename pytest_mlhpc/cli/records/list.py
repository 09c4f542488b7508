"""``mlhpc records list``: the newest records."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.text import minutes, quantity, table, tell


@click.command(
    cls=DataCommand,
    help="List the newest records.",
    example="mlhpc records list --test 'suites/test_a.py::test_a[cirrus:standard]'",
)
@click.option("--session", default="", metavar="ID", help="Only of this session.")
@click.option("--test", default="", metavar="TEST", help="Only of this test, by its node id or name.")
@click.option("--limit", type=int, default=20, metavar="N", show_default=True, help="At most N.")
@options.state_dir
def command(session: str, test: str, limit: int, state_dir: Path) -> CommandReport:
    """Return a row for each."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        records = index.newest(session=session, test=test, limit=limit)
    data = {"records": [to_json(record) for record in records]}
    if not records:
        return CommandReport(f"nothing is recorded in {state_dir} that is asked for\n", data)
    rows = [("recorded", "id", "verdict", "attempt", "test", "judged")]
    for record in records:
        row = minutes(record.created_ns), record.id, record.verdict, str(record.attempt), record.node_id
        rows.append((*row, _figures(record)))
    return CommandReport(table(rows), data)


def _figures(record: Record) -> str:
    if record.measurement is None:
        return record.failure
    metrics = [metric for name in record.judged if (metric := record.measurement.metric(name))]
    return ", ".join(f"{metric.name} {quantity(metric.value, metric.unit)}" for metric in metrics)
