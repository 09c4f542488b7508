"""Records in InfluxDB: a measurement schema, a durable spool, the sender, and the way back."""
