"""Characterisation is asked for by name: `pytest suites/` trains, and nothing here is to run between its tests."""

from pathlib import Path


def pytest_ignore_collect(config):
    """Leave this folder out unless an argument of the command line names it, or something in it."""
    here, start = Path(__file__).resolve().parent, config.invocation_params.dir
    named = [(start / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(here in (one, *one.parents) for one in named) else True
