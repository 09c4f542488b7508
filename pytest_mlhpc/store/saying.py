"""What commands that report say: what they found to standard output, all else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from pytest_mlhpc.store.text import clean


def tell(text: str) -> None:
    """Say a sentence to whoever looks on."""
    sys.stderr.write(f"{clean(text)}\n")


def object_text(command: str, data: Mapping[str, Any]) -> str:
    """Return *data* as one JSON object with the ``schema`` of a command, such as ``records list``."""
    schema = f"mlhpc/{command.replace(' ', '-')}/1"
    return f"{json.dumps({'schema': schema, **data}, indent=1, allow_nan=False)}\n"


def write(text: str) -> None:
    """Write a report; letters that the terminal does not know are shown as question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(clean(text).encode(encoding, "replace").decode(encoding))
