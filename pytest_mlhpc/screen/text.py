"""Figures as words."""

from __future__ import annotations


def percent(share: float) -> str:
    """Return ``71 %``."""
    return f"{100 * share:.0f} %"


def seconds_text(seconds: float) -> str:
    """Return ``3.2 ms``, ``1.5 s``, ``12 min``, ``3.5 h``."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bytes_text(count: float) -> str:
    """Return ``12.5 MiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count:.0f} B"


def many(count: int, what: str, ending: str = "s") -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'' if count == 1 else ending}"
