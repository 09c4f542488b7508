"""Scripts that print the figures of docs/performance.md: ``python -m benchmarks [NAME ...] [--write FILE]``."""
