"""``mlhpc vet quick``."""

from pytest_mlhpc.cli.vet.nodes import command_of

command = command_of("quick")
