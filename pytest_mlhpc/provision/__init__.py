"""Getting nodes: one protocol, one implementation for each scheduler."""
