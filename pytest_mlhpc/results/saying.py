"""What commands that report say: what they found to standard output, all else to standard error."""

from __future__ import annotations

import sys
from typing import Final

from pytest_mlhpc.results.text import clean

#: Exit code, as pytest's: there was nothing to do it with.
NOTHING: Final = 5


def tell(text: str) -> None:
    """Say a sentence to whoever looks on."""
    sys.stderr.write(f"{clean(text)}\n")


def nothing(text: str) -> int:
    """Say why there is nothing to report, and return the exit code of that."""
    tell(text)
    return NOTHING


def write(text: str) -> None:
    """Write a report; letters that the terminal does not know are shown as question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(clean(text).encode(encoding, "replace").decode(encoding))
