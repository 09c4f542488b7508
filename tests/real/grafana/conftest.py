"""The real InfluxDB, the compiler of Flux and the types of Grafana for these tests."""

from collections.abc import Iterator

import pytest
from over_time_services import Service, influx_server, influxdb, share

__all__ = ["influx_server", "influxdb"]


@pytest.fixture(scope="session")
def grafana_schema(request: pytest.FixtureRequest) -> Iterator[Service]:
    """The npm packages @grafana/schema and typescript."""
    yield from share(request.config, "grafana-schema")


@pytest.fixture(scope="session")
def flux(request: pytest.FixtureRequest) -> Iterator[Service]:
    """The npm package with the compiler of Flux."""
    yield from share(request.config, "flux")
