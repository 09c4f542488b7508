"""What an allocation's agent said, written down before its pods are deleted: logs go with pods, and results must not."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_mlhpc.results.foreign import read_json

FILE: Final = "told.jsonl"
_SCHEMA: Final = 1


@dataclass(frozen=True)
class Told:
    """The nodes that it ran on, and all worker lines."""

    nodes: tuple[str, ...]
    lines: bytes


def write(directory: Path, nodes: Sequence[str], lines: bytes) -> None:
    """Write it down as a whole, or not at all: then the result is lost if this session is killed before it is recorded."""
    head = json.dumps({"schema": _SCHEMA, "nodes": list(nodes)}).encode() + b"\n"
    temporary = directory / f"{FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with temporary.open("wb") as file:
            file.write(head + lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / FILE)


def read(directory: Path) -> Told | None:
    """Return what was written down; None where nothing was, or nothing that can be read."""
    try:
        head, _, lines = (directory / FILE).read_bytes().partition(b"\n")
        found = read_json(head)
        if found["schema"] != _SCHEMA:
            return None
        return Told(tuple(map(str, found["nodes"])), lines)
    except (OSError, ValueError, TypeError, KeyError):
        return None
