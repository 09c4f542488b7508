"""What runs on nodes: Python 3.9, the standard library and torch, and nothing of this package above it."""
