"""No torch. The arguments of an order to the process with load (``node/child_process.py``), read with bounds; and how one fails."""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Optional

#: Said before anything that may hang; the text names it to the user.
Begun = Callable[[str], None]


class ArgumentError(ValueError):
    """An argument of an order is missing or odd: ``str(error)`` names it."""


class Failed(RuntimeError):  # noqa: N818 - an answer to an order, not a defect
    """An order could not be carried out. ``why`` is one word for programs, ``str(error)`` a sentence for users."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


class Arguments:
    """The arguments of one order, read with bounds."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.round = self.whole("round", 0, 0, 1_000_000)
        self.level = self.text("level", "quick")
        if self.level not in ("quick", "deep"):
            raise ArgumentError(f"level is {self.level!r}, not quick or deep")

    def whole(self, name: str, default: Optional[int], least: int, most: int) -> int:
        """Return a whole number between *least* and *most*; a *default* of None says that it must be given."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ArgumentError(f"{name} is {value!r}, not a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: Optional[float], least: float, most: float) -> float:
        """Return a number between *least* and *most*."""
        value = self._values.get(name, default)
        odd = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
        if odd or not least <= value <= most:
            raise ArgumentError(f"{name} is {value!r}, not a number from {least:g} to {most:g}")
        return float(value)

    def text(self, name: str, default: Optional[str]) -> str:
        """Return a text without control characters."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or len(value) > 4096 or any(ord(letter) < 32 for letter in value):
            raise ArgumentError(f"{name} is {value!r:.80}, not a text")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; it must be given."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} is {value!r:.80}, not true or false")
        return value

    def seconds(self, quick: float, deep: float) -> float:
        """Return how long to measure: ``seconds`` if given, else what the level takes."""
        return self.number("seconds", quick if self.level == "quick" else deep, 0.01, 3600.0)
