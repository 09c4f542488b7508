"""Processes of one allocation on several nodes: their names, and how they talk to each other."""
