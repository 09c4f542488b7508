"""The real InfluxDB of these tests."""

from over_time_services import closed_influxdb, influx_server, influxdb, own_influxdb

__all__ = ["closed_influxdb", "influx_server", "influxdb", "own_influxdb"]
