"""The command line called in this process, as a fixture that a folder's conftest.py imports."""

import pytest

from pytest_mlhpc.cli import main


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
