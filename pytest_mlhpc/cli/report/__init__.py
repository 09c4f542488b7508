"""``mlhpc report``: its verbs."""

from pytest_mlhpc.cli.commands import LazyGroup

command = LazyGroup(
    "report",
    package=__name__,
    summaries={
        "html": "one self-contained HTML page of all systems, benchmarks and nights",
        "grafana": "Grafana dashboards for InfluxDB, as JSON files",
        "openmetrics": "what was measured, as OpenMetrics",
    },
    help="Reports for others: a page, dashboards, metrics.",
    example="mlhpc report html --output report.html",
)
