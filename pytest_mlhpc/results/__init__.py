"""What a run measured: its schema (PAYLOAD), the records made of it, the store, and the bridges to other tools."""
