"""Systems files as tests of what is rendered use them: loaded, previewed, and checked by the command."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_mlhpc.builtin import make_manager
from pytest_mlhpc.cli import main
from pytest_mlhpc.cli.systems import Previews, previews
from pytest_mlhpc.config.systems import load_systems

ROOT = Path(__file__).parents[2]


def previews_of(path: Path, **environ: str) -> Previews:
    """Return what the systems file *path* renders to."""
    hook = make_manager().hook
    schedulers = {name: model for each in hook.mlhpc_schedulers() for name, model in each.items()}
    return previews(load_systems(path, schedulers=schedulers, environ=environ), hook)


def mlhpc_systems(*argv: str) -> int:
    """Run ``mlhpc systems`` with these arguments; return its exit code."""
    return main(["systems", *argv])


class Page:
    """A page of the documentation."""

    def __init__(self, name: str) -> None:
        self.text = (ROOT / "docs" / name).read_text(encoding="utf-8")

    def examples(self) -> list[str]:
        """Return the blocks of YAML."""
        return re.findall(r"```yaml\n(.*?)```", self.text, re.DOTALL)

    def keys(self, heading: str) -> set[str]:
        """Return the names before the colons of the list below *heading*."""
        section = self.text.partition(f"{heading}\n")[2].partition("\n#")[0]
        heads = re.findall(r"^- (`.*?`):\s", section, re.MULTILINE)
        return {name for head in heads for name in re.findall(r"`(\w+)", head)}
