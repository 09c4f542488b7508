"""Where benchmarks run: ``systems.yaml`` becomes :class:`~pytest_mlhpc.config.model.System` objects."""
