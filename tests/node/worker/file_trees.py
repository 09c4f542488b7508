"""Folders of small files, as /sys, /proc and data sets have them."""

from collections.abc import Mapping
from pathlib import Path


def write_tree(root: Path, files: Mapping[str, object]) -> Path:
    """Write each of *files*, path -> text, below *root* and return it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root
