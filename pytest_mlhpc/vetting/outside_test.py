"""The one test of `mlhpc vet --system`: its nodes are vetted, which ``outside.py`` looks at."""

from __future__ import annotations

from typing import Any


def test_nodes(vetting: Any) -> None:
    """Have the verdict."""
