"""Benchmarks that come with the package: `pytest --pyargs pytest_mlhpc.suites.training --system NAME` where it is installed."""
