"""Tables of what goes in and what must come out, a YAML file for each subject."""

from pathlib import Path
from typing import Any

import yaml


def table(subject: str) -> dict[str, Any]:
    """Return the tables of one subject."""
    return yaml.safe_load(Path(__file__).with_name(f"{subject}.yaml").read_text())
