"""Searches a program's output for metrics, as a process of its own that can be ended: ``python -I -S search.py``.

Standard input is one JSON object ``{"path": ..., "patterns": {name: pattern}}``; standard output is ``{name: [text]}``
with the first group of every match. A regular expression may take for ever, and Python's cannot be interrupted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping


def search(patterns: Mapping[str, str], text: str) -> dict[str, list[str]]:
    """Return what the first group of each pattern matched, in order. ``^`` and ``$`` match at every line."""
    found: dict[str, list[str]] = {}
    for name, pattern in patterns.items():
        matches = re.finditer(pattern, text, re.MULTILINE)
        found[name] = [match[1] for match in matches if match[1] is not None]
    return found


def main() -> int:
    """Answer the one request on standard input."""
    request = json.load(sys.stdin)
    with open(request["path"], encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a light script
        text = file.read()
    json.dump(search(request["patterns"], text), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
