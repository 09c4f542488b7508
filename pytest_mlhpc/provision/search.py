"""The search of a program's output for metrics, a process of its own that can be ended: ``python -I -S search.py``.

A regular expression may run for ever, and Python's cannot be interrupted: hence a file of its own, without imports of this
package. Standard input is one JSON object ``{"path": ..., "patterns": {name: pattern}}``. Standard output is
``{name: [[text, after]]}`` with the first group of every match, and what stands behind it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

#: Characters behind a group that are returned: a unit is shorter.
AFTER = 32


def search(patterns: Mapping[str, str], text: str) -> dict[str, list[list[str]]]:
    """Return the matches of each pattern's first group, in order, with what follows. ``^`` and ``$`` match at every line."""
    found: dict[str, list[list[str]]] = {}
    for name, pattern in patterns.items():
        matches = re.finditer(pattern, text, re.MULTILINE)
        found[name] = [
            [match[1], text[match.end(1) : match.end(1) + AFTER].partition("\n")[0]]
            for match in matches
            if match[1] is not None
        ]
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
