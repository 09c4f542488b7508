"""The real InfluxDB of these tests."""

from over_time_services import influx_server, influxdb

__all__ = ["influx_server", "influxdb"]
