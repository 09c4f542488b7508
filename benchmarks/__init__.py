"""Scripts that print the figures of benchmarks/performance.md: ``python -m benchmarks [NAME ...] [--write FILE]``."""
