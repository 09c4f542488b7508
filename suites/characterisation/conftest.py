"""Characterisation is asked for by name: `pytest suites/` trains, and nothing here is to run between its tests."""

from pathlib import Path


def pytest_ignore_collect(config):
    """Leave this folder out unless an argument of the command line names it."""
    here = Path(__file__).parent.name
    return None if any(here in argument for argument in config.args) else True
