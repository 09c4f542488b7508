"""Records in InfluxDB: a measurement schema, a cursor for each record file, the sender, and the way back."""
