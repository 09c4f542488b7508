"""The table of units that a test may write, and how they become base units (node/protocol/schema.py). Pure."""

from __future__ import annotations

import re

from pytest_mlhpc.node.protocol.schema import UNITS

_SI = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}  # fmt: skip
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}

#: What may stand behind a prefix -> base unit and factor.
_PREFIXED = {
    "s": ("s", 1.0), "B": ("B", 1.0), "bit": ("B", 1 / 8), "b": ("B", 1 / 8), "FLOP": ("FLOP", 1.0), "FLOPS": ("FLOP/s", 1.0),
    "J": ("J", 1.0), "W": ("W", 1.0), "Hz": ("Hz", 1.0), "IOPS": ("items/s", 1.0), "op": ("items", 1.0), "ops": ("items", 1.0),
}  # fmt: skip
_PLAIN = {
    "1": ("1", 1.0), "%": ("1", 0.01), "min": ("s", 60.0), "h": ("s", 3600.0), "K": ("K", 1.0),
    **dict.fromkeys(("sample", "samples", "img", "image", "images"), ("samples", 1.0)),
    **dict.fromkeys(("item", "items"), ("items", 1.0)),
    **dict.fromkeys(("token", "tokens"), ("tokens", 1.0)),
}  # fmt: skip
_PREFIX = re.compile(rf"({'|'.join([*_BINARY, *_SI])})(.+)")

#: A choice of what can be written, for messages.
EXAMPLES = "1, %, s, ms, us, B, GiB, B/s, MB/s, GB/s, Gbit/s, FLOP/s, GFLOP/s, TFLOPS, J, W, Hz, K, items/s, samples/s, img/s, tokens/s"


def base_unit(text: object) -> tuple[str, float]:
    """Return the base unit of *text* and the factor to it: ``MB/s`` gives ``B/s`` and 1e6.

    Raises:
        ValueError: it is not in the table.
    """
    top, slash, bottom = text.partition("/") if isinstance(text, str) else ("", "", "")
    unit, factor = _single(top)
    if slash:
        below, divisor = _single(bottom)
        unit, factor = f"{unit}/{below}", factor / divisor
    if unit not in UNITS:
        raise ValueError(f"unit {text!r} is unknown; write one like {EXAMPLES}, or 1 for a plain number")
    return unit, factor


def better_of(unit: str) -> str | None:
    """Return which direction of a figure in this base unit is an improvement, None where it does not follow."""
    if unit.endswith(("/s", "/J")):
        return "higher"
    return "lower" if unit in {"s", "J"} else None


def _single(text: str) -> tuple[str, float]:
    """Return the base of a unit without a slash, and its factor; an unknown one is its own base."""
    if found := _PLAIN.get(text) or _PREFIXED.get(text):
        return found
    match = _PREFIX.fullmatch(text)
    base, factor = _PREFIXED.get(match[2], ("", 1.0)) if match else ("", 1.0)
    if not match or not base:
        return text, 1.0
    return base, factor * ({**_SI, **_BINARY}[match[1]])
