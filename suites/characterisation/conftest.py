"""Characterisation is asked for by name: `pytest suites/` trains, and nothing here is to run between its tests."""

from pathlib import Path


def pytest_ignore_collect(config):
    """Leave this folder out unless an argument of the command line names it, or something in it."""
    here, start = Path(__file__).resolve().parent, config.invocation_params.dir
    arguments = [argument.partition("::")[0] for argument in config.args]
    if config.option.pyargs and any(f"{one}.".startswith(f"{__package__}.") for one in arguments):
        return None
    named = [(start / argument).resolve() for argument in arguments]
    return None if any(here in (one, *one.parents) for one in named) else True
