"""What was measured over nights: series from the local store or from InfluxDB, their change points and events."""
