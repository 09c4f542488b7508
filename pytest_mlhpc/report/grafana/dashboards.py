"""All dashboards. Pure."""

from __future__ import annotations

from pytest_mlhpc.report.grafana.frame import Dashboard
from pytest_mlhpc.report.grafana.of_benchmarks import benchmark, systems
from pytest_mlhpc.report.grafana.of_nights import nights, nodes


def all_dashboards() -> dict[str, Dashboard]:
    """Return every dashboard by the name of its file."""
    made = [nights(), benchmark(), systems(), nodes()]
    return {f"{one['uid']}.json": one for one in made}
