"""Alerts after a night: which series changed their state, what belongs together, and who is notified, once."""
