"""``mlhpc records``: its verbs."""

from pytest_mlhpc.cli.commands import LazyGroup

command = LazyGroup(
    "records",
    package=__name__,
    summaries={
        "list": "list the newest records",
        "show": "show all of one record",
        "cost": "add up node-hours, by partition, account, benchmark or session",
        "check": "read everything and name what is damaged",
        "ingest": "record runs that another tool made: ReFrame, pytest-benchmark, JUnit, JSON lines",
        "push": "send what waits in the spool to InfluxDB",
    },
    help="Records: what was measured, one for each attempt of a run.",
    example="mlhpc records list --limit 50",
)
