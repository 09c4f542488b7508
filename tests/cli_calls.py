"""The command line called in this process, as a fixture that a folder's conftest.py imports; and tables of refusals."""

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pytest_mlhpc import cli
from pytest_mlhpc.cli import USAGE, main


@pytest.fixture
def mlhpc(capsys):
    """Run a command, expect its exit code, and return what it printed: ``mlhpc("status").err``."""

    def call(*words, code=0):
        capsys.readouterr()
        found = main([str(word) for word in words])
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


def parsed(*words: str) -> dict[str, Any]:
    """Return the parameters of the command that *words* are, without running it; fails where they are none."""
    command: click.Command = cli.mlhpc
    context = command.make_context("mlhpc", list(words))
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    return context.params


def options_of(*words: str) -> set[str]:
    """Return the options of the command that *words* name."""
    command: click.Command = cli.mlhpc
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word) or pytest.fail(word)
    return {option for parameter in command.params for option in parameter.opts} | {"--help"}
