"""Where benchmarks run: ``systems.yaml`` becomes :class:`~pytest_mlhpc.system.model.System` objects."""
