"""Grafana dashboards for what lies in InfluxDB, made of its schema (influx/schema.py)."""
