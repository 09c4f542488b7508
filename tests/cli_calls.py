"""The command line called in this process, as a fixture that a folder's conftest.py imports; and tables of refusals."""

import shlex
from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.cli import USAGE, main


@pytest.fixture
def mlhpc(capsys):
    """Run a command, expect its exit code, and return what it printed: ``mlhpc("last", code=5).err``."""

    def call(*words, code=0):
        capsys.readouterr()
        try:
            found = main([str(word) for word in words])
        except SystemExit as end:  # argparse's own
            found = end.code
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return call


@pytest.fixture
def refused(mlhpc):
    """Run a command that is a usage error, and return what it printed on standard error."""
    return lambda command: mlhpc(*shlex.split(command), code=USAGE).err


def refusals(test_file):
    """Parametrize by the commands in usage_errors.yaml beside a test, each with what is said of it."""
    text = Path(test_file).with_name("usage_errors.yaml").read_text(encoding="utf-8")
    return pytest.mark.parametrize(("command", "why"), yaml.safe_load(text).items())
