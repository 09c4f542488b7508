"""Change points of whole histories: pure numerics, no I/O, the same answer each time."""
