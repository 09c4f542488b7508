"""Tables of what goes in and what must come out, a TOML file for each subject."""

import tomllib
from pathlib import Path
from typing import Any


def table(subject: str) -> dict[str, Any]:
    """Return the tables of one subject."""
    return tomllib.loads(Path(__file__).with_name(f"{subject}.toml").read_text())
