"""The kinds of click commands that ``mlhpc`` is made of: with an example, imported late, or printing data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pytest_mlhpc.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from pathlib import Path

    from click.shell_completion import CompletionItem


class Command(click.Command):
    """A command whose help ends with an example."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example below the options."""
        write_example(formatter, self.example)
        super().format_epilog(ctx, formatter)


def write_example(formatter: click.HelpFormatter, example: str) -> None:
    """Write *example* as it is, each of its lines indented."""
    with formatter.section("Example"):
        for line in example.splitlines():
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class NearestChoice(click.Choice[str]):
    """One word of several, with the nearest one named to whom mistypes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word, or fail."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            if hint := nearest(str(value), self.choices):
                self.fail(f"{error.message.rstrip('.')} (did you mean {hint!r}?)", param, ctx)
            raise


class NounGroup(click.Group):
    """A noun. A word that is none of its verbs is answered with the nearest one, or belongs to the *default* verb."""

    command_class = Command

    def __init__(self, *args: Any, example: str, default: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example, self.default = example, default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default verb before what is no verb, unless it is a word and the default verb takes none."""
        if self.default and args[:1] != ["--help"] and not {*args[:1]} & {*self.list_commands(ctx)}:
            default = self.get_command(ctx, self.default)
            takes_arguments = (
                any(isinstance(one, click.Argument) for one in default.params) if default else False
            )
            if takes_arguments or not args or args[0].startswith("-"):
                args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            meant = did_you_mean(args[0], known)
            ctx.fail(f"No such command {args[0]!r}{meant}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in the order of the module."""
        return [*self.commands]

    def summary(self, name: str) -> str:
        """Return what a verb does, in one line."""
        return self.commands[name].get_short_help_str(limit=200)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of verbs."""
        with formatter.section("Commands (each has --help)"):
            formatter.write_dl([(name, self.summary(name)) for name in self.list_commands(ctx)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the example below the verbs."""
        write_example(formatter, self.example)


class LazyGroup(NounGroup):
    """A group whose commands are modules, whose names begin with *prefix*: only the one that is asked for is imported."""

    def __init__(self, *args: Any, summaries: Mapping[str, str], prefix: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.summaries, self.prefix = summaries, prefix

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in the order of the table."""
        return [*self.summaries]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, unless it stands in the group's own module."""
        if cmd_name in self.commands or cmd_name not in self.summaries:
            return super().get_command(ctx, cmd_name)
        found: click.Command = importlib.import_module(f"{self.prefix}{cmd_name}").command
        return found

    def summary(self, name: str) -> str:
        """Return it from the table, without importing the command."""
        return self.summaries[name]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names, without importing them."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text)
            for name, text in self.summaries.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@dataclass(frozen=True)
class CommandReport:
    """What a command has found or done: as text for people, as one object for programs."""

    text: str
    data: Mapping[str, Any]
    code: int = 0


def nothing_recorded(state_dir: Path, data: Mapping[str, Any]) -> CommandReport:
    """Return the report of a folder without records; what it says to run can be run in this folder."""
    from pathlib import Path

    command = "pytest suites/ --system local" if Path("suites").is_dir() else "mlhpc init"
    return CommandReport(f"nothing is recorded in {state_dir}; run: {command}\n", data)


class DataCommand(Command):
    """A command that returns a :class:`CommandReport`, printed as text or JSON or written to a file.

    Where ``--output`` is a folder that the command itself fills, it has that option of its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from pathlib import Path

        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--json", "as_json"], is_flag=True, help="For programs: one object.")
        )
        self.fills_output = any(one.name == "output" for one in self.params)
        if not self.fills_output:
            self.params.append(
                click.Option(
                    ["--output"],
                    type=Path,
                    metavar="FILE",
                    help="Write it there; the file is replaced whole.",
                )
            )

    def invoke(self, ctx: click.Context) -> int:
        """Run the command, print what it found and return its exit code."""
        as_json: bool = ctx.params.pop("as_json")
        output: Path | None = None if self.fills_output else ctx.params.pop("output")
        report: CommandReport = super().invoke(ctx)
        text = report.text
        if as_json:
            from pytest_mlhpc.store.text import object_text

            text = object_text(ctx.command_path.partition(" ")[2], report.data)
        if output is not None:
            from pytest_mlhpc.store.locations import replace_file

            replace_file(output, text)
        elif as_json:
            sys.stdout.write(text)
        else:
            from pytest_mlhpc.store.text import write

            write(text)
        return report.code
